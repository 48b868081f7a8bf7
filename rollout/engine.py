"""What an engine is: it generates groups with one agent's weights and takes new weights. No Ray, no learner."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from common.errors import RolloutError, WeightTransferError
from common.types import Completion, Group, GroupRequest, Sampling, Weights
from common.weights import named_state


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from.

    Attributes:
        agent: the agent it serves.
        config: the model's configuration; weights come later, as a `Weights` record.
        tokenizer: decodes completions, without special tokens.
        stop_token_ids: every token that ends a completion.
        sampling: how completions are drawn.
        dtype: dtype of weights and cache (`float32`, `bfloat16`, `float16`).
        max_model_len: longest prompt plus completion, in tokens.
        max_completions: completions it may be asked for at once.
        memory_fraction: share of the device's memory it may take (GPUs only).
    """

    agent: int
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    dtype: str
    max_model_len: int
    max_completions: int
    memory_fraction: float


class Engine(Protocol):
    """Generates with the weights of one agent.

    `weights_version` is the version of the weights it holds, None before the first and after a failed update.
    """

    weights_version: int | None

    def generate(self, requests: list[GroupRequest]) -> list[Group]:
        """The groups asked for, in order, stamped with the version they were dispatched on."""

    def update_weights(self, weights: Weights, version: int) -> None:
        """Take new weights; `weights_version` is set last, when they are in place."""

    def close(self) -> None:
        """Release the model."""


def build_engine(backend: str, spec: EngineSpec) -> Engine:
    """The engine of a resolved backend, `vllm` or `hf`.

    Raises:
        RolloutError: it does not start; the message says for which agent and why.
    """
    try:
        if backend == "vllm":
            from rollout.vllm_engine import VLLMEngine

            return VLLMEngine(spec)
        from rollout.hf_engine import HFEngine

        return HFEngine(spec)
    except Exception as error:
        remedy = " (rollout_backend='hf' generates without vLLM)" if backend == "vllm" else ""
        raise RolloutError(
            f"the {backend} engine of agent {spec.agent} did not start: {type(error).__name__}: {error}{remedy}"
        ) from error


def resolve_backend(backend: str) -> str:
    """`vllm` or `hf`; `auto` is vLLM where it is installed.

    Raises:
        RolloutError: vLLM is asked for and not installed.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if backend == "vllm" and not installed:
        raise RolloutError(
            "rollout_backend='vllm' but vLLM is not installed: `make install` brings the one for this machine, or use "
            "rollout_backend='hf'"
        )
    if backend == "auto":
        return "vllm" if installed else "hf"
    return backend


def resolve_dtype(dtype: str) -> str:
    """`auto` becomes bfloat16 where the device multiplies it natively, else float32."""
    if dtype != "auto":
        return dtype
    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bfloat16" if native else "float32"


def check_version(spec_agent: int, held: int | None, wanted: int) -> None:
    """Refuse to generate with other weights than the ones asked for.

    Raises:
        WeightTransferError: the versions differ.
    """
    if held != wanted:
        raise WeightTransferError(
            f"the engine of agent {spec_agent} holds weights version {held}, but version {wanted} was asked for: a "
            "weight update did not arrive"
        )


def weight_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of everything an update of a model must bring, by name."""
    return {name: tuple(tensor.shape) for name, tensor in named_state(model).items()}


def check_weights(spec: EngineSpec, shapes: dict[str, tuple[int, ...]], weights: Weights, version: int) -> None:
    """Refuse an update that is not exactly the model's, before anything of it is loaded.

    Raises:
        WeightTransferError: names or shapes differ.
    """
    brought = {name: array.shape for name, array in weights.arrays.items()}
    differing = sorted(name for name in shapes.keys() | brought.keys() if shapes.get(name) != brought.get(name))
    if differing:
        name = differing[0]
        raise WeightTransferError(
            f"the engine of agent {spec.agent} did not take weights version {version}: {len(differing)} parameter(s) "
            f"are not its model's, for instance {name!r} of shape {brought.get(name)} where it has {shapes.get(name)}"
        )


def completion(spec: EngineSpec, token_ids: list[int], logprobs: list[float]) -> Completion:
    """A completion record from sampled tokens; why it finished is read from its last token.

    Raises:
        RolloutError: a log-prob is not finite.
    """
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise RolloutError(
                f"the engine of agent {spec.agent} sampled token {token_ids[position]} at position {position} with "
                f"log-prob {logprob}: its weights or its dtype ({spec.dtype}) do not give finite numbers"
            )
    stopped = bool(token_ids) and token_ids[-1] in spec.stop_token_ids
    text = spec.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Completion(tuple(token_ids), np.asarray(logprobs, np.float32), text, "stop" if stopped else "length")


def group(request: GroupRequest, completions: list[Completion], version: int) -> Group:
    """The group that answers a request."""
    return Group(request.agent, request.prompt, request.prompt_ids, tuple(completions), version)


def cache_bytes_per_token(config: Any, bytes_per_value: int) -> int:
    """Keys and values of one token over all layers, in bytes."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * bytes_per_value
