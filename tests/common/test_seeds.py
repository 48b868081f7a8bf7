"""Seeds of requests: one for every place in a run, and the same one whoever asks."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from common.seeds import request_seed


def test_no_two_completions_share_a_seed():
    places = list(itertools.product((0, 1, 42, 2**32, 2**63 - 1), range(20), range(5), range(4), range(8)))
    seeds = [request_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)


def test_a_seed_depends_on_its_place_alone_and_leaves_other_generators_alone():
    seed = request_seed(42, 3, 1, 0, 7)
    request_seed(42, 3, 1, 0, 8)
    kept = np.random.get_state(), random.getstate(), torch.get_rng_state()
    try:
        np.random.seed(1)
        random.seed(1)
        torch.manual_seed(1)
        before = np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state()
        assert request_seed(42, 3, 1, 0, 7) == seed
        assert (np.random.get_state()[1] == before[0]).all() and random.getstate() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])
    finally:
        np.random.set_state(kept[0])
        random.setstate(kept[1])
        torch.set_rng_state(kept[2])


def test_seeds_are_spread_over_the_whole_range():
    seeds = np.array([request_seed(0, 0, 0, 0, g) for g in range(2000)], float) / 2**63
    assert abs(seeds.mean() - 0.5) < 0.05 and abs(seeds.std() - 12**-0.5) < 0.05
