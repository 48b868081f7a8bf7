"""How a call travels: at once in this process, or to a Ray actor. The objects that are called are the same."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from common.errors import ActorError, MAGRPOError, ResourceError
from rollout.placement import Cluster

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ACTOR_ENVIRONMENT = {
    # glibc keeps large blocks instead of returning them: an update then takes a twentieth of the page faults.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    # An actor's output is shown to the user, so it should be worth reading.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Resources:
    """What one actor asks for."""

    cpus: float
    gpus: float
    threads: int


class Actor(Protocol):
    """An object somewhere. `submit` returns a reference that can be an argument of another `submit`."""

    name: str

    def submit(self, method: str, *args: Any) -> Any:
        """Start a call."""


Call = tuple[Actor, Any]
"""A started call: who was asked, and the reference to the result."""


class Runtime(Protocol):
    """Where actors live."""

    def cluster(self) -> Cluster:
        """What there is to ask for."""

    def create(self, name: str, cls: type, resources: Resources, *args: Any) -> Actor:
        """Start an actor. Its constructor must be cheap: what can fail belongs into a call."""

    def gather(self, calls: Sequence[Call], waiting_for: str, timeout: float) -> list[Any]:
        """The results of started calls; the first failure ends the wait."""

    def kill(self, actor: Actor) -> None:
        """End an actor."""

    def close(self) -> None:
        """End what this runtime started."""


class _LocalActor:
    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target

    def submit(self, method: str, *args: Any) -> Any:
        return getattr(self.target, method)(*args)


class LocalRuntime:
    """Everything in this process, one call after the other."""

    def cluster(self) -> Cluster:
        """This machine."""
        return Cluster(len(os.sched_getaffinity(0)), torch.cuda.device_count(), 1)

    def create(self, name: str, cls: type, resources: Resources, *args: Any) -> Actor:
        """Build the object here."""
        return _LocalActor(name, cls(*args))

    def gather(self, calls: Sequence[Call], waiting_for: str, timeout: float) -> list[Any]:
        """The results, which are there already."""
        return [result for _, result in calls]

    def kill(self, actor: Actor) -> None:
        """Close the object if it can be closed."""
        if hasattr(actor.target, "close"):
            actor.target.close()

    def close(self) -> None:
        """Nothing was started."""


class _RayActor:
    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle

    def submit(self, method: str, *args: Any) -> Any:
        return getattr(self.handle, method).remote(*args)


class RayRuntime:
    """Ray actors, in the cluster of RAY_ADDRESS, one that runs on this machine, or one started here."""

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._started_here = not ray.is_initialized()
        if self._started_here:
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(include_dashboard=False, logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ResourceError(
                    f"no Ray cluster could be reached or started: {error}. Check RAY_ADDRESS and `ray status`, or run "
                    "without Ray (rollout_workers=0)"
                ) from error

    def cluster(self) -> Cluster:
        """Totals over the living nodes."""
        total = self._ray.cluster_resources()
        return Cluster(total.get("CPU", 0.0), total.get("GPU", 0.0), len([n for n in self._ray.nodes() if n["Alive"]]))

    def create(self, name: str, cls: type, resources: Resources, *args: Any) -> Actor:
        """Start the actor process, with its threads limited before any library counts cores."""
        threads = {key: str(resources.threads) for key in _THREAD_VARIABLES}
        actor_class = self._ray.remote(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": threads | _ACTOR_ENVIRONMENT},
        )(cls)
        return _RayActor(name, actor_class.remote(*args))

    def gather(self, calls: Sequence[Call], waiting_for: str, timeout: float) -> list[Any]:
        """The results in order.

        Raises:
            ActorError: an actor died, or the time is over; the message says what was waited for.
            MAGRPOError: what a call raised.
        """
        owners = {reference: actor for actor, reference in calls}
        pending = list(owners)
        deadline = time.monotonic() + timeout
        while pending:
            done, pending = self._ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise ActorError(
                    f"waited {timeout:g} s for {', '.join(owners[ref].name for ref in pending)} to {waiting_for}; free "
                    f"now: {_free(self._ray.available_resources())}. Raise rollout_timeout or learner_timeout if the "
                    "work takes longer, or free resources if an actor could not be placed"
                )
            for reference in done:
                self._raise_failure(reference, owners[reference].name, waiting_for)
        return self._ray.get([reference for _, reference in calls])

    def kill(self, actor: Actor) -> None:
        """End the actor's process."""
        self._ray.kill(actor.handle)

    def close(self) -> None:
        """Shut the cluster down if it was started here."""
        if self._started_here:
            self._ray.shutdown()

    def _raise_failure(self, reference: Any, name: str, waiting_for: str) -> None:
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MAGRPOError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayActorError as error:
            raise ActorError(
                f"{name} died while it was asked to {waiting_for}: {error}. If it was killed for memory, lower "
                "rollout_buffer_size, num_generations or max_new_tokens, or use fewer rollout workers"
            ) from None


def _free(available: dict[str, float]) -> str:
    return ", ".join(f"{available.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU"))
