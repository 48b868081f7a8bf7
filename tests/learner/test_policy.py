"""One agent's policy: its log-probs against the model's own forward pass, its step against one written by hand."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
import transformers
from transformers import get_scheduler

from common.config import MAGRPOConfig
from learner.batching import MicroBatch
from learner.policy import Policy
from tests.builders import EOS, built, exact_logprobs, samples, tiny_model

CPU = torch.device("cpu")
SIZES = [(3, 9), (11, 1), (1, 4), (6, 7)]
ADVANTAGES = [1.5, -0.5, -1.0, 0.25]


def policy(model, dtype="float32", total_steps=10, **changes) -> Policy:
    settings = {"agent_learning_rate": 1e-2, "max_new_tokens": 12}
    return Policy(copy.deepcopy(model), MAGRPOConfig(**settings | changes), total_steps, dtype, CPU)


def parameters(owner: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in owner.model.named_parameters()}


def same(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def assert_logprobs_are_exact(owner, model, made, temperature=1.0, atol=1e-5):
    batch = MicroBatch.of(made, CPU)
    logprobs_BT, entropies_N, mask_BT = owner.logprobs(batch)
    for sample, row, mask in zip(made, logprobs_BT.detach(), mask_BT, strict=True):
        expected = exact_logprobs(model, sample.prompt_ids, sample.token_ids, temperature)
        np.testing.assert_allclose(row[: len(expected)].numpy(), expected, atol=atol)
        assert mask.sum() == len(expected) and (row[len(expected) :] == 0).all()
    assert len(entropies_N) == mask_BT.sum()


def model_with(kind: str, spread: float = 0.3):
    """A tiny model of an architecture with something of its own between hidden states and logits."""
    shared = {
        "vocab_size": 300,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": spread,
        "max_position_embeddings": 64,
    } | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), EOS)
    narrow = shared | {"intermediate_size": 96}
    llama_like = narrow | {"num_key_value_heads": 1, "head_dim": 32}
    prefix, ending, settings = {
        "biased head": ("Phi", "ForCausalLM", narrow),
        "learned positions": ("GPT2", "LMHeadModel", shared),
        "capped logits": ("Gemma2", "ForCausalLM", llama_like | {"final_logit_softcapping": 2.0}),
        "scaled logits": ("Cohere", "ForCausalLM", llama_like | {"logit_scale": 0.25}),
        "divided logits": ("Granite", "ForCausalLM", llama_like | {"logits_scaling": 4.0}),
    }[kind]
    config = getattr(transformers, f"{prefix}Config")(**settings)
    return built(getattr(transformers, f"{prefix}{ending}"), config)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_are_those_of_each_sequence_alone(tied, temperature):
    model = tiny_model(tied)
    made = samples(model, SIZES, ADVANTAGES, temperature)
    assert_logprobs_are_exact(policy(model, temperature=temperature), model, made, temperature)


def test_an_end_of_sequence_token_inside_prompt_and_completion_is_a_token_like_any_other():
    model = tiny_model()
    made = [
        dataclasses.replace(s, prompt_ids=(EOS, *s.prompt_ids, EOS, 0), token_ids=(*s.token_ids, EOS))
        for s in samples(model, SIZES, ADVANTAGES)
    ]
    made = [dataclasses.replace(s, sampled_logprobs_T=np.zeros(len(s.token_ids), np.float32)) for s in made]
    assert_logprobs_are_exact(policy(model), model, made)


KINDS = ["biased head", "learned positions", "capped logits", "scaled logits", "divided logits"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_does_more_than_a_product_has_its_own_logprobs(kind):
    model = model_with(kind)
    if kind == "biased head":
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    made = samples(model, SIZES, ADVANTAGES, temperature=1.4)
    assert_logprobs_are_exact(policy(model, temperature=1.4), model, made, 1.4, atol=3e-5)


def test_a_cap_is_found_although_the_first_logits_are_too_small_for_it():
    model = model_with("capped logits", spread=1e-3)
    owner = policy(model)
    with torch.no_grad():
        owner.model.get_output_embeddings().weight.mul_(1000)
        model.get_output_embeddings().weight.mul_(1000)
    assert_logprobs_are_exact(owner, model, samples(model, SIZES, ADVANTAGES))


def test_entropies_are_those_of_the_distributions():
    model = tiny_model()
    made = samples(model, SIZES[:1], ADVANTAGES[:1], temperature=0.6)
    _, entropies_N, _ = policy(model, temperature=0.6).logprobs(MicroBatch.of(made, CPU))
    logits = model(torch.tensor([[*made[0].prompt_ids, *made[0].token_ids]])).logits[0, 2:-1].double()
    expected = torch.distributions.Categorical(logits=logits / 0.6).entropy()
    torch.testing.assert_close(entropies_N.double(), expected, rtol=1e-5, atol=1e-5)


def reinforce_gradient(model, made, aggregation="sequence_sum", temperature=1.0, limit=12):
    """Loss and gradient in double precision, one sequence at a time, by the model's own logits."""
    exact = copy.deepcopy(model).double()
    tokens = sum(len(s.token_ids) for s in made)
    total = 0.0
    for s in made:
        share = {
            "sequence_sum": 1 / len(made),
            "sequence_mean": 1 / len(made) / len(s.token_ids),
            "token_mean": 1 / tokens,
            "constant_length": 1 / len(made) / limit,
        }[aggregation]
        logits = exact(torch.tensor([[*s.prompt_ids, *s.token_ids]])).logits[0] / temperature
        start = len(s.prompt_ids) - 1
        for t, token in enumerate(s.token_ids):
            logprob = torch.log_softmax(logits[start + t], -1)[token]
            ratio = min(float(np.exp(logprob.item() - s.sampled_logprobs_T[t])), 2.0)
            loss = -share * s.advantage * ratio * logprob
            loss.backward(retain_graph=True)
            total += loss.item()
    return exact, total


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 4096])
@pytest.mark.parametrize("aggregation", ["sequence_sum", "sequence_mean", "token_mean", "constant_length"])
def test_loss_and_gradient_are_those_of_reinforce(aggregation, micro_batch_tokens):
    model = tiny_model()
    made = samples(model, SIZES, ADVANTAGES)
    made[0] = dataclasses.replace(made[0], sampled_logprobs_T=made[0].sampled_logprobs_T - 0.9)
    exact, loss = reinforce_gradient(model, made, aggregation)
    owner = policy(model, loss_aggregation=aggregation, micro_batch_tokens=micro_batch_tokens, max_grad_norm=None)
    report = owner.compute_gradient(made)
    assert report.loss == pytest.approx(loss, abs=1e-6)
    norm = sum(p.grad.square().sum() for p in exact.parameters()).sqrt().item()
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    expected = dict(exact.named_parameters())
    for name, parameter in owner.model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), expected[name].grad, rtol=1e-3, atol=1e-5 * norm)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.1, 1e6])
def test_a_step_is_clipped_reinforce_with_adamw(tied, max_grad_norm):
    model = tiny_model(tied)
    owner = policy(model, weight_decay=0.1, max_grad_norm=max_grad_norm, temperature=1.4)
    made = samples(model, SIZES, ADVANTAGES, temperature=1.4)
    for s in made:
        s.sampled_logprobs_T[:] -= 0.1
    exact, _ = reinforce_gradient(model, made, temperature=1.4)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-2, weight_decay=0.1)
    norm = sum(p.grad.square().sum() for p in exact.parameters()).sqrt()
    if max_grad_norm is not None and norm > max_grad_norm:
        for parameter in exact.parameters():
            parameter.grad *= max_grad_norm / norm
    gradients = {name: parameter.grad.clone() for name, parameter in exact.named_parameters()}
    optimizer.step()
    report = owner.compute_gradient(made)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    owner.apply_gradient()
    for name, parameter in exact.named_parameters():
        # Adam's first step is about lr * sign(gradient): a gradient near 0 has no certain sign.
        certain = gradients[name].abs() > 1e-4 * gradients[name].abs().max()
        found = dict(owner.model.named_parameters())[name].double()
        torch.testing.assert_close(found[certain], parameter[certain], rtol=0, atol=2e-5)


def test_the_reported_tokens_are_all_sampled_tokens():
    model = tiny_model()
    made = samples(model, SIZES, ADVANTAGES)
    made[1] = dataclasses.replace(made[1], sampled_logprobs_T=made[1].sampled_logprobs_T - 3)
    report = policy(model, micro_batch_tokens=20).compute_gradient(made)
    tokens = sum(T for _, T in SIZES)
    assert len(report.entropies_N) == len(report.distances_N) == tokens
    assert report.distances_N.max() == pytest.approx(3, abs=1e-4)
    assert report.distances_N.sum() == pytest.approx(3, abs=1e-3)
    assert report.importance_N.max() == 2 and report.capped_N.sum() == 1


@pytest.mark.parametrize("changes", [{"importance_cap": None}, {"top_p": 0.8}, {"top_k": 5}])
def test_without_a_cap_or_with_truncated_sampling_every_token_weighs_one(changes):
    model = tiny_model()
    made = samples(model, SIZES, ADVANTAGES)
    for s in made:
        s.sampled_logprobs_T[:] += 0.7
    report = policy(model, **changes).compute_gradient(made)
    assert (report.importance_N == 1).all() and not report.capped_N.any()
    assert report.distances_N.mean() == pytest.approx(0.7, abs=1e-4)


def test_without_any_advantage_the_parameters_stay_bit_identical():
    model = tiny_model()
    owner = policy(model, weight_decay=0.5, lr_scheduler_type="linear")
    owner.compute_gradient(samples(model, SIZES, ADVANTAGES))
    owner.apply_gradient()
    before, rate = parameters(owner), owner.learning_rate
    report = owner.compute_gradient(samples(model, SIZES, [0.0, -0.0, 0.0, 0.0]))
    owner.apply_gradient()
    assert report.grad_norm == 0.0 and report.loss == 0.0
    assert len(report.entropies_N) == sum(T for _, T in SIZES)
    assert same(parameters(owner), before)
    assert owner.learning_rate == rate


def test_a_discarded_gradient_leaves_no_trace():
    model = tiny_model()
    made = samples(model, SIZES, ADVANTAGES)
    disturbed, undisturbed = policy(model), policy(model)
    disturbed.compute_gradient(made[:2])
    disturbed.discard_gradient()
    assert same(parameters(disturbed), parameters(undisturbed))
    for owner in (disturbed, undisturbed):
        owner.compute_gradient(made)
        owner.apply_gradient()
    assert same(parameters(disturbed), parameters(undisturbed))


def test_weights_are_a_copy_in_the_dtype_asked_for():
    owner = policy(tiny_model())
    weights = owner.weights("bfloat16")
    assert set(weights.dtypes.values()) == {"bfloat16"}
    assert weights.arrays.keys() == parameters(owner).keys()
    exact = owner.weights("float32")
    before = {name: array.copy() for name, array in exact.arrays.items()}
    with torch.no_grad():
        for parameter in owner.model.parameters():
            parameter.add_(1.0)
    assert all(np.array_equal(exact.arrays[name], before[name]) for name in before)


def test_bfloat16_autocast_keeps_float32_weights_and_comes_near_the_exact_logprobs():
    model = tiny_model()
    made = samples(model, SIZES, ADVANTAGES)
    owner = policy(model, dtype="bfloat16")
    report = owner.compute_gradient(made)
    assert 0 < report.distances_N.mean() < 0.05
    assert {p.dtype for p in owner.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in owner.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "name",
    ["constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"],
)
def test_every_schedule_runs_as_transformers_defines_it(name):
    model = tiny_model()
    made = samples(model, SIZES[:2], ADVANTAGES[:2])
    owner = policy(model, lr_scheduler_type=name, warmup_steps=2, total_steps=5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    expected = get_scheduler(name, optimizer, num_warmup_steps=2, num_training_steps=5)
    for _ in range(5):
        assert owner.learning_rate == pytest.approx(expected.get_last_lr()[0])
        owner.compute_gradient(made)
        owner.apply_gradient()
        optimizer.step()
        expected.step()
