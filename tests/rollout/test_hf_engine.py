"""The Hugging Face engine: what it samples, with which log-probs, and where completions end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from common.errors import RolloutError, WeightTransferError
from common.types import GroupRequest, Sampling
from common.weights import pack
from rollout.engine import EngineSpec, build_engine, resolve_backend, resolve_dtype
from rollout.hf_engine import HFEngine, SeededSampler
from tests.builders import BOS, EOS, exact_logprobs, tiny_model, tiny_tokenizer

SEEDS = tuple(range(40, 46))
PROMPTS = [(5, 6, 7), tuple(range(20, 60)), (9,), (EOS, 8, EOS, EOS, 9, BOS)]


def engine(model, stop=(EOS,), max_new_tokens=10, **sampling) -> HFEngine:
    """An engine that holds version 0, the weights of a model."""
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": None} | sampling
    spec = EngineSpec(
        agent=1,
        config=model.config,
        tokenizer=tiny_tokenizer(),
        stop_token_ids=tuple(stop),
        sampling=Sampling(max_new_tokens=max_new_tokens, **settings),
        dtype="float32",
        max_model_len=128,
        max_completions=64,
        memory_fraction=0.5,
    )
    made = build_engine("hf", spec)
    made.update_weights(pack(model.named_parameters()), 0)
    return made


def request(prompt_ids, seeds=SEEDS, prompt=0) -> GroupRequest:
    return GroupRequest(1, prompt, tuple(prompt_ids), tuple(seeds))


def sampled(groups) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group.completions_G] for group in groups]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_logprobs_are_those_of_the_model_at_the_temperature(tied, temperature):
    model = tiny_model(tied)
    groups = engine(model, temperature=temperature).generate([request(ids, prompt=p) for p, ids in enumerate(PROMPTS)])
    for prompt_ids, group in zip(PROMPTS, groups, strict=True):
        assert group.prompt_ids == prompt_ids and len(group.completions_G) == len(SEEDS)
        for completion in group.completions_G:
            expected = exact_logprobs(model, prompt_ids, completion.token_ids, temperature)
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)
            assert completion.logprobs_T.dtype == np.float32


def test_a_completion_depends_on_its_seed_and_not_on_its_company():
    generate = engine(tiny_model()).generate
    together = sampled(generate([request(ids, prompt=p) for p, ids in enumerate(PROMPTS)]))
    for prompt_ids, group in zip(PROMPTS, together, strict=True):
        assert sampled(generate([request(prompt_ids)])) == [group]
        assert sampled(generate([request(prompt_ids, SEEDS[3:4])])) == [[group[3]]]
    assert sampled(generate([request(PROMPTS[0], reversed(SEEDS))])) == [together[0][::-1]]


def test_completions_of_a_group_differ_and_equal_seeds_do_not():
    ((*group,),) = sampled(engine(tiny_model()).generate([request(PROMPTS[0], (*SEEDS, SEEDS[0], 2**63 - 1))]))
    assert group[len(SEEDS)] == group[0]
    assert len(set(group)) == len(SEEDS) + 1


def test_groups_come_in_order_with_agent_prompt_and_version():
    made = engine(tiny_model())
    made.update_weights(pack(tiny_model().named_parameters()), 7)
    groups = made.generate([request((5, 6), prompt=3), request((7,), prompt=1)])
    assert [(g.agent, g.prompt, g.prompt_ids, g.weights_version) for g in groups] == [
        (1, 3, (5, 6), 7),
        (1, 1, (7,), 7),
    ]


def test_every_stop_token_ends_a_completion_and_stays_in_its_tokens():
    stops = {EOS, *range(100, 160)}
    (group,) = engine(tiny_model(), stop=stops, max_new_tokens=16).generate([request(PROMPTS[0], range(24))])
    ends = set()
    for completion in group.completions_G:
        *body, last = completion.token_ids
        assert not stops & set(body)
        assert completion.finish_reason == ("stop" if last in stops else "length")
        assert len(completion.token_ids) == 16 or last in stops
        assert len(completion.logprobs_T) == len(completion.token_ids)
        ends.add(last)
    assert len(ends & stops) > 3


def biased_towards(token: int, by: float):
    """An untied model that samples one token much more often than others, after any prompt."""
    model = tiny_model(tied=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 50.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[token, 0] = by
    return model


def test_an_end_token_that_is_also_the_padding_is_kept_once_with_its_logprob():
    model = biased_towards(EOS, 0.6)
    prompt_ids = (5, EOS, 6, EOS)
    (group,) = engine(model, max_new_tokens=8).generate([request(prompt_ids, range(16))])
    lengths = {len(c.token_ids) for c in group.completions_G if c.finish_reason == "stop"}
    assert len(lengths) > 1
    for completion in group.completions_G:
        assert completion.token_ids.count(EOS) == (completion.finish_reason == "stop")
        expected = exact_logprobs(model, prompt_ids, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)


def test_without_stop_tokens_completions_run_to_the_limit_whatever_the_configuration_says():
    model = biased_towards(EOS, 0.6)
    assert model.config.eos_token_id == EOS
    (group,) = engine(model, stop=(), max_new_tokens=8).generate([request((5, 6))])
    assert any(EOS in completion.token_ids[:-1] for completion in group.completions_G)
    for completion in group.completions_G:
        assert len(completion.token_ids) == 8 and completion.finish_reason == "length"
        np.testing.assert_allclose(
            completion.logprobs_T, exact_logprobs(model, (5, 6), completion.token_ids), atol=1e-4
        )


def test_a_token_that_is_not_a_stop_token_does_not_stop():
    model = biased_towards(EOS, 0.6)
    (group,) = engine(model, stop=(250,), max_new_tokens=8).generate([request((5, 6))])
    assert any(EOS in completion.token_ids[:-1] for completion in group.completions_G)


def test_texts_have_no_special_tokens_and_no_cleaning_up():
    tokenizer = tiny_tokenizer()
    (group,) = engine(biased_towards(BOS, 0.4), max_new_tokens=8).generate([request((5, 6), range(12))])
    assert any(BOS in completion.token_ids for completion in group.completions_G)
    for completion in group.completions_G:
        plain = [token for token in completion.token_ids if token not in (BOS, EOS)]
        assert completion.text == tokenizer.decode(plain, clean_up_tokenization_spaces=False)
        assert "<s>" not in completion.text and "</s>" not in completion.text


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_sampled_frequencies_are_those_of_the_softmax(temperature):
    draws = 6000
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, 0.5])
    sampler = SeededSampler(Sampling(temperature, 1.0, None, 1), list(range(draws)))
    tokens = sampler(torch.zeros(draws, 1, dtype=torch.long), logits_V.repeat(draws, 1)).argmax(1).numpy()
    scaled = np.exp(logits_V.double().numpy() / temperature)
    expected = scaled / scaled.sum()
    found = np.bincount(tokens, minlength=6) / draws
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / draws)).all()
    np.testing.assert_allclose(sampler.logprobs[0].numpy(), np.log(expected[tokens]), atol=1e-5)


@pytest.mark.parametrize("truncation, kept", [({"top_k": 2}, [0, 1]), ({"top_p": 0.8}, [0, 1])])
def test_truncated_sampling_stays_inside_and_normalises_over_what_is_kept(truncation, kept):
    logits_V = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    settings = Sampling(1.0, truncation.get("top_p", 1.0), truncation.get("top_k"), 1)
    sampler = SeededSampler(settings, list(range(200)))
    tokens = sampler(torch.zeros(200, 1, dtype=torch.long), logits_V.repeat(200, 1)).argmax(1)
    assert set(tokens.tolist()) == set(kept)
    expected = np.log(np.array([0.5, 0.3])[tokens.numpy()] / 0.8)
    np.testing.assert_allclose(sampler.logprobs[0].numpy(), expected, atol=1e-5)


def test_new_weights_are_sampled_from_and_their_version_is_told():
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    made = engine(first)
    for version, model in ((1, second), (2, first)):
        made.update_weights(pack(model.named_parameters()), version)
        (group,) = made.generate([request(PROMPTS[0])])
        assert group.weights_version == version
        for completion in group.completions_G:
            expected = exact_logprobs(model, PROMPTS[0], completion.token_ids)
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)


def test_a_failed_update_leaves_no_version():
    made = engine(tiny_model(tied=True))
    for wrong in (tiny_model(tied=False), tiny_model(intermediate_size=64)):
        with pytest.raises(WeightTransferError, match="agent 1 did not take weights version 3"):
            made.update_weights(pack(wrong.named_parameters()), 3)
        assert made.weights_version is None


def test_an_engine_holds_no_version_before_its_first_weights():
    spec = engine(tiny_model()).spec
    assert HFEngine(spec).weights_version is None


def test_building_and_generating_leave_the_random_generator_alone():
    state = torch.get_rng_state()
    engine(tiny_model()).generate([request(PROMPTS[0])])
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_that_are_not_finite_are_refused_with_agent_and_token():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[:] = torch.nan
    with pytest.raises(RolloutError, match=r"agent 1 sampled token \d+ at position 0 with log-prob nan"):
        engine(model).generate([request(PROMPTS[0])])


def test_an_engine_that_does_not_start_names_its_agent():
    spec = engine(tiny_model()).spec
    with pytest.raises(RolloutError, match="hf engine of agent 1 did not start"):
        build_engine("hf", dataclasses.replace(spec, dtype="no dtype"))


def test_backends_and_dtypes_that_are_named_are_taken():
    assert resolve_backend("hf") == "hf" and resolve_backend("auto") in ("hf", "vllm")
    assert [resolve_dtype(dtype) for dtype in ("float32", "bfloat16")] == ["float32", "bfloat16"]
    assert resolve_dtype("auto") in ("float32", "bfloat16")
