"""The vLLM engine, against transformers: same weights, same log-probs, whatever happened to the weights before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.errors import WeightTransferError
from common.types import GroupRequest
from common.weights import pack
from rollout.engine import build_engine, check_version
from tests.builders import exact_logprobs, tiny_model
from tests.engines import engine_spec, moved

AGREE = 1e-3
CACHE_BLOCKS = tuple(range(3, 60)) * 3
"""A prompt that is longer than several blocks of a prefix cache."""


def group_request(prompt_ids=(5, 6, 7), seeds=range(100, 104), prompt=0) -> GroupRequest:
    return GroupRequest(0, prompt, tuple(prompt_ids), tuple(seeds))


def sampled(group) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in group.completions_G]


def distance(group, model, temperature=1.0) -> float:
    """The largest |log-prob of the engine - log-prob of the model| over the tokens of a group."""
    return max(
        np.abs(c.logprobs_T - exact_logprobs(model, group.prompt_ids, c.token_ids, temperature)).max()
        for c in group.completions_G
    )


@pytest.fixture(scope="module")
def engines(tokenizer):
    """Engines by what is particular to them. vLLM engines of one process live together and end together."""
    built = {
        name: build_engine("vllm", engine_spec(tiny_model(**model).config, tokenizer, **spec))
        for name, (model, spec) in {
            "tied": ({"tied": True}, {}),
            "untied": ({"tied": False}, {}),
            "cool": ({}, {"temperature": 0.6}),
            "hot": ({}, {"temperature": 1.4}),
        }.items()
    }
    yield built
    for engine in built.values():
        engine.close()


@pytest.fixture
def engine(engines):
    return engines["tied"]


def test_it_has_no_version_before_its_first_weights(tokenizer, engines):
    assert engines["cool"].weights_version is None
    with pytest.raises(WeightTransferError, match="holds weights version None, but version 0"):
        check_version(0, engines["cool"].weights_version, 0)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_logprobs_follow_the_weights_through_updates(engines, kind):
    """Every parameter moves, the embedding included; the prompt stays, so that a kept prefix cache would show."""
    engine = engines[kind]
    model, previous = tiny_model(tied=kind == "tied"), None
    for version in range(3):
        engine.update_weights(pack(model.named_parameters()), version)
        fresh = engine.generate([group_request(CACHE_BLOCKS)])[0]
        assert fresh.weights_version == version
        assert distance(fresh, model) < AGREE
        if previous is not None:
            assert distance(fresh, previous) > 10 * AGREE
        model, previous = moved(model, seed=version), model


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_logprobs_are_right_when_the_embedding_alone_changed(engines, kind):
    engine = engines[kind]
    model = tiny_model(tied=kind == "tied")
    engine.update_weights(pack(model.named_parameters()), 0)
    engine.generate([group_request(CACHE_BLOCKS)])
    changed = moved(model, only="embed_tokens")
    engine.update_weights(pack(changed.named_parameters()), 1)
    fresh = engine.generate([group_request(CACHE_BLOCKS)])[0]
    assert distance(fresh, changed) < AGREE
    assert distance(fresh, model) > 10 * AGREE


@pytest.mark.parametrize(("kind", "temperature"), [("cool", 0.6), ("hot", 1.4)])
def test_logprobs_are_those_of_the_sampling_temperature(engines, kind, temperature):
    engine = engines[kind]
    model = tiny_model()
    engine.update_weights(pack(model.named_parameters()), 0)
    fresh = engine.generate([group_request()])[0]
    assert distance(fresh, model, temperature) < AGREE
    assert distance(fresh, model, 1.0) > 10 * AGREE


def test_a_failed_update_leaves_no_version_and_the_next_good_one_heals_it(engine):
    model = tiny_model()
    engine.update_weights(pack(model.named_parameters()), 3)
    wrong = pack((f"not.{name}", parameter) for name, parameter in model.named_parameters())
    with pytest.raises(WeightTransferError, match="agent 0 did not take weights version 4"):
        engine.update_weights(wrong, 4)
    assert engine.weights_version is None
    with pytest.raises(WeightTransferError):
        check_version(0, engine.weights_version, 4)
    healed = moved(model)
    engine.update_weights(pack(healed.named_parameters()), 5)
    fresh = engine.generate([group_request(CACHE_BLOCKS)])[0]
    assert fresh.weights_version == 5
    assert distance(fresh, healed) < AGREE


def test_an_update_that_leaves_a_parameter_out_is_refused(engine):
    model = tiny_model()
    engine.update_weights(pack(model.named_parameters()), 0)
    some = pack(list(moved(model).named_parameters())[:-1])
    with pytest.raises(WeightTransferError):
        engine.update_weights(some, 1)
    assert engine.weights_version is None


def test_a_request_gives_the_same_tokens_in_any_batch(engine):
    engine.update_weights(pack(tiny_model().named_parameters()), 0)
    alone = engine.generate([group_request()])[0]
    others = [group_request((9, 10, 11, 12, 13), range(500, 504), 1), group_request(CACHE_BLOCKS, range(4), 2)]
    among = engine.generate([others[0], group_request(), others[1]])[1]
    assert sampled(among) == sampled(alone)


def test_the_generations_of_a_group_differ_and_each_follows_its_own_seed(engine):
    engine.update_weights(pack(tiny_model().named_parameters()), 0)
    group = engine.generate([group_request(seeds=(1, 2, 3, 4))])[0]
    assert len(set(sampled(group))) == 4
    reversed_group = engine.generate([group_request(seeds=(4, 3, 2, 1))])[0]
    assert sampled(reversed_group) == sampled(group)[::-1]
    equal = engine.generate([group_request(seeds=(7, 7))])[0]
    assert len(set(sampled(equal))) == 1


def test_prompt_ids_go_through_unchanged(engine, tokenizer):
    """A BOS at the start is neither doubled nor dropped: log-probs are those of exactly these ids."""
    model = tiny_model()
    engine.update_weights(pack(model.named_parameters()), 0)
    for prompt_ids in [(tokenizer.bos_token_id, 5, 6), (tokenizer.bos_token_id,) * 2 + (5, 6), (5, 6)]:
        group = engine.generate([group_request(prompt_ids)])[0]
        assert group.prompt_ids == prompt_ids
        assert distance(group, model) < AGREE


def test_every_stop_token_ends_a_completion_and_stays_in_its_ids(engine, tokenizer):
    stops = engine.spec.stop_token_ids
    assert len(stops) > 1
    engine.update_weights(pack(tiny_model().named_parameters()), 0)
    group = engine.generate([group_request(seeds=range(200))])[0]
    ended = [c for c in group.completions_G if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == set(stops)
    for completion in group.completions_G:
        assert not set(completion.token_ids[:-1]) & set(stops)
        assert len(completion.token_ids) == len(completion.logprobs_T)
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == engine.spec.sampling.max_new_tokens


def test_texts_have_no_special_tokens(engine, tokenizer):
    engine.update_weights(pack(tiny_model().named_parameters()), 0)
    group = engine.generate([group_request(seeds=range(64))])[0]
    ended = [c for c in group.completions_G if c.token_ids[-1] == tokenizer.eos_token_id]
    assert ended
    for completion in group.completions_G:
        special = [i for i in completion.token_ids if i in tokenizer.all_special_ids]
        plain = [i for i in completion.token_ids if i not in tokenizer.all_special_ids]
        assert completion.text == tokenizer.decode(plain)
        assert not any(token in completion.text for token in tokenizer.convert_ids_to_tokens(special))


def test_a_pad_token_that_is_the_eos_token_changes_nothing(engine, tokenizer):
    """Prompts that contain it are read whole, and it still ends completions."""
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    model = tiny_model()
    engine.update_weights(pack(model.named_parameters()), 0)
    prompt_ids = (5, tokenizer.eos_token_id, 6, 7)
    group = engine.generate([group_request(prompt_ids, seeds=range(64))])[0]
    assert distance(group, model) < AGREE
    assert any(c.token_ids[-1] == tokenizer.eos_token_id for c in group.completions_G)


def test_a_group_is_stamped_with_the_version_it_was_sampled_from(engine):
    model = tiny_model()
    for version in (0, 7):
        engine.update_weights(pack(model.named_parameters()), version)
        assert engine.generate([group_request()])[0].weights_version == version


def test_16_bit_weights_arrive_as_their_bits(engines):
    """An engine in float32 that is sent bfloat16 holds exactly the rounded weights."""
    engine = engines["untied"]
    model = tiny_model(tied=False)
    engine.update_weights(pack(model.named_parameters(), torch.bfloat16), 0)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert distance(engine.generate([group_request()])[0], model) < AGREE


def test_an_update_with_a_parameter_of_another_shape_is_refused(engines):
    """And the next good update heals the engine."""
    engine = engines["hot"]
    model = tiny_model()
    shorter = ((name, parameter[..., :-1]) for name, parameter in model.named_parameters())
    with pytest.raises(WeightTransferError):
        engine.update_weights(pack(shorter), 1)
    assert engine.weights_version is None
    engine.update_weights(pack(model.named_parameters()), 2)
    assert distance(engine.generate([group_request()])[0], model, 1.4) < AGREE
