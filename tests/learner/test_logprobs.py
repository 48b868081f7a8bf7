"""Chunked log-probs, entropies and their gradients, against log_softmax in double precision with autograd."""

from __future__ import annotations

import pytest
import torch

from learner import logprobs
from learner.logprobs import token_logprobs

N, H, V = 23, 12, 31


def inputs(with_bias: bool, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return (scale * torch.randn(*shape, generator=generator)).to(dtype).requires_grad_()

    targets_N = torch.randint(V, (N,), generator=generator)
    targets_N[:4] = torch.tensor([0, V - 1, 0, V - 1])
    grad_N = torch.randn(N, generator=generator)
    return normal(N, H), normal(V, H), normal(V) if with_bias else None, targets_N, grad_N


def exact(hidden_NH, weight_VH, bias_V, targets_N, temperature, grad_N):
    """Log-probs, entropies and the gradients of sum(grad * log-prob), float64."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (hidden_NH, weight_VH, bias_V)]
    logits_NV = leaves[0] @ leaves[1].T
    if leaves[2] is not None:
        logits_NV = logits_NV + leaves[2]
    all_NV = torch.log_softmax(logits_NV / temperature, -1)
    logprobs_N = all_NV[torch.arange(N), targets_N]
    (logprobs_N * grad_N.double()).sum().backward()
    entropies_N = torch.distributions.Categorical(logits=logits_NV.detach() / temperature).entropy()
    return logprobs_N.detach(), entropies_N, [None if t is None else t.grad for t in leaves]


@pytest.fixture(params=[1, 5 * V, 7 * V + 3, 2**25], ids=["token by token", "chunks of 5", "chunks of 7", "one chunk"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", request.param)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_logprobs_entropies_and_gradients_are_those_of_log_softmax(chunks, with_bias, temperature):
    *arguments, grad_N = inputs(with_bias)
    expected, expected_entropies, expected_gradients = exact(*arguments, temperature, grad_N)
    logprobs_N, entropies_N = token_logprobs(*arguments, temperature)
    torch.testing.assert_close(logprobs_N.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies_N.double(), expected_entropies, rtol=1e-5, atol=1e-5)
    assert not entropies_N.requires_grad
    logprobs_N.backward(grad_N)
    for tensor, gradient in zip(arguments[:3], expected_gradients, strict=True):
        if tensor is not None:
            torch.testing.assert_close(tensor.grad.double(), gradient, rtol=1e-4, atol=1e-5)


def test_large_logits_stay_finite_and_exact(chunks):
    *arguments, grad_N = inputs(True, scale=60.0)
    expected, expected_entropies, _ = exact(*arguments, 0.6, grad_N)
    logprobs_N, entropies_N = token_logprobs(*arguments, 0.6)
    torch.testing.assert_close(logprobs_N.double(), expected, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(entropies_N.double(), expected_entropies, rtol=1e-2, atol=1e-3)
    logprobs_N.backward(grad_N)
    assert all(tensor.grad.isfinite().all() for tensor in arguments[:3])


def test_bfloat16_hidden_states_use_a_bfloat16_head_and_give_a_float32_gradient(chunks):
    hidden_NH, weight_VH, bias_V, targets_N, grad_N = inputs(True)
    rounded = [hidden_NH.bfloat16(), weight_VH.bfloat16(), bias_V, targets_N]
    expected, _, gradients = exact(*rounded, 1.0, grad_N)
    logprobs_N, _ = token_logprobs(hidden_NH.bfloat16(), weight_VH, bias_V, targets_N, 1.0)
    assert logprobs_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N.double(), expected, rtol=0, atol=0.1)
    logprobs_N.backward(grad_N)
    assert weight_VH.grad.dtype == torch.float32
    torch.testing.assert_close(weight_VH.grad.double(), gradients[1], rtol=0.05, atol=0.05)


def test_leaves_outside_the_graph_need_no_gradient():
    hidden_NH, weight_VH, _, targets_N, _ = inputs(False)
    logprobs_N, _ = token_logprobs(hidden_NH.detach(), weight_VH, None, targets_N, 1.0)
    logprobs_N.sum().backward()
    assert weight_VH.grad is not None and hidden_NH.grad is None
