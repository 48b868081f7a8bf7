"""From the rows of a data set to the prompts of a run, checked before anything expensive starts."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.errors import ConfigurationError, DataError, shown
from common.types import Prompt

Formatter = Callable[[dict[str, Any]], str]


def resolve_formatters(formatters: Formatter | Sequence[Formatter] | None, num_agents: int) -> list[Formatter] | None:
    """One formatter per agent, or none where the row's `prompt` is used as it is.

    Raises:
        ConfigurationError: neither a callable nor one callable per agent.
    """
    if formatters is None:
        return None
    if not callable(formatters) and not isinstance(formatters, (list, tuple)):
        raise ConfigurationError(f"formatters must be a function or one per agent, got {type(formatters).__name__}")
    resolved = [formatters] * num_agents if callable(formatters) else list(formatters)
    if len(resolved) != num_agents:
        raise ConfigurationError(f"formatters has {len(resolved)} entries for {num_agents} agents: give one per agent")
    for agent, formatter in enumerate(resolved):
        if not callable(formatter):
            raise ConfigurationError(f"formatters[{agent}] must be callable, got {type(formatter).__name__}")
    return resolved


def build_prompts(
    dataset: Any,
    formatters: list[Formatter] | None,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    limits: Sequence[int],
) -> list[Prompt]:
    """Format and tokenise every row for every agent.

    Args:
        dataset: a sized collection of rows (`datasets.Dataset`, a list of dictionaries, ...).
        formatters: from `resolve_formatters`.
        tokenizers: one per agent.
        limits: the longest prompt each agent can take, in tokens.

    Raises:
        DataError: no rows, a row without `prompt`, a prompt that is not text, is empty or is too long; the message
            names the row.
    """
    rows = _sized_rows(dataset)
    return [_build_prompt(row, item, formatters, tokenizers, limits) for row, item in enumerate(rows)]


def rollout_schedule(num_prompts: int, prompts_per_rollout: int, epochs: int) -> Iterator[tuple[int, list[int]]]:
    """The prompts of each rollout as `(epoch, indices)`: the data set in order, no rollout across two epochs."""
    for epoch in range(epochs):
        for start in range(0, num_prompts, prompts_per_rollout):
            yield epoch, list(range(start, min(start + prompts_per_rollout, num_prompts)))


def count_steps(num_prompts: int, prompts_per_rollout: int, prompts_per_step: int, epochs: int) -> int:
    """Optimizer steps of a run of `rollout_schedule`."""
    rollouts = [len(indices) for _, indices in rollout_schedule(num_prompts, prompts_per_rollout, 1)]
    return epochs * sum(-(-size // prompts_per_step) for size in rollouts)


def _sized_rows(dataset: Any) -> Any:
    if dataset is None:
        raise DataError("train_dataset is missing: give a datasets.Dataset or a list of rows with a `prompt`")
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not sized or isinstance(dataset, (str, dict)) or hasattr(dataset, "iloc"):
        raise DataError(
            f"train_dataset is a {type(dataset).__name__}: give a datasets.Dataset (one split, not streaming) or a "
            "list of dictionaries; a stream becomes one with Dataset.from_list(list(stream.take(n))), a table with "
            "Dataset.from_pandas(table)"
        )
    if len(dataset) == 0:
        raise DataError("train_dataset has no rows")
    return (dataset[row] for row in range(len(dataset)))


def _build_prompt(
    row: int,
    item: Any,
    formatters: list[Formatter] | None,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    limits: Sequence[int],
) -> Prompt:
    if not isinstance(item, dict):
        raise DataError(f"row {row} of train_dataset is a {type(item).__name__}: every row must be a dictionary")
    if formatters is None and "prompt" not in item:
        raise DataError(
            f"row {row} of train_dataset has no column `prompt` (it has {', '.join(map(repr, item)) or 'none'}): "
            "rename a column, or pass `formatters` that make the prompt of a row"
        )
    texts_A = []
    token_ids_A = []
    for agent, (tokenizer, limit) in enumerate(zip(tokenizers, limits, strict=True)):
        text = item["prompt"] if formatters is None else _format(formatters[agent], row, agent, item)
        texts_A.append(text)
        token_ids_A.append(_tokenize(text, tokenizer, limit, f"the prompt of row {row} for agent {agent}"))
    prompt = item.get("prompt")
    return Prompt(item, prompt if isinstance(prompt, str) else texts_A[0], tuple(token_ids_A))


def _format(formatter: Formatter, row: int, agent: int, item: dict[str, Any]) -> Any:
    try:
        return formatter(item)
    except Exception:
        raise DataError(f"formatters[{agent}] raised for row {row}:\n{traceback.format_exc()}") from None


def _tokenize(text: Any, tokenizer: PreTrainedTokenizerBase, limit: int, what: str) -> tuple[int, ...]:
    if not isinstance(text, str):
        raise DataError(
            f"{what} is {shown(text)} ({type(text).__name__}): it must be text; a conversation becomes text with "
            "a formatter that calls tokenizer.apply_chat_template(..., tokenize=False)"
        )
    if not text.strip():
        raise DataError(f"{what} is empty ({text!r}): remove the row or give it a text")
    try:
        text.encode()
        ids = tokenizer(text, verbose=False)["input_ids"]
    except UnicodeEncodeError as error:
        raise DataError(f"{what} cannot be encoded ({error.reason}): {shown(text)}") from None
    bos = tokenizer.bos_token_id
    if bos is not None and list(ids[:2]) == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise DataError(f"{what} has no tokens in this tokenizer: {shown(text)}")
    if len(ids) > limit:
        raise DataError(
            f"{what} has {len(ids)} tokens, more than the {limit} that max_prompt_length, or the model's context less "
            f"max_new_tokens, leave for it ({shown(text)}): shorten it, remove the row, or change those limits"
        )
    return tuple(ids)
