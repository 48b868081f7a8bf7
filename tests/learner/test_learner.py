"""A learner of two agents on hand-made rollouts: what it reports, and what it refuses without moving anyone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from common.config import MAGRPOConfig
from common.errors import LearnerError, RewardError, WeightTransferError
from common.models import describe_agent
from common.rewards import RewardProcessors
from learner.learner import Learner, LearnerSpec
from tests.builders import rollout_batch, tiny_model

LENGTHS = (((2, 4, 6), (3, 3, 3)), ((4, 4, 3), (5, 2, 5)))
"""Tokens of each completion: two agents, two prompts, groups of three."""


def characters_of_the_last(*texts_AG):
    return [float(len(text)) for text in texts_AG[-1]]


def learner(reward=characters_of_the_last, processor=None, spec=None, **changes) -> Learner:
    settings = {"agent_learning_rate": 1e-2, "num_generations": 3, "max_new_tokens": 8}
    models = tuple(describe_agent(tiny_model(tied=agent == 0, seed=agent)) for agent in range(2))
    config = MAGRPOConfig(**settings | changes)
    dtypes = {"rollout_dtype": "float32", "learner_dtype": "float32"} | (spec or {})
    made = Learner(LearnerSpec(models, reward, processor, config, 10, **dtypes))
    made.start()
    return made


def rollout(version=0, **changes):
    models = [tiny_model(tied=agent == 0, seed=agent) for agent in range(2)]
    return rollout_batch(models, LENGTHS, version, **changes)


def weights(owner: Learner) -> list[dict[str, np.ndarray]]:
    return [owner.weights(agent, "float32").arrays for agent in range(2)]


def same(first, second) -> bool:
    return all(np.array_equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)


def moved_logprobs(batch, by: float, agent: int):
    """The rollout with the sampled log-probs of one agent off by a number."""
    groups_P = tuple(
        dataclasses.replace(
            group,
            completions_G=tuple(dataclasses.replace(c, logprobs_T=c.logprobs_T + by) for c in group.completions_G),
        )
        for group in batch.groups_AP[agent]
    )
    groups_AP = tuple(groups_P if a == agent else own for a, own in enumerate(batch.groups_AP))
    return dataclasses.replace(batch, groups_AP=groups_AP)


def test_a_step_reports_what_happened():
    owner = learner(processor=RewardProcessors.scale(100.0))
    metrics = owner.step(rollout())
    rewards = np.array([4, 4, 3, 5, 2, 5], float)
    assert metrics.reward_mean == pytest.approx(rewards.mean())
    assert metrics.reward_std == pytest.approx(rewards.std())
    assert metrics.processed_reward_mean == pytest.approx(100 * rewards.mean())
    assert metrics.processed_reward_std == pytest.approx(100 * rewards.std())
    assert metrics.zero_spread == 0.0
    assert metrics.completion_tokens == sum(map(sum, LENGTHS[0] + LENGTHS[1]))
    assert metrics.weights_version == owner.version == 1
    first, second = metrics.agents
    assert first.tokens == first.characters == pytest.approx(21 / 6)
    assert second.tokens == second.characters == pytest.approx(23 / 6)
    assert first.ended == pytest.approx(3 / 6) and second.ended == pytest.approx(3 / 6)
    for agent in metrics.agents:
        assert 0 <= agent.logprob_distance_mean <= agent.logprob_distance_p99 <= agent.logprob_distance_max < 1e-4
        assert agent.importance_mean == pytest.approx(1, abs=1e-4) and agent.importance_capped == 0
        assert 0 < agent.entropy < math.log(300) and agent.grad_norm > 0 and agent.learning_rate == 1e-2


def test_the_loss_credits_every_agent_with_the_advantage_of_the_joint_completion():
    batch = rollout()
    metrics = learner().step(batch)
    advantages = np.concatenate([(r - r.mean()) / r.std() for r in (np.array([4.0, 4, 3]), np.array([5.0, 2, 5]))])
    for agent in range(2):
        completions = [c for group in batch.groups_AP[agent] for c in group.completions_G]
        terms = [a * c.logprobs_T.astype(float).sum() for a, c in zip(advantages, completions, strict=True)]
        assert metrics.agents[agent].loss == pytest.approx(-np.mean(terms), abs=1e-4)


def test_the_share_of_groups_without_spread_is_reported():
    assert learner(lambda a, b: [1.0] * 3).step(rollout()).zero_spread == 1.0
    one_group = learner(lambda a, b, prompts: [0.1] * 3 if prompts[0] == "prompt 0" else [1.0, 2.0, 3.0])
    assert one_group.step(rollout()).zero_spread == 0.5


def test_a_step_without_spread_is_a_version_that_moves_nothing():
    owner = learner(lambda a, b: [0.1] * 3, weight_decay=0.3)
    before = weights(owner)
    metrics = owner.step(rollout())
    assert metrics.weights_version == 1 and [agent.grad_norm for agent in metrics.agents] == [0, 0]
    assert same(weights(owner), before)


def test_a_factor_changes_no_update_when_advantages_are_normalised():
    made = [learner(processor=processor) for processor in (None, RewardProcessors.scale(100.0))]
    for owner in made:
        owner.step(rollout())
    for plain, scaled in zip(*map(weights, made), strict=True):
        assert all(np.allclose(plain[name], scaled[name], rtol=0, atol=1e-7) for name in plain)


def test_the_reward_sees_texts_prompt_and_row_of_each_joint_completion():
    seen = []

    def reward(first, second, prompts, batch_items):
        seen.append((first, second, prompts, [item["row"] for item in batch_items]))
        return [0.0, 1.0, 2.0]

    learner(reward).step(rollout())
    assert seen == [
        (["x" * n for n in LENGTHS[0][p]], ["x" * n for n in LENGTHS[1][p]], [f"prompt {p}"] * 3, [p] * 3)
        for p in range(2)
    ]


def raising(*texts_AG):
    raise KeyError("boom")


@pytest.mark.parametrize(
    "reward",
    [raising, lambda *t: [1.0], lambda *t: [1.0, math.nan, 2.0], lambda *t: None, lambda *t: ["1", "2", "3"]],
    ids=["raises", "too few", "nan", "None", "text"],
)
def test_a_failing_reward_moves_nobody(reward):
    owner = learner(reward)
    before = weights(owner)
    with pytest.raises(RewardError):
        owner.step(rollout())
    assert same(weights(owner), before) and owner.version == 0


def test_a_processor_that_fails_moves_nobody():
    owner = learner(processor=lambda reward: math.inf)
    before = weights(owner)
    with pytest.raises(RewardError, match="processor returned inf"):
        owner.step(rollout())
    assert same(weights(owner), before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nobody_and_names_the_agent(value):
    owner, undisturbed = learner(), learner()
    before = weights(owner)
    hook = next(owner._policies[1].model.parameters()).register_hook(lambda gradient: gradient * value)
    with pytest.raises(LearnerError, match=r"gradient norm of agent 1 .* step 1 .*prompt 0.*no agent was updated"):
        owner.step(rollout())
    assert same(weights(owner), before) and owner.version == 0
    hook.remove()
    for other in (owner, undisturbed):
        other.step(rollout())
    assert same(weights(owner), weights(undisturbed))


def test_weights_that_are_not_finite_are_found_before_anyone_moves():
    owner = learner()
    with torch.no_grad():
        next(owner._policies[0].model.parameters())[:] = math.nan
    before = weights(owner)[1]
    with pytest.raises(LearnerError, match="agent 0"):
        owner.step(rollout())
    assert same([weights(owner)[1]], [before])


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("by", [0.05, -0.05])
def test_logprobs_of_another_model_stop_the_run_and_name_the_agent(agent, by):
    owner = learner()
    before = weights(owner)
    with pytest.raises(LearnerError, match=rf"log-probs of agent {agent}'s .* 0\.05 .*version 0.*at most 0\.005"):
        owner.step(moved_logprobs(rollout(), by, agent))
    assert same(weights(owner), before) and owner.version == 0


@pytest.mark.parametrize("dtypes", [{"rollout_dtype": "bfloat16"}, {"learner_dtype": "bfloat16"}])
def test_sixteen_bits_explain_a_few_hundredths_and_not_more(dtypes):
    learner(spec=dtypes).step(moved_logprobs(rollout(), 0.05, 0))
    with pytest.raises(LearnerError, match="agent 0"):
        learner(spec=dtypes).step(moved_logprobs(rollout(), 0.5, 0))


def test_at_a_low_temperature_the_limit_grows_with_the_logits():
    temperature = 0.25
    batch = rollout(temperature=temperature)
    learner(temperature=temperature).step(moved_logprobs(batch, 0.015, 0))
    with pytest.raises(LearnerError):
        learner(temperature=temperature).step(moved_logprobs(batch, 0.05, 0))


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 20}])
def test_truncated_sampling_has_no_limit_of_the_distance(truncation):
    metrics = learner(**truncation).step(moved_logprobs(rollout(), 0.7, 0))
    assert metrics.agents[0].logprob_distance_mean == pytest.approx(0.7, abs=1e-3)
    assert metrics.agents[0].importance_mean == 1


@pytest.mark.parametrize("version", [1, -1, 7])
def test_completions_of_other_weights_are_refused(version):
    owner = learner()
    before = weights(owner)
    with pytest.raises(WeightTransferError, match=rf"\[{version}\].*version 0"):
        owner.step(rollout(version=version))
    assert same(weights(owner), before) and owner.version == 0


def test_completions_of_the_previous_weights_are_refused():
    owner = learner()
    owner.step(rollout())
    with pytest.raises(WeightTransferError, match=r"\[0\].*version 1"):
        owner.step(rollout())


def test_completions_of_two_versions_are_refused():
    new, old = rollout(version=0), rollout(version=1)
    with pytest.raises(WeightTransferError):
        learner().step(dataclasses.replace(new, groups_AP=(new.groups_AP[0], old.groups_AP[1])))


def test_the_steps_of_one_rollout_may_lag_behind_and_those_of_the_next_may_not():
    owner = learner(rollout_buffer_size=2, train_batch_size=1)
    first, second = rollout().split(1)
    owner.step(first)
    metrics = owner.step(second)
    assert metrics.weights_version == 2
    # The policy has moved since it sampled these: the distance is real, so it is reported and has no limit.
    assert metrics.agents[0].logprob_distance_mean > 5e-3
    assert metrics.agents[0].importance_mean != 1
    with pytest.raises(WeightTransferError):
        owner.step(first)
