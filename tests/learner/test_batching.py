"""Micro-batches: every sample once, within the budget of tokens, the longest first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.batching import MicroBatch, Sample, micro_batches

LENGTHS = [
    [7],
    [5] * 9,
    list(range(1, 40)),
    np.random.default_rng(0).integers(1, 200, 64).tolist(),
    [300, 2, 2, 2, 299],
]


@pytest.mark.parametrize("max_tokens", [1, 64, 200, 512, 10**6])
@pytest.mark.parametrize("lengths", LENGTHS, ids=["one", "equal", "all", "random", "two long"])
def test_every_sample_is_in_one_batch_within_the_budget(lengths, max_tokens):
    batches = micro_batches(lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens


@pytest.mark.parametrize("lengths", LENGTHS, ids=["one", "equal", "all", "random", "two long"])
def test_the_longest_come_first(lengths):
    order = [lengths[index] for batch in micro_batches(lengths, 300) for index in batch]
    assert order == sorted(lengths, reverse=True)


def test_a_big_budget_is_one_batch_and_a_small_one_is_none_wasted():
    assert len(micro_batches([3, 9, 4], 27)) == 1
    assert len(micro_batches([3, 9, 4], 26)) == 2


def test_tensors_of_samples_are_found_by_length_whatever_the_tokens_are():
    samples = [
        Sample((5, 0, 0), (0, 0), np.array([-1.0, -2.0], np.float32), 0.5),
        Sample((7,), (1, 0, 9, 0), np.array([-3.0, -4.0, -5.0, -6.0], np.float32), -1 / 3),
    ]
    batch = MicroBatch.of(samples, torch.device("cpu"))
    assert batch.input_ids_BS.tolist() == [[5, 0, 0, 0, 0], [7, 1, 0, 9, 0]]
    assert batch.prompt_lengths_B.tolist() == [3, 1]
    assert batch.lengths_B.tolist() == [2, 4]
    assert batch.sampled_logprobs_BT.tolist() == [[-1.0, -2.0, 0.0, 0.0], [-3.0, -4.0, -5.0, -6.0]]
    assert batch.advantages_B.tolist() == [0.5, -1 / 3]
