"""The loss of a step, against loops over Python floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.loss import importance_weights, policy_gradient_loss, sequence_weights, token_mask

AGGREGATIONS = ["sequence_sum", "sequence_mean", "token_mean", "constant_length"]
LENGTHS = [5, 1, 3, 8, 2, 8]
LIMIT = 8


def completions(lengths=LENGTHS, seed=0):
    """Log-probs under the learner and under the sampler per completion, and advantages."""
    rng = np.random.default_rng(seed)
    logprobs = [-rng.exponential(size=length) for length in lengths]
    sampled = [values + 0.5 * rng.normal(size=len(values)) for values in logprobs]
    return logprobs, sampled, rng.normal(size=len(lengths))


def slow_loss(logprobs, sampled, advantages, aggregation, cap=2.0):
    """Minus A times the weighted log-probs: over tokens, then over completions, in double precision."""
    total = 0.0
    tokens = sum(len(values) for values in logprobs)
    for own, theirs, advantage in zip(logprobs, sampled, advantages, strict=True):
        terms = 0.0
        for pi, mu in zip(own, theirs, strict=True):
            terms += (1.0 if cap is None else min(math.exp(pi - mu), cap)) * pi
        if aggregation == "sequence_sum":
            total -= advantage * terms / len(logprobs)
        elif aggregation == "sequence_mean":
            total -= advantage * terms / len(own) / len(logprobs)
        elif aggregation == "token_mean":
            total -= advantage * terms / tokens
        else:
            total -= advantage * terms / LIMIT / len(logprobs)
    return total


def padded(rows, width, filling=0.0, requires_grad=False):
    tensor = torch.full((len(rows), width), filling, dtype=torch.float64)
    for b, row in enumerate(rows):
        tensor[b, : len(row)] = torch.from_numpy(row)
    return tensor.requires_grad_(requires_grad)


def loss_of(logprobs, sampled, advantages, aggregation, cap=2.0, width=LIMIT, filling=0.0, indices=None):
    """The loss of the completions at `indices` as part of a step of all of them, and its gradient per log-prob."""
    indices = list(range(len(logprobs))) if indices is None else indices
    lengths_B = torch.tensor([len(values) for values in logprobs])
    weights_B = sequence_weights(lengths_B, aggregation, LIMIT)[indices]
    logprobs_BT = padded([logprobs[i] for i in indices], width, filling, requires_grad=True)
    sampled_BT = padded([sampled[i] for i in indices], width, filling)
    importance_BT = importance_weights(logprobs_BT, sampled_BT, cap)
    mask_BT = token_mask(lengths_B[indices], width)
    loss = policy_gradient_loss(logprobs_BT, importance_BT, mask_BT, torch.from_numpy(advantages)[indices], weights_B)
    loss.backward()
    return loss.item(), logprobs_BT.grad


@pytest.mark.parametrize("cap", [1.0, 2.0, None])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_loss_is_that_of_the_definition(aggregation, cap):
    step = completions()
    assert loss_of(*step, aggregation, cap)[0] == pytest.approx(slow_loss(*step, aggregation, cap), abs=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_float32_logprobs_give_the_loss_to_1e_6(aggregation):
    logprobs, sampled, advantages = completions([200, 7, 256, 31], seed=1)
    lengths_B = torch.tensor([200, 7, 256, 31])
    own, theirs = padded(logprobs, 256).float(), padded(sampled, 256).float()
    loss = policy_gradient_loss(
        own,
        importance_weights(own, theirs, 2.0),
        token_mask(lengths_B, 256),
        torch.from_numpy(advantages),
        sequence_weights(lengths_B, aggregation, LIMIT),
    )
    assert loss.item() == pytest.approx(slow_loss(logprobs, sampled, advantages, aggregation), rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_of_a_token_is_its_weight_and_nothing_more(aggregation):
    logprobs, sampled, advantages = completions()
    _, gradient_BT = loss_of(logprobs, sampled, advantages, aggregation)
    tokens = sum(LENGTHS)
    for b, (own, theirs) in enumerate(zip(logprobs, sampled, strict=True)):
        share = {
            "sequence_sum": 1 / len(LENGTHS),
            "sequence_mean": 1 / len(LENGTHS) / len(own),
            "token_mean": 1 / tokens,
            "constant_length": 1 / len(LENGTHS) / LIMIT,
        }[aggregation]
        expected = [-advantages[b] * share * min(math.exp(pi - mu), 2.0) for pi, mu in zip(own, theirs, strict=True)]
        np.testing.assert_allclose(gradient_BT[b, : len(own)].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("filling", [0.0, -50.0, 1e30, math.nan, math.inf, -math.inf])
def test_padding_never_changes_the_loss(aggregation, filling):
    step = completions()
    loss, gradient_BT = loss_of(*step, aggregation)
    wide_loss, wide_gradient_BT = loss_of(*step, aggregation, width=LIMIT + 13, filling=filling)
    assert wide_loss == loss
    mask_BT = token_mask(torch.tensor(LENGTHS), LIMIT + 13)
    torch.testing.assert_close(wide_gradient_BT[mask_BT], gradient_BT[mask_BT[:, :LIMIT]], rtol=0, atol=0)
    assert (wide_gradient_BT[~mask_BT] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_last_token_of_every_completion_changes_the_loss(aggregation):
    logprobs, sampled, advantages = completions()
    loss, _ = loss_of(logprobs, sampled, advantages, aggregation, cap=None)
    for b, row in enumerate(logprobs):
        likelier = [values.copy() for values in logprobs]
        likelier[b][len(row) - 1] += 0.5
        changed, _ = loss_of(likelier, sampled, advantages, aggregation, cap=None)
        assert changed != loss
        assert np.sign(loss - changed) == np.sign(advantages[b])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [[[0, 1, 2], [3, 4, 5]], [[3], [5], [0, 4], [1, 2]], [[5, 4, 3, 2, 1, 0]]])
def test_losses_of_micro_batches_add_up_to_that_of_the_step(aggregation, cut):
    step = completions()
    parts = []
    for indices in cut:
        width = max(LENGTHS[i] for i in indices)
        parts.append(loss_of(*step, aggregation, width=width, indices=indices)[0])
    assert sum(parts) == pytest.approx(slow_loss(*step, aggregation), abs=1e-9)


def test_the_mask_follows_the_lengths():
    assert token_mask(torch.tensor([0, 2, 3]), 3).tolist() == [[False] * 3, [True, True, False], [True] * 3]


def test_importance_weights_are_ratios_up_to_the_cap():
    own = torch.tensor([[math.log(0.3), math.log(0.9), math.log(0.1), 0.0]])
    theirs = torch.tensor([[math.log(0.2), math.log(0.1), math.log(0.4), -500.0]])
    torch.testing.assert_close(importance_weights(own, theirs, 2.0), torch.tensor([[1.5, 2.0, 0.25, 2.0]]))


def test_importance_weights_are_constants_of_the_gradient():
    own = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    assert not importance_weights(own, torch.tensor([[-1.5, -1.5]]), 2.0).requires_grad


def test_without_a_cap_every_token_weighs_one():
    own = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    assert importance_weights(own, torch.tensor([[-9.0, 3.0]]), None).tolist() == [[1.0, 1.0]]


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="median"):
        sequence_weights(torch.tensor([1]), "median", 1)
