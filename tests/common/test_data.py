"""From rows to prompts: what every agent is given, and which row cannot be used and why."""

from __future__ import annotations

import itertools

import datasets
import pandas
import pytest

from common.data import build_prompts, count_steps, resolve_formatters, rollout_schedule
from common.errors import ConfigurationError, DataError
from tests.builders import BOS, EOS, tiny_tokenizer

LIMIT = 64
GOOD = {"prompt": "Write a story.", "style": "short"}


def prompts(dataset, formatters=None, tokenizers=None, limits=None):
    tokenizers = tokenizers or [tiny_tokenizer()] * 2
    resolved = resolve_formatters(formatters, len(tokenizers))
    return build_prompts(dataset, resolved, tokenizers, limits or [LIMIT] * len(tokenizers))


def refusal(dataset, **arguments) -> str:
    with pytest.raises(DataError) as refused:
        prompts(dataset, **arguments)
    message = str(refused.value)
    assert len(message) < 2000
    return message


@pytest.mark.parametrize("make", [list, tuple, datasets.Dataset.from_list])
def test_every_row_becomes_a_prompt_for_every_agent(make):
    made = prompts(make([GOOD, {"prompt": "Tell a joke.", "style": "long"}]))
    assert [prompt.text for prompt in made] == ["Write a story.", "Tell a joke."]
    assert made[1].item == {"prompt": "Tell a joke.", "style": "long"}
    for prompt in made:
        expected = tuple(tiny_tokenizer()(prompt.text)["input_ids"])
        assert prompt.token_ids_A == (expected, expected)


def test_every_agent_has_its_own_tokenizer_and_limit():
    (prompt,) = prompts([GOOD], tokenizers=[tiny_tokenizer(), tiny_tokenizer(adds_bos=True)], limits=[14, 15])
    assert prompt.token_ids_A[1] == (BOS, *prompt.token_ids_A[0])
    assert "agent 1 has 15 tokens, more than the 14" in refusal(
        [GOOD], tokenizers=[tiny_tokenizer(), tiny_tokenizer(adds_bos=True)], limits=[14, 14]
    )


def test_one_formatter_serves_all_agents():
    made = prompts([GOOD], formatters=lambda row: f"{row['style']}: {row['prompt']}")
    assert tiny_tokenizer().decode(made[0].token_ids_A[1]) == "short: Write a story."
    assert made[0].text == "Write a story."


def test_each_agent_may_have_its_formatter():
    made = prompts([{"topic": "cats"}], formatters=[lambda row: f"A {row['topic']}", lambda row: f"B {row['topic']}"])
    assert [tiny_tokenizer().decode(ids) for ids in made[0].token_ids_A] == ["A cats", "B cats"]
    assert made[0].text == "A cats"


@pytest.mark.parametrize("formatters", [[str], [str] * 3, []])
def test_a_wrong_number_of_formatters_is_refused(formatters):
    with pytest.raises(ConfigurationError, match=f"formatters has {len(formatters)} entries for 2 agents"):
        resolve_formatters(formatters, 2)


@pytest.mark.parametrize("formatters", ["ab", [str, "not a function"], [None, str], 5])
def test_formatters_that_cannot_be_called_are_refused(formatters):
    with pytest.raises(ConfigurationError, match="formatters"):
        resolve_formatters(formatters, 2)


def test_a_formatter_that_raises_is_shown_with_row_and_agent():
    message = refusal([GOOD, {"prompt": "x"}], formatters=[lambda row: row["prompt"], lambda row: row["style"]])
    assert message.startswith("formatters[1] raised for row 1") and "KeyError: 'style'" in message


def test_a_formatter_that_returns_no_text_is_refused():
    message = refusal([GOOD, GOOD], formatters=lambda row: None)
    assert "row 0 for agent 0 is None (NoneType): it must be text" in message


@pytest.mark.parametrize("dataset", [[], (), datasets.Dataset.from_list([])], ids=["list", "tuple", "Dataset"])
def test_no_rows_are_refused(dataset):
    assert "no rows" in refusal(dataset)


@pytest.mark.parametrize(
    "dataset, named",
    [
        (None, "train_dataset is missing"),
        ("story.jsonl", "str"),
        (7, "int"),
        ({"prompt": ["a"]}, "dict"),
        (iter([GOOD]), "list_iterator"),
        (pandas.DataFrame([GOOD]), "DataFrame"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list([GOOD])), "DatasetDict"),
    ],
    ids=["none", "text", "number", "dict", "iterator", "frame", "splits"],
)
def test_what_is_no_list_of_rows_is_refused(dataset, named):
    assert named in refusal(dataset)


def test_a_streaming_data_set_is_refused_with_a_way_out():
    message = refusal(datasets.Dataset.from_list([GOOD]).to_iterable_dataset())
    assert "IterableDataset" in message and "Dataset.from_list" in message


@pytest.mark.parametrize("row", ["Write a story.", None, ["Write a story."], 3])
def test_a_row_that_is_no_dictionary_is_refused(row):
    assert f"row 1 of train_dataset is a {type(row).__name__}" in refusal([GOOD, row])


def test_a_missing_column_is_refused_with_those_that_are_there():
    message = refusal([{"text": "x", "label": 1}])
    assert "row 0" in message and "`prompt`" in message and "'text', 'label'" in message
    assert "it has none" in refusal([{}])


@pytest.mark.parametrize(
    "prompt, said",
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("\u3000\u00a0", "empty"),
        (None, "None (NoneType): it must be text"),
        (17, "17 (int): it must be text"),
        (["Write", "a story"], "(list): it must be text"),
        ([{"role": "user", "content": "Write"}], "apply_chat_template"),
        (b"Write a story.", "(bytes): it must be text"),
        ("\ud800 alone", "cannot be encoded"),
        ("x" * (LIMIT + 1), f"has {LIMIT + 1} tokens, more than the {LIMIT}"),
    ],
    ids=["empty", "blank", "unicode blank", "none", "number", "list", "messages", "bytes", "surrogate", "too long"],
)
def test_a_prompt_that_cannot_be_used_is_refused_with_its_row(prompt, said):
    message = refusal([GOOD, {"prompt": "fine"}, {"prompt": prompt}])
    assert "row 2 for agent 0" in message and said in message


def test_a_megabyte_of_text_is_refused_in_a_short_message():
    assert f"has {10**6} tokens" in refusal([{"prompt": "x" * 10**6}])


@pytest.mark.parametrize(
    "text",
    [
        "a\x00b\x07\x1b[31m",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u202eevil",
        "na\u00efve \U0001f600",
        "x" * LIMIT,
        "\ufeffx",
        "line\nline",
    ],
    ids=["control", "right to left", "override", "emoji", "at the limit", "byte order mark", "newline"],
)
def test_any_text_that_is_not_empty_is_a_prompt(text):
    (prompt,) = prompts([{"prompt": text}])
    assert prompt.text == text
    assert tiny_tokenizer().decode(prompt.token_ids_A[0]) == text


def test_a_text_that_already_begins_with_bos_has_one():
    tokenizer = tiny_tokenizer(adds_bos=True)
    (prompt,) = prompts([{"prompt": "<s>Write"}], tokenizers=[tokenizer])
    assert prompt.token_ids_A[0] == (BOS, *tiny_tokenizer()("Write")["input_ids"])
    (plain,) = prompts([{"prompt": "<s>Write"}], tokenizers=[tiny_tokenizer()])
    assert plain.token_ids_A == prompt.token_ids_A


def test_special_tokens_inside_a_prompt_stay():
    (prompt,) = prompts([{"prompt": "a</s><s>b"}], tokenizers=[tiny_tokenizer(adds_bos=True)])
    (a,), (b,) = (tiny_tokenizer()(text)["input_ids"] for text in "ab")
    assert prompt.token_ids_A[0] == (BOS, a, EOS, BOS, b)


def test_a_tokenizer_without_bos_is_fine():
    (prompt,) = prompts([{"prompt": "aa"}], tokenizers=[tiny_tokenizer(bos=False)])
    assert len(prompt.token_ids_A[0]) == 2


@pytest.mark.parametrize("num_prompts, per_rollout, epochs", [(10, 2, 3), (7, 3, 2), (1, 5, 4), (5, 5, 1), (6, 1, 2)])
def test_the_schedule_is_the_data_set_in_order_every_epoch(num_prompts, per_rollout, epochs):
    schedule = list(rollout_schedule(num_prompts, per_rollout, epochs))
    for epoch in range(epochs):
        rollouts = [indices for e, indices in schedule if e == epoch]
        assert list(itertools.chain(*rollouts)) == list(range(num_prompts))
        assert all(len(indices) == per_rollout for indices in rollouts[:-1])
    assert [epoch for epoch, _ in schedule] == sorted(epoch for epoch, _ in schedule)


@pytest.mark.parametrize("num_prompts, per_rollout, epochs", [*itertools.product((1, 7, 10), (1, 3, 4), (1, 3))])
def test_the_count_of_steps_is_what_the_schedule_takes(num_prompts, per_rollout, epochs):
    for per_step in range(1, per_rollout + 1):
        steps = 0
        for _, indices in rollout_schedule(num_prompts, per_rollout, epochs):
            left = len(indices)
            while left > 0:
                left -= per_step
                steps += 1
        assert count_steps(num_prompts, per_rollout, per_step, epochs) == steps
