"""Group-relative advantages of joint completions, in float64.

Letters in names: P prompts, G joint completions of a prompt.
"""

from __future__ import annotations

import numpy as np


def group_advantages(rewards_PG: np.ndarray, mode: str, normalize: bool) -> np.ndarray:
    """Advantage of every joint completion, relative to its group. Every agent of the joint completion gets it.

    With R the rewards of a group: `mean` R - mean(R) (GRPO, arXiv:2402.03300); `rloo` (G R - sum(R)) / (G - 1),
    the leave-one-out baseline (arXiv:2402.14740); `max` R - max(R); `raw` R. With `normalize` the result A of any
    mode becomes (A - mean(A)) / std(A), population standard deviation.

    A group of equal rewards has advantage exactly 0 (except for `raw` without `normalize`, which has no baseline).
    Rewards are equal when they differ by no more than the rounding of a few float64 operations.

    Args:
        rewards_PG: processed rewards, shape [P, G], finite.
        mode: `mean`, `rloo`, `max` or `raw`.
        normalize: whether to divide by the group's standard deviation.

    Returns:
        float64, shape [P, G].
    """
    R = np.asarray(rewards_PG, np.float64)
    G = R.shape[1]
    if mode == "mean":
        A = R - R.mean(1, keepdims=True)
    elif mode == "rloo":
        A = (G * R - R.sum(1, keepdims=True)) / (G - 1)
    elif mode == "max":
        A = R - R.max(1, keepdims=True)
    elif mode == "raw":
        A = R
    else:
        raise ValueError(f"unknown advantage mode {mode!r}")
    spread_P1 = has_spread(R)[:, None]
    if normalize:
        A = np.where(spread_P1, A - A.mean(1, keepdims=True), 0.0)
        A = A / np.where(spread_P1, np.abs(A).max(1, keepdims=True), 1.0)  # so that squares neither vanish nor overflow
        return A / np.where(spread_P1, A.std(1, keepdims=True), 1.0)
    return A if mode == "raw" else np.where(spread_P1, A, 0.0)


def has_spread(rewards_PG: np.ndarray) -> np.ndarray:
    """Whether the rewards of each group differ by more than rounding; bool, shape [P]."""
    R = np.asarray(rewards_PG, np.float64)
    return np.ptp(R, axis=1) > 16 * np.finfo(np.float64).eps * np.abs(R).max(1)
