"""Reward processors, and the call of a user's reward function with its result checked."""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common.errors import ConfigurationError, RewardError, shown

RewardFunction = Callable[..., Iterable[float]]
RewardProcessor = Callable[[float], float]

_KEYWORDS = ("prompts", "batch_items")


class RewardProcessors:
    """Processors applied to each raw reward before advantages are taken."""

    @staticmethod
    def scale(factor: float = 1.0) -> RewardProcessor:
        """Multiply by `factor`. With normalised advantages a positive factor cancels."""
        return lambda reward: reward * factor

    @staticmethod
    def shift(value: float = 0.0) -> RewardProcessor:
        """Add `value`. With a baseline (every advantage mode but `raw`) it cancels."""
        return lambda reward: reward + value


def check_reward_signature(reward_func: RewardFunction, num_agents: int) -> None:
    """Refuse a reward function that cannot be called with one list of texts per agent.

    Raises:
        ConfigurationError: it is not callable, or its parameters do not take `num_agents` lists.
    """
    if not callable(reward_func):
        raise ConfigurationError(f"reward_func must be callable, got {type(reward_func).__name__}")
    try:
        signature = inspect.signature(reward_func)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[[]] * num_agents, **dict.fromkeys(_wanted_keywords(reward_func), []))
    except TypeError as error:
        raise ConfigurationError(
            f"reward_func{signature} cannot be called with {num_agents} agent(s): {error}. It gets one list of texts "
            "per agent, by position; `prompts` and `batch_items`, where its signature names them, by keyword"
        ) from None


def call_reward(
    reward_func: RewardFunction, texts_AG: Sequence[Sequence[str]], prompt: str, item: dict[str, Any]
) -> list[float]:
    """The raw reward of each joint completion of one prompt.

    Args:
        reward_func: takes one list of G texts per agent, and `prompts` / `batch_items` (G entries each) by keyword
            where its signature has them.
        texts_AG: the completions' texts, `texts_AG[agent][generation]`.
        prompt: the text of the prompt.
        item: the row of the data set.

    Raises:
        RewardError: the function raised (its traceback is in the message), or did not return G finite numbers.
    """
    size = len(texts_AG[0])
    offered = {"prompts": [prompt] * size, "batch_items": [item] * size}
    keywords = {name: offered[name] for name in _wanted_keywords(reward_func)}
    where = f"for prompt {shown(prompt)} with completions {shown([list(texts) for texts in texts_AG])}"
    try:
        returned = reward_func(*[list(texts) for texts in texts_AG], **keywords)
        values = None if _is_single(returned) else list(returned)
    except Exception:
        raise RewardError(f"the reward function raised {where}:\n{traceback.format_exc()}") from None
    if values is None:
        raise RewardError(
            f"the reward function returned {shown(returned)} ({type(returned).__name__}) {where}: it must return "
            f"a list of {size} numbers, one per joint completion"
        )
    if len(values) != size:
        raise RewardError(
            f"the reward function returned {len(values)} value(s) {where}: it must return {size}, one per joint "
            "completion"
        )
    return [_as_number(value, f"reward {g} of the reward function is", where) for g, value in enumerate(values)]


def process_reward(processor: RewardProcessor, reward: float) -> float:
    """The processed reward.

    Raises:
        RewardError: the processor raised, or did not return one finite number.
    """
    try:
        processed = processor(reward)
    except Exception:
        raise RewardError(f"the reward processor raised for the reward {reward}:\n{traceback.format_exc()}") from None
    return _as_number(processed, "the reward processor returned", f"for the reward {reward}")


def _wanted_keywords(reward_func: RewardFunction) -> list[str]:
    try:
        parameters = inspect.signature(reward_func).parameters
    except (TypeError, ValueError):
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return list(_KEYWORDS)
    return [name for name in _KEYWORDS if name in parameters]


def _is_single(returned: Any) -> bool:
    """Whether a returned object is one thing where a series of numbers is wanted."""
    return isinstance(returned, (str, bytes, dict)) or not isinstance(returned, Iterable) or _ndim(returned) == 0


def _ndim(value: Any) -> int | None:
    return getattr(value, "ndim", None)


def _as_number(value: Any, what: str, where: str) -> float:
    scalar = value.item() if _ndim(value) == 0 else value
    if not isinstance(scalar, numbers.Real):
        raise RewardError(f"{what} {shown(value)} ({type(value).__name__}) {where}: every reward must be a number")
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{what} {number} {where}: every reward must be finite")
    return number
