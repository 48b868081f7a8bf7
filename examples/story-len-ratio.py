"""Two agents get the same story prompts; the second learns to write 2-3 times as many characters as the first.

Neither sees the other's text. The reward looks at lengths only, not at what the stories are like.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from functools import partial

from datasets import Dataset

from common.cli import argument_parser
from common.errors import MAGRPOError
from common.packaged_model import NAME as PACKAGED_MODEL
from common.packaged_model import packaged_model
from common.rewards import RewardProcessors
from learner import MAGRPOConfig, MAGRPOTrainer

PROMPTS = [
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


@dataclass
class ExampleArguments:
    """What is asked of the example, beside the configuration of the run."""

    model: str = field(
        default="Qwen/Qwen2.5-0.5B", metadata={"help": f"hub name, folder, or {PACKAGED_MODEL} for the packaged model"}
    )
    local: bool = field(default=False, metadata={"help": "run in this process, without Ray (rollout_workers=0)"})
    wandb: bool = field(default=False, metadata={"help": "log to Weights & Biases"})
    wandb_project: str = field(default="magrpo", metadata={"help": "W&B project"})
    wandb_entity: str | None = field(default=None, metadata={"help": "W&B entity"})


def proper_length_ratio_reward(completions1, completions2, target_min=2.0, target_max=3.0):
    """1 where the second text has `target_min` to `target_max` times the characters of the first, less outside."""
    rewards = []
    for text1, text2 in zip(completions1, completions2, strict=True):
        if len(text1) == 0:
            rewards.append(0.0)
            continue
        ratio = len(text2) / len(text1)
        distance = max(target_min - ratio, ratio - target_max, 0.0)
        rewards.append(math.exp(-distance))
    return rewards


def parse_arguments() -> tuple[ExampleArguments, MAGRPOConfig]:
    """The flags, with the tutorial's configuration as defaults."""
    parser = argument_parser(ExampleArguments, MAGRPOConfig, description=__doc__)
    parser.set_defaults(
        num_train_epochs=3,
        agent_learning_rate=5e-5,
        logging_steps=10,
        num_generations=8,
        num_turns=1,
        max_new_tokens=128,
        output_dir="./magrpo_multi_reward_output",
    )
    arguments, config = parser.parse_args_into_dataclasses()
    if not arguments.local:
        return arguments, config
    if config.rollout_workers:
        parser.error(f"--local runs without workers: leave out --rollout-workers {config.rollout_workers}")
    return arguments, dataclasses.replace(config, rollout_workers=0)


def main() -> None:
    """Train and save."""
    arguments, config = parse_arguments()
    wandb_config = {"project": arguments.wandb_project, "entity": arguments.wandb_entity}
    trainer = MAGRPOTrainer(
        agent_model=packaged_model() if arguments.model == PACKAGED_MODEL else arguments.model,
        num_agents=2,
        reward_func=partial(proper_length_ratio_reward, target_min=2, target_max=3),
        reward_processor=RewardProcessors.scale(factor=100.0),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        wandb_config=wandb_config if arguments.wandb else None,
    )
    trainer.train()
    trainer.save_model(f"{config.output_dir}/models")


if __name__ == "__main__":
    try:
        main()
    except MAGRPOError as error:
        sys.exit(f"error: {error}")
