"""The pool of rollout workers in a real Ray cluster: placements, weights, and every way in which a worker can fail."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time

import numpy as np
import psutil
import pytest
import ray

from common.errors import ActorError, RolloutError, WeightTransferError
from common.types import GroupRequest
from common.weights import pack
from rollout.placement import Plan
from rollout.pool import RolloutPool
from rollout.runtime import RayRuntime
from tests.builders import exact_logprobs, tiny_model
from tests.engines import engine_spec, moved

AGENTS = 2
PROMPTS = ((5, 6, 7), (8, 9, 10, 11), tuple(range(3, 60)), (12,))
REQUESTS = [
    GroupRequest(agent, prompt, prompt_ids, tuple(1000 * agent + 10 * prompt + g for g in range(3)))
    for agent in range(AGENTS)
    for prompt, prompt_ids in enumerate(PROMPTS)
]
SLOW_REQUEST = GroupRequest(0, 0, (5, 6, 7), (1, 2))


def plan(workers: int, cpus: float = 0.05) -> Plan:
    return Plan(workers, cpus, 0.0, 1, cpus, 0.0, 1)


def models(moves: int = 0):
    """The two agents' models after some moves of every parameter."""
    agents = [tiny_model(seed=agent) for agent in range(AGENTS)]
    for move in range(moves):
        agents = [moved(model, seed=move) for model in agents]
    return agents


def push(pool: RolloutPool, models, version: int) -> None:
    pool.update_weights([ray.put(pack(model.named_parameters())) for model in models], version)


def process_ids(pool: RolloutPool) -> list[int]:
    return ray.get([worker.handle.__ray_call__.remote(lambda _: os.getpid()) for worker in pool._workers])


@pytest.fixture(scope="module")
def runtime(ray_cluster):
    return RayRuntime()


@pytest.fixture(scope="module")
def pools(runtime, tokenizer):
    """Pools by the number of their workers, all with the same weights of version 0."""
    specs = [engine_spec(model.config, tokenizer, agent=agent) for agent, model in enumerate(models())]
    pools = {workers: RolloutPool(runtime, plan(workers), "vllm", specs, 120.0) for workers in (1, 3)}
    runtime.gather([call for pool in pools.values() for call in pool.start()], "start", 240.0)
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def slow_pool(runtime, tokenizer):
    """One worker that needs half a minute for `SLOW_REQUEST`."""
    model = tiny_model()
    spec = engine_spec(model.config, tokenizer, max_new_tokens=20_000, stop_token_ids=())
    pool = RolloutPool(runtime, plan(1), "hf", [spec], 60.0)
    runtime.gather(pool.start(), "start", 120.0)
    push(pool, [model], 0)
    yield pool
    pool.close()


def test_completions_do_not_depend_on_the_placement(pools):
    for pool in pools.values():
        push(pool, models(), 0)
    expected, *others = [pool.generate(REQUESTS, 0) for pool in pools.values()]
    for groups in others:
        for group, same in zip(groups, expected, strict=True):
            assert (group.agent, group.prompt, group.prompt_ids) == (same.agent, same.prompt, same.prompt_ids)
            for ours, theirs in zip(group.completions_G, same.completions_G, strict=True):
                assert ours.token_ids == theirs.token_ids
                assert ours.text == theirs.text
                np.testing.assert_allclose(ours.logprobs_T, theirs.logprobs_T, atol=1e-4)


def test_groups_come_back_in_the_order_they_were_asked_for(pools):
    push(pools[3], models(), 0)
    asked = REQUESTS[::-1]
    groups = pools[3].generate(asked, 0)
    assert [(g.agent, g.prompt) for g in groups] == [(r.agent, r.prompt) for r in asked]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_update_reaches_every_engine_of_every_agent(pools, workers):
    """Log-probs of all groups, those of a replica included, are those of the agent's own new weights."""
    pool = pools[workers]
    push(pool, models(), 0)
    pool.generate(REQUESTS, 0)
    push(pool, models(moves=1), 1)
    agents = models(moves=1)
    for group in pool.generate(REQUESTS, 1):
        assert group.weights_version == 1
        for completion in group.completions_G:
            reference = exact_logprobs(agents[group.agent], group.prompt_ids, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs_T, reference, atol=1e-3)


def test_other_weights_than_asked_for_are_an_error_of_its_own_type(pools):
    push(pools[3], models(), 4)
    with pytest.raises(WeightTransferError, match="holds weights version 4, but version 5 was asked for"):
        pools[3].generate(REQUESTS, 5)


def test_a_failure_while_generating_names_the_agent(pools, tokenizer):
    """A prompt beyond the engine's context is refused by vLLM itself."""
    push(pools[1], models(), 0)
    spec_limit = 256
    with pytest.raises(RolloutError, match="the engine of agent 1 failed on 1 group"):
        pools[1].generate([dataclasses.replace(REQUESTS[-1], prompt_ids=(5,) * (spec_limit + 1))], 0)
    assert len(pools[1].generate(REQUESTS, 0)) == len(REQUESTS)


def test_a_failed_update_is_an_error_of_its_own_type_and_can_be_healed(pools):
    """Nothing is generated when one of the agents asked for has no weights."""
    pool = pools[1]
    good = [pack(model.named_parameters()) for model in models()]
    wrong = pack((f"not.{name}", parameter) for name, parameter in models()[1].named_parameters())
    with pytest.raises(WeightTransferError, match="agent 1 did not take weights version 1"):
        pool.update_weights([ray.put(good[0]), ray.put(wrong)], 1)
    with pytest.raises(WeightTransferError, match="agent 1 holds weights version None"):
        pool.generate(REQUESTS, 1)
    pool.update_weights([ray.put(weights) for weights in good], 2)
    assert {group.weights_version for group in pool.generate(REQUESTS, 2)} == {2}


def test_an_engine_that_cannot_start_ends_the_wait_and_names_its_agent(runtime, tokenizer):
    config = tiny_model().config
    spec = engine_spec(config, tokenizer, agent=1, max_model_len=10 * config.max_position_embeddings)
    pool = RolloutPool(runtime, plan(1), "vllm", [spec], 120.0)
    try:
        started = time.monotonic()
        with pytest.raises(RolloutError, match="the vllm engine of agent 1 did not start"):
            runtime.gather(pool.start(), "start", 120.0)
        assert time.monotonic() - started < 60
    finally:
        pool.close()


def test_a_killed_worker_is_named(runtime, slow_pool):
    (pid,) = process_ids(slow_pool)
    killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(ActorError, match="rollout worker 0 died while it was asked to generate"):
        slow_pool.generate([SLOW_REQUEST], 0)
    killer.join()


def test_a_wait_past_its_limit_says_what_it_waited_for_and_the_worker_can_be_ended(runtime, slow_pool):
    processes = [psutil.Process(pid) for pid in process_ids(slow_pool)]
    worker = slow_pool._workers[0]
    calls = [(worker, worker.submit("generate", [SLOW_REQUEST], 0))]
    with pytest.raises(ActorError, match="waited 1 s for rollout worker 0 to generate"):
        runtime.gather(calls, "generate", 1.0)
    slow_pool.close()
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive


def test_a_worker_that_cannot_be_placed_says_what_is_free(runtime, tokenizer):
    pool = RolloutPool(runtime, plan(1, cpus=50), "hf", [engine_spec(tiny_model().config, tokenizer)], 10.0)
    try:
        with pytest.raises(ActorError) as caught:
            runtime.gather(pool.start(), "start", 2.0)
        assert re.search(r"waited 2 s for rollout worker 0 to start; free now: [\d.]+ CPU", str(caught.value))
    finally:
        pool.close()
