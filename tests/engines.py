"""What tests of engines share: specifications and moved weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.types import Sampling
from rollout.engine import EngineSpec


def engine_spec(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    agent: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 12,
    max_model_len: int = 256,
    stop_token_ids: Sequence[int] | None = None,
) -> EngineSpec:
    """An engine in float32 that stops at the tokenizer's EOS token, and at one token more."""
    return EngineSpec(
        agent=agent,
        config=config,
        tokenizer=tokenizer,
        stop_token_ids=tuple((tokenizer.eos_token_id, 20) if stop_token_ids is None else stop_token_ids),
        sampling=Sampling(temperature, 1.0, None, max_new_tokens),
        dtype="float32",
        max_model_len=max_model_len,
        max_completions=16,
        memory_fraction=0.3,
    )


@torch.no_grad()
def moved(model: PreTrainedModel, only: str = "", seed: int = 0) -> PreTrainedModel:
    """A copy in which every parameter whose name contains `only` has moved by a third of its spread."""
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    for name, parameter in copied.named_parameters():
        if only in name:
            spread = parameter.std() if parameter.std() > 0 else 0.3
            parameter += 0.3 * spread * torch.randn(parameter.shape, generator=generator)
    return copied
