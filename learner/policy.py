"""One agent's policy: a transformers model in float32, its AdamW and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, get_scheduler

from common.config import MAGRPOConfig
from common.types import Weights
from common.weights import named_state, pack
from learner.batching import MicroBatch, Sample, micro_batches
from learner.logprobs import token_logprobs
from learner.loss import importance_weights, policy_gradient_loss, sequence_weights, token_mask


@dataclass(frozen=True)
class GradientReport:
    """What was seen while the gradient of a step was made. N sampled tokens of the step, in no particular order."""

    loss: float
    grad_norm: float
    entropies_N: Tensor
    distances_N: Tensor
    importance_N: Tensor
    capped_N: Tensor


class Policy:
    """A model that is trained. A step is `compute_gradient`, then `apply_gradient` or `discard_gradient`.

    Args:
        model: in float32; it is moved to `device`.
        config: the run's configuration.
        total_steps: optimizer steps of the run, for the schedule.
        dtype: autocast dtype, `float32` or `bfloat16`.
        device: where it computes.
    """

    def __init__(
        self, model: PreTrainedModel, config: MAGRPOConfig, total_steps: int, dtype: str, device: torch.device
    ) -> None:
        self.model = model.to(device).eval()
        self._config = config
        self._device = device
        self._dtype = getattr(torch, dtype)
        self._optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=config.agent_learning_rate,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._schedule = get_scheduler(
            config.lr_scheduler_type,
            self._optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=total_steps,
        )
        self._plain_head = self._logits_are_a_plain_product()

    @property
    def learning_rate(self) -> float:
        """Rate of the next step."""
        return self._schedule.get_last_lr()[0]

    def weights(self, dtype: str) -> Weights:
        """A copy of the parameters in `dtype`."""
        return pack(named_state(self.model).items(), getattr(torch, dtype))

    def compute_gradient(self, samples: list[Sample]) -> GradientReport:
        """Accumulate the gradient of the step's loss; the parameters do not change.

        Where every advantage is 0 there is no gradient to make, and the samples are only measured.
        """
        config = self._config
        lengths_B = torch.tensor([len(s.token_ids) for s in samples])
        weights_B = sequence_weights(lengths_B, config.loss_aggregation, config.max_new_tokens)
        cap = None if config.truncates_sampling else config.importance_cap
        learns = any(s.advantage != 0.0 for s in samples)
        loss, parts = 0.0, []
        for indices in micro_batches([len(s) for s in samples], config.micro_batch_tokens):
            batch = MicroBatch.of([samples[i] for i in indices], self._device)
            with torch.set_grad_enabled(learns):
                logprobs_BT, entropies_N, mask_BT = self.logprobs(batch)
                importance_BT = importance_weights(logprobs_BT, batch.sampled_logprobs_BT, cap)
                part = policy_gradient_loss(
                    logprobs_BT, importance_BT, mask_BT, batch.advantages_B, weights_B[indices].to(self._device)
                )
            if learns:
                part.backward()
            loss += part.item()
            log_ratio_BT = logprobs_BT.detach() - batch.sampled_logprobs_BT
            parts.append((entropies_N, log_ratio_BT[mask_BT], importance_BT[mask_BT]))
        entropies_N, log_ratios_N, importance_N = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
        capped_N = log_ratios_N.exp() > cap if cap else torch.zeros_like(log_ratios_N, dtype=torch.bool)
        norm = self._clip_gradient() if learns else 0.0
        return GradientReport(loss, norm, entropies_N, log_ratios_N.abs(), importance_N, capped_N)

    def apply_gradient(self) -> None:
        """Make the optimizer step, unless there was no gradient to make."""
        if any(p.grad is not None for p in self.model.parameters()):
            self._optimizer.step()
            self._schedule.step()
        self.discard_gradient()

    def discard_gradient(self) -> None:
        """Forget the accumulated gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [B, T] (differentiable, 0 where masked), entropies [N] and mask [B, T] of the completions."""
        B, T = batch.sampled_logprobs_BT.shape
        mask_BT = token_mask(batch.lengths_B, T)
        rows_N, offsets_N = mask_BT.nonzero(as_tuple=True)
        positions_N = batch.prompt_lengths_B[rows_N] + offsets_N
        targets_N = batch.input_ids_BS[rows_N, positions_N]
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            outputs_NX = self._forward(batch.input_ids_BS)[rows_N, positions_N - 1]
        if self._plain_head:
            head = self.model.get_output_embeddings()
            logprobs_N, entropies_N = token_logprobs(
                outputs_NX.to(self._dtype),
                head.weight,
                getattr(head, "bias", None),
                targets_N,
                self._config.temperature,
            )
        else:
            log_softmax_NV = (outputs_NX.float() / self._config.temperature).log_softmax(-1)
            logprobs_N = log_softmax_NV.gather(1, targets_N[:, None]).squeeze(1)
            entropies_N = -(log_softmax_NV.exp() * log_softmax_NV).sum(1).detach()
        logprobs_BT = torch.zeros(B, T, device=self._device).masked_scatter(mask_BT, logprobs_N)
        return logprobs_BT, entropies_N, mask_BT

    def _forward(self, input_ids_BS: Tensor) -> Tensor:
        """Last hidden states where the head is a plain product, logits where it is not."""
        if self._plain_head:
            return self.model.base_model(input_ids=input_ids_BS, use_cache=False).last_hidden_state
        return self.model(input_ids=input_ids_BS, use_cache=False).logits

    @torch.no_grad()
    def _logits_are_a_plain_product(self) -> bool:
        """Whether logits are head(hidden); false for models that scale or cap their logits."""
        head = self.model.get_output_embeddings()
        if head is None or self.model.base_model is self.model:
            return False
        probe = torch.arange(4, device=self._device)[None]
        enlarged = head.register_forward_hook(lambda _module, _inputs, logits: logits * 1e4)  # a cap shows at any size
        try:
            hidden = self.model.base_model(input_ids=probe, use_cache=False).last_hidden_state
            return torch.equal(head(hidden), self.model(input_ids=probe, use_cache=False).logits)
        finally:
            enlarged.remove()

    def _clip_gradient(self) -> float:
        limit = self._config.max_grad_norm or float("inf")
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item()
