"""The engines sample from the weights that the learner trains and that are saved."""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from common.weights import load_into
from rollout.pool import RolloutPool
from tests.builders import exact_logprobs, tiny_model
from tests.runs import config, trainer


def largest_distance(groups, model) -> float:
    return max(
        np.abs(c.logprobs_T - exact_logprobs(model, group.prompt_ids, c.token_ids)).max()
        for group in groups
        for c in group.completions_G
    )


def watched(monkeypatch):
    """What every agent's engine sampled and was sent, by version."""
    groups, sent = {}, {}
    generate, update_weights = RolloutPool.generate, RolloutPool.update_weights

    def watched_generate(self, requests, weights_version):
        groups[weights_version] = generate(self, requests, weights_version)
        return groups[weights_version]

    def watched_update(self, weights_A, version):
        sent[version] = weights_A
        update_weights(self, weights_A, version)

    monkeypatch.setattr(RolloutPool, "generate", watched_generate)
    monkeypatch.setattr(RolloutPool, "update_weights", watched_update)
    return groups, sent


def test_fresh_completions_have_the_logprobs_of_the_new_weights_and_not_of_the_old(monkeypatch, tmp_path, tokenizer):
    groups, sent = watched(monkeypatch)
    agents = [tiny_model(seed=0, tied=True), tiny_model(seed=1, tied=False)]
    originals = [copy.deepcopy(model) for model in agents]
    args = config(tmp_path, num_train_epochs=2, rollout_backend="vllm")
    training = trainer(agents, tokenizer, args)
    training.train()
    training.save_model(tmp_path / "models")
    assert sorted(groups) == [0, 1, 2, 3] and sorted(sent) == [0, 1, 2, 3, 4]

    for agent, original in enumerate(originals):
        by_version = []
        for version in sorted(sent):
            model = copy.deepcopy(original)
            load_into(model, sent[version][agent])
            by_version.append(model)
        for name, parameter in original.named_parameters():
            assert torch.equal(parameter, by_version[0].get_parameter(name))
        for version in sorted(groups):
            own = [group for group in groups[version] if group.agent == agent]
            assert largest_distance(own, by_version[version]) < 1e-3
            if version > 0:
                assert largest_distance(own, by_version[version - 1]) > 1e-2
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / f"agent_{agent}", dtype=torch.float32)
        for name, parameter in by_version[-1].named_parameters():
            assert torch.equal(parameter, saved.get_parameter(name))


def test_completions_of_a_saved_model_continue_those_of_training(monkeypatch, tmp_path, tokenizer):
    """A new run from the saved folders samples from exactly the saved weights."""
    training = trainer([tiny_model(tied=True), tiny_model(seed=1, tied=False)], tokenizer, config(tmp_path / "first"))
    training.train()
    training.save_model(tmp_path / "models")
    groups, _ = watched(monkeypatch)
    folders = [str(tmp_path / "models" / f"agent_{agent}") for agent in range(2)]
    trainer(folders, None, config(tmp_path / "second", rollout_backend="vllm")).train()
    for agent, folder in enumerate(folders):
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert largest_distance([group for group in groups[0] if group.agent == agent], saved) < 1e-3
