"""A rollout worker: the engines of one or more agents in one process. Plain, so that it runs with and without Ray."""

from __future__ import annotations

from common.errors import RolloutError
from common.types import Group, GroupRequest, Weights
from rollout.engine import Engine, EngineSpec, build_engine, check_version


class RolloutWorker:
    """Hosts an engine per agent it serves."""

    def __init__(self, backend: str, specs: list[EngineSpec]) -> None:
        self._backend = backend
        self._specs = specs
        self._engines: dict[int, Engine] = {}

    def start(self) -> None:
        """Build the engines.

        Raises:
            RolloutError: one does not start.
        """
        self._engines = {spec.agent: build_engine(self._backend, spec) for spec in self._specs}

    def generate(self, requests: list[GroupRequest], weights_version: int) -> list[Group]:
        """The groups asked for, in the order of the requests.

        Raises:
            WeightTransferError: an engine holds another version than `weights_version`.
            RolloutError: an engine failed.
        """
        groups: dict[tuple[int, int], Group] = {}
        for agent in sorted({request.agent for request in requests}):
            engine = self._engines[agent]
            check_version(agent, engine.weights_version, weights_version)
            own = [request for request in requests if request.agent == agent]
            for group in self._generate(agent, engine, own):
                groups[group.agent, group.prompt] = group
        return [groups[request.agent, request.prompt] for request in requests]

    def update_weights(self, agent: int, weights: Weights, version: int) -> int:
        """Give an agent's engine new weights; returns the version it then holds."""
        engine = self._engines[agent]
        engine.update_weights(weights, version)
        return engine.weights_version

    def close(self) -> None:
        """Close every engine."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    @staticmethod
    def _generate(agent: int, engine: Engine, requests: list[GroupRequest]) -> list[Group]:
        try:
            return engine.generate(requests)
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(
                f"the engine of agent {agent} failed on {len(requests)} group(s): {type(error).__name__}: {error}"
            ) from error
