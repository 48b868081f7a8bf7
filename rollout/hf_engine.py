"""An engine on Hugging Face `generate`, for where vLLM is not installed or does not know a model."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from common.types import Group, GroupRequest, Sampling, Weights
from common.weights import load_into
from rollout.engine import EngineSpec, check_weights, completion, group, weight_shapes


class SeededSampler(LogitsProcessor):
    """Makes greedy `generate` sample every row from its own generator, and keeps the sampled log-probs.

    Gumbel-max: argmax(log p + g) with g ~ Gumbel(0, 1) is a draw from p (Maddison et al. 2014, arXiv:1411.0030).
    """

    def __init__(self, sampling: Sampling, seeds: list[int]) -> None:
        self._warpers = LogitsProcessorList()
        if sampling.temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k is not None:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Log-probs of shape [B, V] with Gumbel noise added."""
        logprobs = self._warpers(input_ids, scores.float()).log_softmax(-1)
        noise = torch.stack([self._gumbel(scores.shape[-1], generator) for generator in self._generators])
        noisy = logprobs + noise.to(scores.device)
        self.logprobs.append(logprobs.gather(-1, noisy.argmax(-1, keepdim=True)).squeeze(-1).cpu())
        return noisy

    @staticmethod
    def _gumbel(size: int, generator: torch.Generator) -> torch.Tensor:
        return -torch.empty(size, dtype=torch.float64).exponential_(generator=generator).log().float()


class HFEngine:
    """Hosts one transformers model; it generates only after the first `update_weights`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.weights_version: int | None = None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        state = torch.get_rng_state()
        model = AutoModelForCausalLM.from_config(spec.config, dtype=getattr(torch, spec.dtype))
        torch.set_rng_state(state)
        self._model = model.eval().to(self._device)

    @torch.inference_mode()
    def generate(self, requests: list[GroupRequest]) -> list[Group]:
        """The groups asked for, as one left-padded batch, every completion with its own seed."""
        version = self.weights_version
        rows = [r.prompt_ids for r in requests for _ in r.seeds_G]
        width = max(map(len, rows))
        input_ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self._device)
        sampler = SeededSampler(self.spec.sampling, [seed for r in requests for seed in r.seeds_G])
        output = self._model.generate(
            input_ids,
            attention_mask=mask,
            do_sample=False,
            num_beams=1,
            max_new_tokens=self.spec.sampling.max_new_tokens,
            eos_token_id=list(self.spec.stop_token_ids) or None,
            pad_token_id=0,
            logits_processor=[sampler],
        )
        sampled = output[:, width:].tolist()
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        completions = iter([self._completion(*row) for row in zip(sampled, logprobs, strict=True)])
        return [group(r, [next(completions) for _ in r.seeds_G], version) for r in requests]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Copy the weights into the model, then raise the version.

        Raises:
            WeightTransferError: they are not this model's; the engine then holds no version.
        """
        self.weights_version = None
        check_weights(self.spec, weight_shapes(self._model), weights, version)
        load_into(self._model, weights)
        self.weights_version = version

    def close(self) -> None:
        """Drop the model."""
        del self._model

    def _completion(self, token_ids: list[int], logprobs: list[float]):
        stops = set(self.spec.stop_token_ids)
        length = next((t + 1 for t, token in enumerate(token_ids) if token in stops), len(token_ids))
        return completion(self.spec, token_ids[:length], logprobs[:length])
