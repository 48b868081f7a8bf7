"""Group-relative advantages, against arithmetic on fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from learner.advantages import group_advantages, has_spread

MODES = ["mean", "rloo", "max", "raw"]
EQUAL_REWARDS = [0.0, 1.0, -2.5, 0.1, 1 / 3, 0.7, 1e-9, 123.456]


def exact_advantages(rewards_G: list[float], mode: str, normalize: bool) -> list[float]:
    """The definition, one completion at a time; only the square root leaves the rational numbers."""
    R = [Fraction(reward) for reward in rewards_G]
    G = len(R)
    advantages = []
    for g in range(G):
        others = [R[other] for other in range(G) if other != g]
        baseline = {"mean": sum(R) / G, "rloo": sum(others) / (G - 1), "max": max(R), "raw": Fraction(0)}[mode]
        advantages.append(R[g] - baseline)
    if not normalize:
        return [float(a) for a in advantages]
    centre = sum(advantages) / G
    variance = sum((a - centre) ** 2 for a in advantages) / G
    return [0.0 if variance == 0 else float(a - centre) / math.sqrt(variance) for a in advantages]


def groups(G: int) -> np.ndarray:
    """Groups of very different kinds: tutorial-like, binary, large offsets, small values, negative."""
    rng = np.random.default_rng(G)
    return np.stack(
        [
            np.exp(-rng.exponential(size=G)),
            rng.permutation(np.arange(G) % 2).astype(float),
            1000 + rng.normal(size=G),
            1e-4 * rng.normal(size=G),
            -100 * rng.random(G),
        ]
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("G", [2, 3, 5, 8, 16])
def test_advantages_are_those_of_the_definition(mode, normalize, G):
    rewards_PG = groups(G)
    expected = [exact_advantages(rewards_G.tolist(), mode, normalize) for rewards_G in rewards_PG]
    np.testing.assert_allclose(group_advantages(rewards_PG, mode, normalize), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode, normalize", [(m, n) for m in MODES for n in (True, False) if (m, n) != ("raw", False)])
def test_equal_rewards_give_exactly_zero(mode, normalize):
    for G in range(2, 17):
        for factor in (1e-3, 0.1, 1.0, 3.0, 100.0, 1e6):
            rewards_PG = np.array([[reward * factor] * G for reward in EQUAL_REWARDS])
            assert (group_advantages(rewards_PG, mode, normalize) == 0.0).all()
            assert not has_spread(rewards_PG).any()


@pytest.mark.parametrize("mode", MODES)
def test_rewards_that_differ_by_rounding_alone_are_equal(mode):
    same = [0.1 + 0.2, 0.3, 0.1 * 3, 0.6 / 2]
    assert len(set(same)) > 1
    assert (group_advantages(np.array([same]), mode, True) == 0.0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_tiny_real_spread_is_not_zero(mode):
    rewards_PG = np.array([[1.0, 1.0, 1.0 + 1e-9], [1e-30, 2e-30, 3e-30], [1e6, 1e6, 1e6 + 1e-6]])
    assert has_spread(rewards_PG).all()
    advantages_PG = group_advantages(rewards_PG, mode, True)
    assert np.isfinite(advantages_PG).all()
    np.testing.assert_allclose(advantages_PG.std(1), 1.0, rtol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_rewards_whose_squares_are_too_small_for_a_float_are_normalised(mode):
    for smallest in (1e-150, math.exp(-500), 1e-300):
        advantages_G = group_advantages(np.array([[0.0, 0.0, smallest]]), mode, True)[0]
        np.testing.assert_allclose(advantages_G, [-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2)], atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [1e-3, 100.0, 1e6])
def test_a_factor_changes_nothing_when_normalised(mode, factor):
    rewards_PG = groups(5)
    plain = group_advantages(rewards_PG, mode, True)
    np.testing.assert_allclose(group_advantages(factor * rewards_PG, mode, True), plain, rtol=0, atol=1e-9)


def test_a_factor_scales_the_advantages_when_not_normalised():
    rewards_PG = groups(5)
    for mode in MODES:
        expected = 100 * group_advantages(rewards_PG, mode, False)
        np.testing.assert_allclose(group_advantages(100 * rewards_PG, mode, False), expected, rtol=1e-9, atol=1e-9)


def test_all_modes_are_one_when_normalised():
    rewards_PG = groups(8)
    mean = group_advantages(rewards_PG, "mean", True)
    for mode in MODES[1:]:
        np.testing.assert_allclose(group_advantages(rewards_PG, mode, True), mean, rtol=0, atol=1e-9)


def test_groups_do_not_see_one_another():
    rewards_PG = groups(5)
    together = group_advantages(rewards_PG, "rloo", False)
    alone = [group_advantages(rewards_PG[p : p + 1], "rloo", False)[0] for p in range(len(rewards_PG))]
    np.testing.assert_array_equal(together, alone)


def test_the_rewards_that_are_given_stay_as_they_are():
    rewards_PG = groups(4)
    before = rewards_PG.copy()
    for mode in MODES:
        group_advantages(rewards_PG, mode, True)[:] = 7.0
    np.testing.assert_array_equal(rewards_PG, before)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="median"):
        group_advantages(np.ones((1, 2)), "median", False)
