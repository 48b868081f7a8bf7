"""Small things that tests are made of: models of a few thousand parameters, a byte-level tokenizer, rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from common.metrics import AgentMetrics, StepMetrics
from common.types import Completion, Group, Prompt, RolloutBatch
from learner.batching import Sample

BOS, EOS = 0, 1
VOCABULARY = 300
"""Rows of the embedding. As in many real models they are more than the tokenizer has tokens."""


def tiny_llama_config(tied: bool = True, **changes: object) -> LlamaConfig:
    """Two layers with heads that vLLM can compute on a CPU."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    return LlamaConfig(**settings | changes)


def built(model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model in float32 with random weights that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config).float().eval()


def tiny_model(tied: bool = True, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A Llama with random weights."""
    return built(LlamaForCausalLM, tiny_llama_config(tied, **changes), seed)


def tiny_tokenizer(adds_bos: bool = False, bos: bool = True, eos: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte: `<s>`, `</s>`, then the 256 bytes. Its pad token is its EOS token.

    Args:
        adds_bos: whether it puts `<s>` before every text.
        bos, eos: whether it has these as special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    special = {"bos_token": "<s>"} if bos else {}
    special |= {"eos_token": "</s>", "pad_token": "</s>"} if eos else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def save_tiny_model(
    folder: str | Path, tied: bool = True, seed: int = 0, adds_bos: bool = False, **changes: object
) -> str:
    """Write a tiny model with its tokenizer as `from_pretrained` reads them; returns the folder."""
    tiny_model(tied, seed, **changes).save_pretrained(folder)
    tiny_tokenizer(adds_bos).save_pretrained(folder)
    return str(folder)


def random_tokens(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    """Token ids that are no special ones."""
    return tuple(rng.integers(2, 258, length).tolist())


@torch.no_grad()
def exact_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of a completion's tokens by the model's own forward pass over this one sequence, float64."""
    logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits, -1)[len(prompt_ids) - 1 : -1]
    return logprobs[torch.arange(len(token_ids)), torch.tensor(token_ids)].numpy()


def samples(
    model: PreTrainedModel,
    sizes: Sequence[tuple[int, int]],
    advantages: Sequence[float],
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Sample]:
    """Random prompts and completions of given lengths, whose sampled log-probs are the model's own.

    Args:
        model: what is said to have sampled them.
        sizes: (prompt tokens, completion tokens) of each.
        advantages: advantage of each.
        temperature: that of the sampled log-probs.
        seed: of the tokens.
    """
    rng = np.random.default_rng(seed)
    made = []
    for (prompt, completion), advantage in zip(sizes, advantages, strict=True):
        prompt_ids, token_ids = random_tokens(rng, prompt), random_tokens(rng, completion)
        logprobs = exact_logprobs(model, prompt_ids, token_ids, temperature).astype(np.float32)
        made.append(Sample(prompt_ids, token_ids, logprobs, advantage))
    return made


def rollout_batch(
    models: Sequence[PreTrainedModel],
    lengths_APG: Sequence[Sequence[Sequence[int]]],
    version: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
) -> RolloutBatch:
    """A rollout of every agent, said to be sampled by its model. The text of a completion is one `x` per token.

    Args:
        models: one per agent.
        lengths_APG: tokens of each completion; those of even length ended by themselves, with an EOS token.
        version: the weights version of every group.
        temperature: that of the sampled log-probs.
        seed: of prompts and completions.
    """
    rng = np.random.default_rng(seed)
    prompts = []
    for p in range(len(lengths_APG[0])):
        ids = tuple(random_tokens(rng, 3 + p) for _ in models)
        prompts.append(Prompt({"prompt": f"prompt {p}", "row": p}, f"prompt {p}", ids))

    def completion(model: PreTrainedModel, prompt_ids: tuple[int, ...], length: int) -> Completion:
        ends = length % 2 == 0
        token_ids = random_tokens(rng, length - ends) + (EOS,) * ends
        logprobs = exact_logprobs(model, prompt_ids, token_ids, temperature).astype(np.float32)
        return Completion(token_ids, logprobs, "x" * length, "stop" if ends else "length")

    groups = tuple(
        tuple(
            Group(agent, p, ids, tuple(completion(models[agent], ids, length) for length in lengths_G), version)
            for p, lengths_G in enumerate(lengths_PG)
            for ids in [prompts[p].token_ids_A[agent]]
        )
        for agent, lengths_PG in enumerate(lengths_APG)
    )
    return RolloutBatch(tuple(prompts), groups)


def agent_metrics(**changes: float) -> AgentMetrics:
    """One agent's metrics, of which a test sets those it is about."""
    names = AgentMetrics.__dataclass_fields__
    return AgentMetrics(**dict.fromkeys(names, 1.0) | changes)


def step_metrics(agents: Sequence[AgentMetrics] | None = None, **changes: float) -> StepMetrics:
    """One step's metrics, of which a test sets those it is about."""
    settings = dict.fromkeys(StepMetrics.__dataclass_fields__, 0.5) | {"completion_tokens": 10, "weights_version": 1}
    return StepMetrics(**settings | {"agents": tuple(agents or [agent_metrics(), agent_metrics()])} | changes)
