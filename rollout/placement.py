"""Who generates what, and what it takes: pure functions of counts and sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import ResourceError
from common.types import GroupRequest


@dataclass(frozen=True)
class Cluster:
    """Totals of what can be asked for."""

    cpus: float
    gpus: float
    nodes: int


@dataclass(frozen=True)
class Plan:
    """What each actor asks Ray for, and how many threads it computes with.

    Learner and workers take turns, so each side's threads may fill the cores although its CPU claim is a share.
    """

    workers: int
    worker_cpus: float
    worker_gpus: float
    worker_threads: int
    learner_cpus: float
    learner_gpus: float
    learner_threads: int


def place_agents(num_agents: int, num_workers: int) -> list[tuple[int, ...]]:
    """The agents each worker serves.

    With at least as many workers as agents every worker serves one, and agents have replicas; with fewer, a worker
    serves several.
    """
    if num_workers >= num_agents:
        return [(worker % num_agents,) for worker in range(num_workers)]
    return [tuple(range(worker, num_agents, num_workers)) for worker in range(num_workers)]


def assign_groups(
    requests: list[GroupRequest], placement: list[tuple[int, ...]], max_new_tokens: int
) -> list[list[GroupRequest]]:
    """The requests each worker gets: a group stays whole, and replicas get equal shares of expected tokens."""
    shares: list[list[GroupRequest]] = [[] for _ in placement]
    load = [0] * len(placement)

    def tokens(request: GroupRequest) -> int:
        return len(request.prompt_ids) + len(request.seeds_G) * max_new_tokens

    for request in sorted(requests, key=tokens, reverse=True):
        replicas = [worker for worker, agents in enumerate(placement) if request.agent in agents]
        worker = min(replicas, key=lambda w: load[w])
        shares[worker].append(request)
        load[worker] += tokens(request)
    return shares


def plan_resources(
    cluster: Cluster,
    num_agents: int,
    rollout_workers: int | None,
    gpus_per_worker: float | None,
    learner_gpus: float | None,
) -> Plan:
    """What to ask for, in fractions where the cluster is small.

    Raises:
        ResourceError: it cannot fit; the message has the numbers.
    """
    on_gpus = cluster.gpus > 0 if gpus_per_worker is None else gpus_per_worker > 0
    slots = max(1, int(cluster.cpus))
    workers = rollout_workers or (num_agents if on_gpus else min(num_agents, slots))
    share = _gpu_share(cluster.gpus, workers + 1)
    worker_gpus = share if gpus_per_worker is None else gpus_per_worker
    learner = share if learner_gpus is None else learner_gpus
    if not _gpus_fit([worker_gpus] * workers + [learner], cluster):
        raise ResourceError(
            f"{workers} rollout worker(s) with {worker_gpus:g} GPU(s) each and a learner with {learner:g} ask for "
            f"{workers * worker_gpus + learner:g} GPU(s), but there are {cluster.gpus:g} on {cluster.nodes} node(s) "
            "(an actor takes whole GPUs of one node, or a part of one): lower rollout_workers, gpus_per_rollout_worker "
            "or learner_gpus, or add GPUs"
        )
    if workers > slots:
        raise ResourceError(
            f"rollout_workers={workers} needs at least {workers} CPU core(s), one each, but there are "
            f"{cluster.cpus:g}: set rollout_workers to at most {slots}, or add nodes"
        )
    cores_per_node = cluster.cpus / cluster.nodes
    workers_per_node = math.ceil(workers / cluster.nodes)
    cpus = math.floor(100 * cores_per_node / math.ceil((workers + 1) / cluster.nodes)) / 100
    return Plan(
        workers=workers,
        worker_cpus=cpus,
        worker_gpus=worker_gpus,
        worker_threads=max(1, int(cores_per_node / workers_per_node)),
        learner_cpus=cpus,
        learner_gpus=learner,
        learner_threads=max(1, int(cores_per_node)),
    )


def _gpu_share(gpus: float, actors: int) -> float:
    """A whole GPU each where there are enough, else equal parts of one that do not straddle two."""
    if gpus <= 0:
        return 0.0
    per_gpu = math.ceil(actors / gpus)
    return 1.0 if per_gpu <= 1 else math.floor(100 / per_gpu) / 100


def _gpus_fit(claims: list[float], cluster: Cluster) -> bool:
    """Whether claims, largest first, find whole GPUs of one node or a part of one GPU."""
    free = [[1.0] * int(cluster.gpus // cluster.nodes) for _ in range(cluster.nodes)]
    for claim in sorted((claim for claim in claims if claim > 0), reverse=True):
        needed, part = (int(claim), 1.0) if claim >= 1 else (1, claim)
        if claim > 1 and claim != needed:
            return False
        for node in free:
            fitting = [gpu for gpu, left in enumerate(node) if left >= part - 1e-6]
            if len(fitting) >= needed:
                for gpu in fitting[:needed]:
                    node[gpu] -= part
                break
        else:
            return False
    return True
