"""What goes in and comes out of a trainer: model objects, folder names, tokenizers, saved folders."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.builders import save_tiny_model, tiny_model
from tests.runs import PROMPTS, config, trainer


def parameters(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def saved(folder, agent: int):
    return AutoModelForCausalLM.from_pretrained(folder / f"agent_{agent}", dtype=torch.float32)


def test_weights_in_memory_count_rather_than_those_on_disk(tmp_path, tokenizer):
    save_tiny_model(tmp_path / "disk", seed=0)
    agents = [AutoModelForCausalLM.from_pretrained(tmp_path / "disk", dtype=torch.float32) for _ in range(2)]
    with torch.no_grad():
        for parameter in agents[1].parameters():
            parameter.mul_(1.5)
    before = [parameters(agent) for agent in agents]
    training = trainer(agents, tokenizer, config(tmp_path / "run", agent_learning_rate=0.0))
    training.train()
    training.save_model(tmp_path / "models")
    for agent in range(2):
        assert same(parameters(saved(tmp_path / "models", agent)), before[agent])
    assert not same(before[0], before[1])


def test_after_training_the_objects_hold_what_is_saved(tmp_path, tokenizer):
    agents = [tiny_model(seed=0, tied=True), tiny_model(seed=1, tied=False)]
    before = [parameters(agent) for agent in agents]
    training = trainer(agents, tokenizer, config(tmp_path))
    training.train()
    training.save_model(tmp_path / "models")
    for agent, model in enumerate(agents):
        assert not same(parameters(model), before[agent])
        assert same(parameters(model), parameters(saved(tmp_path / "models", agent)))


def test_through_ray_the_objects_hold_what_is_saved(tmp_path, tokenizer, ray_cluster):
    agents = [tiny_model(seed=0)]
    before = parameters(agents[0])
    training = trainer(agents, tokenizer, config(tmp_path, rollout_workers=1))
    training.train()
    training.save_model(tmp_path / "models")
    training.close()
    assert not same(parameters(agents[0]), before)
    assert same(parameters(agents[0]), parameters(saved(tmp_path / "models", 0)))


def test_bfloat16_objects_stay_bfloat16_and_train_in_float32(tmp_path, tokenizer):
    model = tiny_model().to(torch.bfloat16)
    training = trainer([model], tokenizer, config(tmp_path))
    training.train()
    training.save_model(tmp_path / "models")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    written = parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "agent_0", dtype="auto"))
    assert {parameter.dtype for parameter in written.values()} == {torch.float32}
    assert same({name: value.bfloat16() for name, value in written.items()}, parameters(model))


@pytest.mark.parametrize("agents", [1, 3])
def test_any_number_of_agents_trains_and_is_saved(agents, tmp_path, tokenizer):
    training = trainer([tiny_model(seed=agent) for agent in range(agents)], tokenizer, config(tmp_path))
    history = training.train().history
    training.save_model(tmp_path / "models")
    assert len(history) == 2
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [f"agent_{a}" for a in range(agents)]
    assert f"agent_{agents - 1}/loss" in history[0] and f"agent_{agents}/loss" not in history[0]


def test_agents_may_be_one_folder_for_all(tmp_path):
    folder = save_tiny_model(tmp_path / "disk", seed=3)
    training = trainer(None, None, config(tmp_path / "run"), agent_model=str(folder), num_agents=2)
    training.train()
    training.save_model(tmp_path / "models")
    first, second = (parameters(saved(tmp_path / "models", agent)) for agent in range(2))
    assert not same(first, second)
    on_disk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert same(parameters(on_disk), parameters(tiny_model(seed=3)))


def test_every_agent_may_have_its_own_model_and_tokenizer(tmp_path, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<|end|>"])
    other.eos_token = "<|end|>"
    larger = tiny_model(seed=1, vocab_size=tiny_model().config.vocab_size + 8)
    training = trainer([tiny_model(), larger], [tokenizer, other], config(tmp_path))
    training.train()
    training.save_model(tmp_path / "models")
    ends = [AutoTokenizer.from_pretrained(tmp_path / "models" / f"agent_{agent}").eos_token for agent in range(2)]
    assert ends == [tokenizer.eos_token, "<|end|>"]


def test_saved_folders_generate_by_themselves(tmp_path, tokenizer):
    model = tiny_model()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 20]
    training = trainer([model, tiny_model(seed=1)], tokenizer, config(tmp_path))
    training.train()
    training.save_model(tmp_path / "models")
    folder = tmp_path / "models" / "agent_0"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [tokenizer.eos_token_id, 20]
    loaded, loaded_tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = loaded_tokenizer(PROMPTS[0], return_tensors="pt")
    assert ids["input_ids"].tolist()[0] == tokenizer(PROMPTS[0])["input_ids"]
    output = loaded.generate(**ids, max_new_tokens=4, do_sample=False)
    assert output.shape[1] > ids["input_ids"].shape[1]


def test_saving_twice_and_training_on_after_it_work(tmp_path, tokenizer):
    model = tiny_model()
    training = trainer([model], tokenizer, config(tmp_path))
    training.train()
    training.save_model(tmp_path / "first")
    assert training.train().global_step == 4
    training.save_model(tmp_path / "second")
    assert not same(parameters(saved(tmp_path / "first", 0)), parameters(saved(tmp_path / "second", 0)))
    assert same(parameters(saved(tmp_path / "second", 0)), parameters(model))
