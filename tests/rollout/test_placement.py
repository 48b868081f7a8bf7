"""Who generates what, and what is asked of a cluster: for all small numbers of agents, workers, cores and GPUs."""

from __future__ import annotations

import itertools
import math

import pytest

from common.errors import ResourceError
from common.types import GroupRequest
from rollout.placement import Cluster, assign_groups, place_agents, plan_resources

COUNTS = [*itertools.product(range(1, 7), range(1, 10))]


@pytest.mark.parametrize("num_agents, num_workers", COUNTS)
def test_every_agent_is_served_and_every_worker_serves(num_agents, num_workers):
    placement = place_agents(num_agents, num_workers)
    assert len(placement) == num_workers
    served = [agent for agents in placement for agent in agents]
    assert set(served) == set(range(num_agents))
    assert all(len(set(agents)) == len(agents) >= 1 for agents in placement)
    replicas = [served.count(agent) for agent in range(num_agents)]
    assert max(replicas) - min(replicas) <= 1
    if num_workers >= num_agents:
        assert all(len(agents) == 1 for agents in placement)
    else:
        assert replicas == [1] * num_agents
        assert max(map(len, placement)) - min(map(len, placement)) <= 1


def requests(num_agents: int, prompts: int) -> list[GroupRequest]:
    return [
        GroupRequest(agent, p, tuple(range(1 + 7 * p)), tuple(range(4)))
        for agent in range(num_agents)
        for p in range(prompts)
    ]


@pytest.mark.parametrize("num_agents, num_workers", COUNTS)
def test_every_group_goes_whole_to_one_worker_that_serves_its_agent(num_agents, num_workers):
    asked = requests(num_agents, 5)
    placement = place_agents(num_agents, num_workers)
    shares = assign_groups(asked, placement, max_new_tokens=16)
    assert len(shares) == num_workers
    placed = [request for share in shares for request in share]
    assert sorted((r.agent, r.prompt) for r in placed) == sorted((r.agent, r.prompt) for r in asked)
    assert all(request in asked for request in placed)
    for agents, share in zip(placement, shares, strict=True):
        assert all(request.agent in agents for request in share)


@pytest.mark.parametrize("num_agents, replicas", [(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)])
def test_replicas_of_an_agent_get_equal_shares(num_agents, replicas):
    placement = place_agents(num_agents, num_agents * replicas)
    for prompts in (replicas, 4 * replicas, 4 * replicas + 1):
        asked = requests(num_agents, prompts)
        shares = assign_groups(asked, placement, max_new_tokens=100)
        for agent in range(num_agents):
            own = [share for agents, share in zip(placement, shares, strict=True) if agent in agents]
            loads = [sum(len(r.prompt_ids) + 400 for r in share) for share in own]
            largest = max(len(r.prompt_ids) + 400 for r in asked)
            assert max(loads) - min(loads) <= largest
            assert max(map(len, own)) - min(map(len, own)) <= 1


def test_with_fewer_groups_than_replicas_some_rest():
    shares = assign_groups(requests(1, 2), place_agents(1, 4), 10)
    assert sorted(map(len, shares)) == [0, 0, 1, 1]


CLUSTERS = [
    Cluster(cpus, gpus, nodes)
    for cpus, gpus, nodes in itertools.product((1, 2, 3, 4, 8, 30, 64), (0, 1, 2, 3, 8), (1, 2, 4))
    if cpus % nodes == 0 and gpus % nodes == 0
]


def fits(actors: int, share: float, total: float, bins: float) -> bool:
    """Whether equal claims fit into equal bins of a total, none of them across two bins."""
    return share == 0 or actors <= bins * math.floor(total / bins / share + 1e-9)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda c: f"{c.cpus} cpus, {c.gpus} gpus, {c.nodes} nodes")
def test_what_is_planned_fits_into_the_nodes_of_the_cluster(cluster):
    for num_agents, workers in itertools.product((1, 2, 3, 5), (None, 1, 2, 3, 7)):
        try:
            plan = plan_resources(cluster, num_agents, workers, None, None)
        except ResourceError:
            assert (workers or num_agents) > cluster.cpus
            continue
        actors = plan.workers + 1
        case = (num_agents, workers, plan)
        assert plan.workers == workers or workers is None, case
        assert plan.worker_cpus == plan.learner_cpus > 0 and plan.worker_gpus == plan.learner_gpus, case
        assert fits(actors, plan.worker_cpus, cluster.cpus, cluster.nodes), case
        assert fits(actors, plan.worker_gpus, cluster.gpus, cluster.gpus), case
        assert plan.worker_gpus <= 1 and (plan.worker_gpus > 0) == (cluster.gpus > 0), case
        workers_on_a_node = math.ceil(plan.workers / cluster.nodes)
        cores = cluster.cpus / cluster.nodes
        assert 1 <= plan.worker_threads <= max(1, cores / workers_on_a_node), case
        assert 1 <= plan.learner_threads <= max(1, cores), case


def test_two_cores_take_a_learner_and_two_workers():
    plan = plan_resources(Cluster(2, 0, 1), 2, None, None, None)
    assert plan.workers == 2 and 3 * plan.worker_cpus <= 2
    assert plan.worker_threads == 1 and plan.learner_threads == 2


def test_one_core_takes_one_worker_for_all_agents():
    assert plan_resources(Cluster(1, 0, 1), 3, None, None, None).workers == 1


@pytest.mark.parametrize("gpus, workers, share", [(1, 2, 0.33), (3, 2, 1.0), (8, 2, 1.0), (2, 2, 0.5), (4, 7, 0.5)])
def test_gpus_are_whole_where_there_are_enough_and_parts_of_one_otherwise(gpus, workers, share):
    plan = plan_resources(Cluster(32, gpus, 1), 2, workers, None, None)
    assert plan.worker_gpus == plan.learner_gpus == share


def test_gpus_that_are_asked_for_are_asked_for():
    plan = plan_resources(Cluster(16, 4, 1), 2, 3, 1, 0.5)
    assert (plan.worker_gpus, plan.learner_gpus) == (1, 0.5)
    none = plan_resources(Cluster(16, 4, 1), 2, 3, 0, 0)
    assert (none.worker_gpus, none.learner_gpus) == (0, 0)


@pytest.mark.parametrize(
    "cluster, workers, worker_gpus, learner_gpus, numbers",
    [
        (Cluster(2, 0, 1), 3, None, None, ["rollout_workers=3", "at least 3", "there are 2", "at most 2"]),
        (Cluster(8, 0, 1), 2, 1, None, ["2 rollout worker(s)", "1 GPU(s) each", "ask for 2 GPU(s)", "there are 0"]),
        (Cluster(8, 2, 1), 2, 1, 1, ["ask for 3 GPU(s)", "there are 2", "gpus_per_rollout_worker", "learner_gpus"]),
        (Cluster(8, 0, 1), 2, None, 1, ["a learner with 1", "ask for 1 GPU(s)", "there are 0"]),
        (Cluster(8, 2, 1), 3, 0.6, 0.2, ["0.6", "2"]),
        (Cluster(8, 4, 1), 1, 1.5, 0, ["1.5"]),
        (Cluster(8, 2, 2), 1, 2, 0, ["2"]),
    ],
    ids=["cores", "no gpus", "too few gpus", "learner", "across two gpus", "one and a half", "across two nodes"],
)
def test_what_cannot_fit_is_refused_with_the_numbers(cluster, workers, worker_gpus, learner_gpus, numbers):
    with pytest.raises(ResourceError) as refused:
        plan_resources(cluster, 2, workers, worker_gpus, learner_gpus)
    assert all(number in str(refused.value) for number in numbers)
