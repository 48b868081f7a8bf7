"""Samples of one agent, and how they are cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One completion with its prompt and advantage, as the learner uses it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampled_logprobs_T: np.ndarray
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Samples as right-padded tensors. B samples, S positions of prompt and completion, T of the completion alone.

    A causal model's outputs do not depend on what stands to the right, so padding needs no attention mask; completions
    are found by their lengths.
    """

    input_ids_BS: Tensor
    prompt_lengths_B: Tensor
    lengths_B: Tensor
    sampled_logprobs_BT: Tensor
    advantages_B: Tensor

    @staticmethod
    def of(samples: list[Sample], device: torch.device) -> MicroBatch:
        """The tensors of some samples."""
        width = max(map(len, samples))
        longest = max(len(s.token_ids) for s in samples)
        rows = [[*s.prompt_ids, *s.token_ids] + [0] * (width - len(s)) for s in samples]
        sampled = [np.pad(s.sampled_logprobs_T, (0, longest - len(s.token_ids))) for s in samples]
        return MicroBatch(
            torch.tensor(rows, device=device),
            torch.tensor([len(s.prompt_ids) for s in samples], device=device),
            torch.tensor([len(s.token_ids) for s in samples], device=device),
            torch.tensor(np.stack(sampled), device=device),
            torch.tensor([s.advantage for s in samples], dtype=torch.float64, device=device),
        )


def micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices of samples, longest first, in batches of at most `max_tokens` positions, padding included.

    A sample that is longer than `max_tokens` is a batch of its own.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        fits = batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens
        if fits:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
