"""The call of a user's reward function: what it gets, what it may return, and what is said when it fails."""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from common.errors import ConfigurationError, RewardError
from common.rewards import RewardProcessors, call_reward, check_reward_signature, process_reward

TEXTS = [["a", "bb", "ccc"], ["dddd", "e", ""]]


def kind(value) -> str:
    """A short test id: what a value is called or what type it has."""
    return getattr(value, "__name__", value if isinstance(value, str) else type(value).__name__)


def called(reward, texts=TEXTS):
    return call_reward(reward, texts, "the prompt", {"prompt": "the prompt", "answer": 42})


def returning(value):
    return called(lambda first, second: value)


def two(first, second):
    return [0.0]


def with_target(first, second, target=2.0):
    return [0.0]


def with_prompts(first, second, prompts, batch_items=None):
    return [0.0]


def keyword_only(first, second, *, prompts):
    return [0.0]


def any_number(*texts_AG, **offered):
    return [0.0]


def prompts_first(prompts, first, second):
    return [0.0]


def positional_prompts(first, second, prompts, /):
    return [0.0]


class Callable:
    def __call__(self, first, second):
        return [0.0]

    def method(self, first, second, prompts):
        return [0.0]


TAKES_TWO = [
    two,
    with_target,
    with_prompts,
    keyword_only,
    any_number,
    functools.partial(with_target, target=3.0),
    functools.partial(lambda rule, first, second: [0.0], "a rule"),
    Callable(),
    Callable().method,
    lambda *texts: [0.0],
    map,
    max,
]


@pytest.mark.parametrize("reward", TAKES_TWO, ids=kind)
def test_a_function_of_one_list_per_agent_is_accepted(reward):
    check_reward_signature(reward, 2)


@pytest.mark.parametrize(
    "reward, num_agents",
    [
        (two, 1),
        (two, 3),
        (with_target, 4),
        (with_prompts, 3),
        (prompts_first, 2),
        (positional_prompts, 2),
        (functools.partial(two, "bound"), 2),
        (functools.partial(two, second=[]), 2),
        (lambda: [0.0], 1),
        (lambda first, second, *, rule: [0.0], 2),
        (len, 2),
    ],
    ids=kind,
)
def test_a_function_that_cannot_take_one_list_per_agent_is_refused(reward, num_agents):
    with pytest.raises(ConfigurationError, match=f"{num_agents} agent.*one list of texts per agent"):
        check_reward_signature(reward, num_agents)


@pytest.mark.parametrize("reward", [None, "reward", 1.0, [two]])
def test_what_is_not_callable_is_refused(reward):
    with pytest.raises(ConfigurationError, match=f"must be callable, got {type(reward).__name__}"):
        check_reward_signature(reward, 2)


def test_it_gets_one_list_per_agent_and_nothing_by_counting_parameters():
    seen = []

    def reward(first, second, target=2.0):
        seen.append((first, second, target))
        return [0.0] * 3

    called(reward)
    assert seen == [(TEXTS[0], TEXTS[1], 2.0)]


def test_prompts_and_rows_come_by_name_only_where_they_are_named():
    seen = {}

    def prompts_alone(first, second, *, prompts):
        seen["prompts"] = prompts
        return [0.0] * 3

    def rows_alone(first, second, batch_items=None):
        seen["rows"] = batch_items
        return [0.0] * 3

    def both(*texts_AG, **offered):
        seen["both"] = offered
        return [0.0] * 3

    for reward in (prompts_alone, rows_alone, both):
        called(reward)
    assert seen["prompts"] == ["the prompt"] * 3
    assert [row["answer"] for row in seen["rows"]] == [42] * 3
    assert seen["both"] == {"prompts": seen["prompts"], "batch_items": seen["rows"]}


def test_a_function_that_changes_its_lists_changes_nothing_else():
    def reward(first, second):
        first.clear()
        second.append("more")
        return [0.0] * 3

    called(reward)
    assert TEXTS == [["a", "bb", "ccc"], ["dddd", "e", ""]]


@pytest.mark.parametrize(
    "value",
    [
        [1.0, 0.0, 0.5],
        (1.0, 0.0, 0.5),
        [1, 0, 0.5],
        [True, False, 0.5],
        [Fraction(1), Fraction(0), Fraction(1, 2)],
        np.array([1.0, 0.0, 0.5]),
        np.array([1.0, 0.0, 0.5], np.float16),
        [np.float32(1), np.bool_(False), np.float64(0.5)],
        torch.tensor([1.0, 0.0, 0.5]),
        torch.tensor([1.0, 0.0, 0.5], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1), np.array(0), 0.5],
        iter([1.0, 0.0, 0.5]),
        (reward for reward in (1.0, 0.0, 0.5)),
        map(float, ("1", "0", "0.5")),
    ],
    ids=kind,
)
def test_any_series_of_numbers_is_one_float_per_joint_completion(value):
    rewards = returning(value)
    assert rewards == [1.0, 0.0, 0.5]
    assert [type(reward) for reward in rewards] == [float] * 3


@pytest.mark.parametrize(
    "value, said",
    [
        (None, r"returned None \(NoneType\).*list of 3 numbers"),
        (1.0, r"returned 1.0 \(float\)"),
        ("123", r"returned '123' \(str\)"),
        (b"123", r"\(bytes\)"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, r"\(dict\)"),
        (np.float64(1), "list of 3 numbers"),
        (np.array(1.0), r"\(ndarray\).*list of 3 numbers"),
        (torch.tensor(1.0), r"\(Tensor\).*list of 3 numbers"),
        ([], r"returned 0 value\(s\).*must return 3"),
        ([1.0, 2.0], r"returned 2 value\(s\).*must return 3"),
        ([1.0] * 4, r"returned 4 value\(s\)"),
        (np.ones((2, 3)), r"returned 2 value\(s\)"),
        ([1.0, math.nan, 0.0], "reward 1 .* nan .*must be finite"),
        ([1.0, 0.0, math.inf], "reward 2 .* inf .*must be finite"),
        (np.array([-np.inf, 0, 0]), "reward 0 .* -inf .*must be finite"),
        (torch.tensor([0.0, torch.nan, 0.0]), "reward 1 .* nan"),
        ([10**400, 0, 0], "reward 0 .*must be finite"),
        ([1.0, None, 0.0], r"reward 1 .* None \(NoneType\).*must be a number"),
        (["1", "0", "1"], r"reward 0 .* '1' \(str\).*must be a number"),
        ([[1.0], [0.0], [0.5]], r"reward 0 .* \(list\).*must be a number"),
        (np.ones((3, 1)), r"reward 0 .* \(ndarray\).*must be a number"),
        ([1 + 0j, 0, 0], r"reward 0 .* \(complex\).*must be a number"),
    ],
    ids=kind,
)
def test_anything_else_is_refused_with_prompt_and_completions(value, said):
    with pytest.raises(RewardError, match=said) as refused:
        returning(value)
    assert "'the prompt'" in str(refused.value) and "'dddd'" in str(refused.value)


def test_an_exception_is_shown_as_the_user_wrote_it():
    def judge(text):
        return int(text)

    def reward(first, second):
        return [judge(text) for text in first]

    with pytest.raises(RewardError, match="'the prompt'") as refused:
        called(reward)
    assert "return int(text)" in str(refused.value)
    assert "ValueError: invalid literal for int() with base 10: 'a'" in str(refused.value)


def test_a_type_error_inside_is_not_tried_again_with_other_arguments():
    calls = []

    def reward(first, second, prompts):
        calls.append(prompts)
        return first + 1

    with pytest.raises(RewardError, match="TypeError: can only concatenate list"):
        called(reward)
    assert len(calls) == 1


def test_a_generator_that_raises_half_way_is_shown_too():
    def reward(first, second):
        yield 1.0
        raise LookupError("no second reward")

    with pytest.raises(RewardError, match="LookupError: no second reward"):
        called(reward)


def test_the_message_stays_short_whatever_the_completions_are():
    with pytest.raises(RewardError) as refused:
        called(lambda first, second: None, [["x" * 10**6] * 3] * 2)
    assert len(str(refused.value)) < 2000


def test_processors_scale_and_shift():
    assert process_reward(RewardProcessors.scale(factor=100.0), 0.25) == 25.0
    assert process_reward(RewardProcessors.scale(), 0.25) == 0.25
    assert process_reward(RewardProcessors.shift(value=-1.0), 0.25) == -0.75
    assert process_reward(lambda reward: np.float32(reward > 0), 0.25) == 1.0


@pytest.mark.parametrize(
    "processor, said",
    [
        (lambda reward: None, r"processor returned None .*reward 0.25"),
        (lambda reward: [reward], r"processor returned \[0.25\]"),
        (lambda reward: math.log(0 * reward), "ValueError"),
        (lambda reward: math.nan, "processor returned nan .*finite"),
    ],
)
def test_a_processor_that_does_not_give_a_number_is_refused(processor, said):
    with pytest.raises(RewardError, match=said):
        process_reward(processor, 0.25)
