"""The tutorial's script as its users have it, with nothing but its two imports of the library changed."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.builders import save_tiny_model
from tests.processes import run_python, user_environment

SCRIPT = """
import math
from functools import partial
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from common.rewards import RewardProcessors
from learner import MAGRPOConfig, MAGRPOTrainer

train_data = {
    "prompt": [
        "Describe a city in the clouds:",
        "Invent a new holiday and explain it:",
        "Write a bedtime story for a dragon:",
        "Explain how teleportation might work:",
        "Tell a joke about dinosaurs:",
        "Describe a world without electricity:",
        "Create a superhero with a unique power:",
        "Write a scene where the moon talks:",
        "Invent a new type of fruit:",
        "Design a playground on Mars:",
    ]
}
train_dataset = Dataset.from_dict(train_data)

model_name = "Qwen/Qwen2.5-0.5B"
tokenizer = AutoTokenizer.from_pretrained(model_name)
agents = [AutoModelForCausalLM.from_pretrained(model_name) for _ in range(2)]


def proper_length_ratio_reward(
    completions1, completions2, target_min=2.0, target_max=3.0
):
    rewards = []
    for c1, c2 in zip(completions1, completions2):
        len1, len2 = len(c1), len(c2)

        if len1 == 0:
            rewards.append(0.0)
            continue

        ratio = len2 / len1

        if target_min <= ratio <= target_max:
            reward = 1.0
        else:
            if ratio < target_min:
                distance = target_min - ratio
            else:
                distance = ratio - target_max

            reward = math.exp(-distance)

        rewards.append(float(reward))

    return rewards


output_dir = "./magrpo_multi_reward_output"
config = MAGRPOConfig(
    num_train_epochs=3,
    agent_learning_rate=5e-5,
    logging_steps=10,
    num_generations=8,
    num_turns=1,
    max_new_tokens=128,
)

configured_reward_func = partial(
    proper_length_ratio_reward, target_min=2, target_max=3
)

trainer = MAGRPOTrainer(
    agents=agents,
    reward_func=configured_reward_func,
    reward_processor=RewardProcessors.scale(factor=100.0),
    args=config,
    train_dataset=train_dataset,
    tokenizer=tokenizer,
)

trainer.train()
trainer.save_model(f"{output_dir}/models")
"""


def test_the_tutorial_runs_to_its_end(tmp_path):
    """There is no `__main__` guard in it, and its reward is a partial of a function of the script."""
    model = save_tiny_model(tmp_path / "model")
    script = tmp_path / "tutorial.py"
    script.write_text(
        SCRIPT.replace("Qwen/Qwen2.5-0.5B", str(model))
        .replace("max_new_tokens=128", "max_new_tokens=16")
        .replace("num_train_epochs=3", "num_train_epochs=1")
    )
    work = tmp_path / "work"
    work.mkdir()
    outcome = run_python([script], work, user_environment(tmp_path / "home"), timeout=240)
    assert outcome.status == 0, outcome.output
    assert outcome.survivors == []
    models = work / "magrpo_multi_reward_output" / "models"
    start = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    for agent in ("agent_0", "agent_1"):
        trained = AutoModelForCausalLM.from_pretrained(models / agent, dtype=torch.float32)
        assert any(not torch.equal(parameter, start[name]) for name, parameter in trained.named_parameters())
        assert AutoTokenizer.from_pretrained(models / agent)("Tell a joke:")["input_ids"]
    (metrics,) = work.rglob("metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert all(abs(r["processed_reward_mean"] - 100 * r["reward_mean"]) < 1e-6 for r in records)
