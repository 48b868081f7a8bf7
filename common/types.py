"""The records that travel between trainer, rollout side and learner: plain Python and numpy, cheap to pickle.

Letters in names: P prompts, A agents, G generations of a group, T tokens of a completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn: temperature, truncation and the limit in tokens."""

    temperature: float
    top_p: float
    top_k: int | None
    max_new_tokens: int


@dataclass(frozen=True)
class Prompt:
    """One row of the data set as every agent sees it.

    Attributes:
        item: the row itself, as the reward function gets it in `batch_items`.
        text: the row's prompt, as the reward function gets it in `prompts`.
        token_ids_A: the formatted and tokenised prompt of each agent.
    """

    item: dict[str, Any]
    text: str
    token_ids_A: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GroupRequest:
    """The G completions asked of one agent for one prompt, one seed each."""

    agent: int
    prompt: int
    prompt_ids: tuple[int, ...]
    seeds_G: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        token_ids: the sampled tokens, the end-of-sequence token included where there is one.
        logprobs_T: float32, log-prob of each token under the distribution it was sampled from.
        text: the tokens decoded without special tokens.
        finish_reason: `stop` when it ended by itself, `length` at the limit.
    """

    token_ids: tuple[int, ...]
    logprobs_T: np.ndarray
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Group:
    """The completions of one agent for one prompt, stamped with the weights version at dispatch."""

    agent: int
    prompt: int
    prompt_ids: tuple[int, ...]
    completions_G: tuple[Completion, ...]
    weights_version: int


@dataclass(frozen=True)
class RolloutBatch:
    """Prompts with every agent's group for each: `groups_AP[agent][prompt]`."""

    prompts_P: tuple[Prompt, ...]
    groups_AP: tuple[tuple[Group, ...], ...]

    def split(self, prompts_per_step: int) -> list[RolloutBatch]:
        """The batch in order, cut into batches of at most `prompts_per_step` prompts."""
        return [
            RolloutBatch(self.prompts_P[cut], tuple(groups_P[cut] for groups_P in self.groups_AP))
            for start in range(0, len(self.prompts_P), prompts_per_step)
            for cut in [slice(start, start + prompts_per_step)]
        ]


@dataclass(frozen=True)
class Weights:
    """A model's parameters and saved buffers by name, each once (tied ones under their first name).

    Attributes:
        arrays: numpy arrays; 16-bit floats travel as their bit patterns, because numpy has no bfloat16.
        dtypes: the torch dtype of each array, by name (`float32`, `bfloat16`, ...).
    """

    arrays: dict[str, np.ndarray]
    dtypes: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays.values())
