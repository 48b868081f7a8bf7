"""The rollout side as the trainer sees it: one object that generates for every agent and takes new weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.types import Group, GroupRequest
from rollout.engine import EngineSpec
from rollout.placement import Plan, assign_groups, place_agents
from rollout.runtime import Call, Resources, Runtime
from rollout.worker import RolloutWorker


class RolloutPool:
    """Workers, placed over the agents, that are used together.

    Args:
        runtime: where the workers live.
        plan: how many workers there are, and what each asks for.
        backend: `vllm` or `hf`.
        specs: one engine specification per agent.
        timeout: limit of every wait, in seconds.
    """

    def __init__(self, runtime: Runtime, plan: Plan, backend: str, specs: Sequence[EngineSpec], timeout: float) -> None:
        self._runtime = runtime
        self._timeout = timeout
        self._max_new_tokens = specs[0].sampling.max_new_tokens
        self._placement = place_agents(len(specs), plan.workers)
        resources = Resources(plan.worker_cpus, plan.worker_gpus, plan.worker_threads)
        self._workers = [
            runtime.create(
                f"rollout worker {index}", RolloutWorker, resources, backend, [specs[agent] for agent in agents]
            )
            for index, agents in enumerate(self._placement)
        ]

    def start(self) -> list[Call]:
        """Begin to start every engine; the calls are for `Runtime.gather`."""
        return [(worker, worker.submit("start")) for worker in self._workers]

    def generate(self, requests: list[GroupRequest], weights_version: int) -> list[Group]:
        """The groups asked for, in the order of the requests, generated with weights of `weights_version`.

        Raises:
            WeightTransferError: an engine holds another version.
            RolloutError: an engine failed.
            ActorError: a worker died, or took longer than the limit.
        """
        shares = assign_groups(requests, self._placement, self._max_new_tokens)
        calls = [
            (worker, worker.submit("generate", share, weights_version))
            for worker, share in zip(self._workers, shares, strict=True)
            if share
        ]
        results = self._runtime.gather(calls, "generate", self._timeout)
        groups = {(group.agent, group.prompt): group for result in results for group in result}
        return [groups[request.agent, request.prompt] for request in requests]

    def update_weights(self, weights_A: Sequence[Any], version: int) -> None:
        """Push every agent's weights into every engine that serves it.

        Args:
            weights_A: per agent, a `Weights` record or the runtime's reference to one.
            version: the version they are.
        """
        calls = [
            (worker, worker.submit("update_weights", agent, weights_A[agent], version))
            for worker, agents in zip(self._workers, self._placement, strict=True)
            for agent in agents
        ]
        self._runtime.gather(calls, f"take weights version {version}", self._timeout)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            self._runtime.kill(worker)
        self._workers = []
