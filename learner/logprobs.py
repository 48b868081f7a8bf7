"""Log-probs of given tokens and the entropy of their distributions, without the full [tokens, vocabulary] array.

Letters in names: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**25


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """log softmax(h W^T / temperature) at the targets, and the entropy of each of those distributions.

    The logits are made chunk by chunk, in the forward and again in the backward pass, so that memory does not grow with
    N x V. Products run in the dtype of `hidden_NH`, sums in float32.

    Args:
        hidden_NH: last hidden states at the positions that predict the targets.
        weight_VH: the output head, cast to the dtype of `hidden_NH` where it differs.
        bias_V: its bias, if it has one.
        targets_N: the tokens.
        temperature: the sampling temperature.

    Returns:
        float32 log-probs (differentiable) and float32 entropies in nats (not differentiable), each of shape [N].
    """
    return _TokenLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, targets_N, temperature):
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        ctx.temperature = temperature
        logprobs_N = hidden_NH.new_empty(len(targets_N), dtype=torch.float32)
        entropies_N = torch.empty_like(logprobs_N)
        head_VH = weight_VH.to(hidden_NH.dtype)
        for chunk in _chunks(len(targets_N), len(weight_VH)):
            logits_nV = _logits(hidden_NH[chunk], head_VH, bias_V, temperature)
            logits_nV -= logits_nV.amax(1, keepdim=True)
            target_logits_n = logits_nV.gather(1, targets_N[chunk, None]).squeeze(1)
            exp_nV = logits_nV.exp()
            sums_n = exp_nV.sum(1)
            log_sums_n = sums_n.log()
            logprobs_N[chunk] = target_logits_n - log_sums_n
            entropies_N[chunk] = log_sums_n - (exp_nV.mul_(logits_nV)).sum(1) / sums_n
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx, grad_N, _):
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        head_VH = weight_VH.to(hidden_NH.dtype)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V)
        for chunk in _chunks(len(targets_N), len(weight_VH)):
            logits_nV = _logits(hidden_NH[chunk], head_VH, bias_V, ctx.temperature)
            scale_n1 = (grad_N[chunk] / ctx.temperature)[:, None]
            grad_logits_nV = logits_nV.softmax(1).mul_(-scale_n1)
            grad_logits_nV.scatter_add_(1, targets_N[chunk, None], scale_n1)
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_nV.sum(0)
            grad_logits_nV = grad_logits_nV.to(hidden_NH.dtype)
            grad_hidden_NH[chunk] = grad_logits_nV @ head_VH
            grad_weight_VH += grad_logits_nV.T @ hidden_NH[chunk]
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None


def _logits(hidden_nH: Tensor, head_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_nV = (hidden_nH @ head_VH.T).float()
    if bias_V is not None:
        logits_nV += bias_V
    return logits_nV if temperature == 1.0 else logits_nV.div_(temperature)


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
