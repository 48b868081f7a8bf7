"""Small runs of the trainer: tiny models, a reward on lengths, a step or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from learner import MAGRPOConfig, MAGRPOTrainer

PROMPTS = ["Describe a city in the clouds:", "Invent a new holiday:", "Tell a joke:"]


def length_reward(*completions: list[str]) -> list[float]:
    """Characters of the last agent's text over those of all texts."""
    return [len(texts[-1]) / (1 + sum(map(len, texts))) for texts in zip(*completions, strict=True)]


def config(output_dir: Path, **changes: Any) -> MAGRPOConfig:
    """Two steps in this process, in float32, with a learning rate that moves the weights."""
    settings = {
        "num_train_epochs": 1,
        "agent_learning_rate": 1e-2,
        "num_generations": 4,
        "max_new_tokens": 12,
        "rollout_workers": 0,
        "rollout_backend": "hf",
        "rollout_dtype": "float32",
        "learner_dtype": "float32",
        "output_dir": str(output_dir),
    }
    return MAGRPOConfig(**settings | changes)


def trainer(
    agents: list, tokenizer: PreTrainedTokenizerBase | list | None, args: MAGRPOConfig, **changes: Any
) -> MAGRPOTrainer:
    """A trainer of the agents on `PROMPTS`."""
    settings = {"reward_func": length_reward, "train_dataset": [{"prompt": prompt} for prompt in PROMPTS]}
    return MAGRPOTrainer(agents=agents, tokenizer=tokenizer, args=args, **settings | changes)
