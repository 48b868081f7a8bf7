"""From what a user passes as agents to models that any process can build."""

from __future__ import annotations

import copy
import json
import pathlib
import pickle

import pytest
import torch
import transformers
from transformers import GenerationConfig

from common.errors import ConfigurationError, ModelError
from common.models import describe_agent, resolve_agents, resolve_tokenizers, stop_token_ids
from tests.builders import EOS, built, save_tiny_model, tiny_llama_config, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), seed=3, adds_bos=True)


def same(first, second) -> bool:
    found, expected = dict(first.named_parameters()), dict(second.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_agents_come_one_by_one_or_from_one_name():
    model = tiny_model()
    assert resolve_agents(["a", model], None, None) == ["a", model]
    assert resolve_agents(("a", pathlib.Path("b")), None, 2) == ["a", "b"]
    assert resolve_agents(None, "a", None) == ["a", "a"]
    assert resolve_agents(None, "a", 3) == ["a"] * 3
    assert resolve_agents(["a"], None, None) == ["a"]


@pytest.mark.parametrize(
    "agents, agent_model, num_agents, said",
    [
        (None, None, None, "agent_model must be .* got None"),
        (None, tiny_model(), 2, "go into `agents`"),
        (["a", "b"], "a", None, "not both"),
        (["a", "b"], None, 3, "num_agents=3 but agents has 2"),
        ([], None, None, "at least one agent"),
        (None, "a", 0, "at least one agent"),
        (None, "a", -1, "num_agents"),
        (None, "a", 2.0, "num_agents"),
        (None, "a", "2", "num_agents"),
        ("ab", None, None, "list .* got str"),
        (tiny_model(), None, None, "list .* got LlamaForCausalLM"),
        (iter(["a"]), None, None, "list .* got list_iterator"),
        ([None, "a"], None, None, r"agents\[0\] .* got NoneType"),
        ([tiny_model(), torch.nn.Linear(1, 1)], None, None, r"agents\[1\] .* got Linear"),
        ([tiny_model()] * 2, None, None, "same model object"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_what_contradicts_itself_is_refused(agents, agent_model, num_agents, said):
    with pytest.raises(ConfigurationError, match=said):
        resolve_agents(agents, agent_model, num_agents)


def test_a_name_is_described_without_its_weights(folder):
    described = describe_agent(folder)
    assert (described.name, described.weights) == (folder, None)
    assert (described.vocab_size, described.context_length) == (300, 512)
    built_model = described.build()
    assert same(built_model, tiny_model(seed=3))
    assert built_model.dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
def test_of_an_object_the_weights_in_memory_count(folder, tied):
    model = tiny_model(tied, seed=5)
    model.config._name_or_path = folder
    with torch.no_grad():
        model.model.norm.weight.add_(0.25)
    expected = copy.deepcopy(model)
    described = pickle.loads(pickle.dumps(describe_agent(model)))
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    assert same(described.build(), expected)


def test_a_bfloat16_object_is_built_in_float32_with_the_same_numbers():
    model = tiny_model().bfloat16()
    made = describe_agent(model).build()
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert same(made.bfloat16(), model)


def test_buffers_of_an_object_that_are_saved_with_it_count_too():
    config = transformers.DeepseekV3Config(
        **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4},
        **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": None},
        **{"kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
    )
    model = built(transformers.DeepseekV3ForCausalLM, config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(describe_agent(model).build().eval()(ids).logits, model(ids).logits)


def test_building_a_model_leaves_the_random_generator_alone():
    described = describe_agent(tiny_model())
    state = torch.get_rng_state()
    described.build()
    described.empty()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_folder_that_does_not_exist_is_refused_with_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "nowhere"), "./nowhere", "../a/b/c", "a/b/c"):
        with pytest.raises(ModelError, match="no model folder") as refused:
            describe_agent(name)
        assert name in str(refused.value) and str(tmp_path) in str(refused.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no config.json.*save_pretrained"):
        describe_agent(str(tmp_path))


@pytest.mark.parametrize(
    "config, said",
    [
        ("not json", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"model_type": "no-such-model"}', "cannot be read"),
        ('{"model_type": "t5"}', "t5 model, which is not a causal language model"),
        ('{"model_type": "vit"}', "vit model, which is not a causal language model"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=said):
        describe_agent(str(tmp_path))


def test_weights_that_are_not_there_are_refused_when_the_model_is_built(tmp_path):
    tiny_llama_config().save_pretrained(tmp_path)
    described = describe_agent(str(tmp_path))
    with pytest.raises(ModelError, match="weights of model .* cannot be read"):
        described.build()


def test_weights_of_another_shape_are_refused_when_the_model_is_built(tmp_path):
    save_tiny_model(tmp_path)
    tiny_llama_config(intermediate_size=64).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="weights of model"):
        describe_agent(str(tmp_path)).build()


def test_weights_that_lack_a_part_of_the_model_are_refused_when_it_is_built(tmp_path):
    tiny_model(tied=False).model.save_pretrained(tmp_path)
    tiny_llama_config(tied=False).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="lm_head.weight"):
        describe_agent(str(tmp_path)).build()


def test_quantised_weights_are_refused(tmp_path):
    model = tiny_model()
    model.model.norm.register_parameter("packed", torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), False))
    with pytest.raises(ModelError, match="quantis"):
        describe_agent(model)
    save_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantis"):
        describe_agent(str(tmp_path))


@pytest.mark.parametrize(
    "configured, has_eos, expected",
    [
        (5, True, (EOS, 5)),
        ([7, 5, 5], True, (EOS, 5, 7)),
        ([7, 5], False, (5, 7)),
        (None, True, (EOS,)),
        (None, False, ()),
        ([299, 300, -1, 5], False, (5, 299)),
    ],
)
def test_every_token_that_stops_is_honoured(configured, has_eos, expected):
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=configured)
    assert stop_token_ids(describe_agent(model), tiny_tokenizer(eos=has_eos)) == expected


def test_the_generation_configuration_beside_a_model_is_read(tmp_path):
    save_tiny_model(tmp_path)
    GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    described = describe_agent(str(tmp_path))
    assert stop_token_ids(described, tiny_tokenizer()) == (EOS, 5, 6)
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(describe_agent(str(tmp_path)), tiny_tokenizer(eos=False)) == (EOS,)


def test_one_tokenizer_serves_all_agents_and_several_one_each():
    first, second = tiny_tokenizer(), tiny_tokenizer()
    assert resolve_tokenizers(first, ["a", "b"]) == [first, first]
    assert resolve_tokenizers([first, second], ["a", "b"]) == [first, second]


def test_without_a_tokenizer_the_one_beside_the_model_is_read(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = resolve_tokenizers(None, [folder, model])
    assert [tokenizer("ab")["input_ids"] for tokenizer in found] == [
        tiny_tokenizer(adds_bos=True)("ab")["input_ids"]
    ] * 2


@pytest.mark.parametrize(
    "tokenizer, said",
    [([tiny_tokenizer()], "1 entries for 2 agents"), ("name", "got str"), ([tiny_tokenizer(), None], "got NoneType")],
    ids=["one of two", "name", "none"],
)
def test_other_tokenizers_are_refused(tokenizer, said):
    with pytest.raises(ConfigurationError, match=said):
        resolve_tokenizers(tokenizer, ["a", "b"])


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"agents\[0\] is a model without a name"):
        resolve_tokenizers(None, [tiny_model()])
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tokenizer of model"):
        resolve_tokenizers(None, [str(tmp_path)])
