"""The policy-gradient loss of one agent's completions.

Letters in names: B completions, T token positions. Completions of different length are padded to one T; positions past
a completion's length are masked by that length, never by a token's value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_mask(lengths_B: Tensor, width: int) -> Tensor:
    """True at the positions of each completion, shape [B, width]."""
    return torch.arange(width, device=lengths_B.device) < lengths_B[:, None]


def sequence_weights(lengths_B: Tensor, aggregation: str, max_new_tokens: int) -> Tensor:
    """What one token of each completion of a step weighs in its loss, float64, shape [B].

    The groups of a step have one size, so that the mean over a group and then over prompts is the mean over all B.
    `sequence_sum` 1/B; `sequence_mean` 1/(B T_b); `token_mean` 1/sum(T) (DAPO, arXiv:2503.14476);
    `constant_length` 1/(B max_new_tokens) (Dr. GRPO, arXiv:2503.20783).

    Args:
        lengths_B: tokens of every completion of the step, not of one micro-batch.
        aggregation: one of the names above.
        max_new_tokens: limit of a completion.
    """
    lengths_B = lengths_B.double()
    B = len(lengths_B)
    if aggregation == "sequence_sum":
        return torch.full_like(lengths_B, 1 / B)
    if aggregation == "sequence_mean":
        return 1 / (B * lengths_B)
    if aggregation == "token_mean":
        return torch.full_like(lengths_B, 1) / lengths_B.sum()
    if aggregation == "constant_length":
        return torch.full_like(lengths_B, 1 / (B * max_new_tokens))
    raise ValueError(f"unknown loss aggregation {aggregation!r}")


def importance_weights(logprobs_BT: Tensor, sampled_logprobs_BT: Tensor, cap: float | None) -> Tensor:
    """Capped importance weight of every token, min(pi / mu, cap), a constant of the gradient, shape [B, T].

    pi is the policy that is trained, mu the one that sampled. Truncated importance sampling (Ionides 2008),
    token by token.

    Args:
        logprobs_BT: log-probs under the policy that is trained.
        sampled_logprobs_BT: log-probs under the policy that sampled.
        cap: the cap, or None for a weight of 1 everywhere.
    """
    if cap is None:
        return torch.ones_like(logprobs_BT)
    return (logprobs_BT.detach() - sampled_logprobs_BT).exp().clamp(max=cap)


def policy_gradient_loss(
    logprobs_BT: Tensor,
    importance_BT: Tensor,
    mask_BT: Tensor,
    advantages_B: Tensor,
    sequence_weights_B: Tensor,
) -> Tensor:
    """- sum_b c_b A_b sum_t w_bt log pi(token_bt): REINFORCE with group-relative advantages (MAGRPO, arXiv:2508.04652).

    Args:
        logprobs_BT: log-probs under the policy, differentiable; what stands at masked positions does not matter.
        importance_BT: from `importance_weights`.
        mask_BT: from `token_mask`.
        advantages_B: advantage of each completion.
        sequence_weights_B: from `sequence_weights`.

    Returns:
        A scalar in float64. The losses of micro-batches add up to the loss of the step.
    """
    terms_BT = torch.where(mask_BT, importance_BT, 0.0) * torch.where(mask_BT, logprobs_BT, 0.0)
    return -(sequence_weights_B * advantages_B * terms_BT.double().sum(1)).sum()
