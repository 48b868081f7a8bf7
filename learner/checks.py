"""What the trainer checks and says before anything starts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.config import MAGRPOConfig
from common.errors import ConfigurationError, ModelError
from common.models import AgentModel, stop_token_ids
from common.reporting import check_wandb_login
from common.rewards import RewardFunction, RewardProcessor, check_reward_signature
from common.types import Prompt

_UNSUPPORTED = {
    "model_config": "load the models yourself and pass them as `agents`",
    "model": "pass `agents`, or `agent_model` with num_agents",
    "config": "the configuration is passed as `args`",
    "dataset": "the data set is passed as `train_dataset`",
    "tokenizers": "one tokenizer, or one per agent, is passed as `tokenizer`",
    "processing_class": "one tokenizer, or one per agent, is passed as `tokenizer`",
    "reward_funcs": "there is one reward function, passed as `reward_func`",
    "eval_dataset": "evaluation during training is not available here; leave it out",
    "eval_logger": "evaluation during training is not available here; leave it out",
    "eval_aggregator": "evaluation during training is not available here; leave it out",
    "external_transition": "there is one turn; leave it out",
}


def refuse_unsupported(names: Iterable[str]) -> None:
    """Refuse arguments that the trainer does not have.

    Raises:
        ConfigurationError: there is one; the message says what to use instead.
    """
    for name in names:
        hint = _UNSUPPORTED.get(name, "see help(MAGRPOTrainer) for those it has")
        raise ConfigurationError(f"MAGRPOTrainer has no argument {name!r}: {hint}")


def check_arguments(
    config: MAGRPOConfig,
    num_agents: int,
    reward_func: RewardFunction | None,
    reward_processor: RewardProcessor | None,
    wandb_config: dict[str, Any] | None,
) -> None:
    """Refuse arguments of the wrong kind, and a W&B run that nobody is logged in for.

    Raises:
        ConfigurationError: with the argument's name.
    """
    if not isinstance(config, MAGRPOConfig):
        raise ConfigurationError(f"args must be a MAGRPOConfig, got {type(config).__name__}")
    check_reward_signature(reward_func, num_agents)
    if reward_processor is not None and not callable(reward_processor):
        raise ConfigurationError(f"reward_processor must be callable, got {type(reward_processor).__name__}")
    if wandb_config is not None:
        if not isinstance(wandb_config, dict):
            raise ConfigurationError(f"wandb_config must be a dictionary, got {type(wandb_config).__name__}")
        check_wandb_login()


def prompt_limit(agent: int, model: AgentModel, config: MAGRPOConfig) -> int:
    """The longest prompt an agent can take, in tokens.

    Raises:
        ConfigurationError: max_new_tokens and max_prompt_length leave no room in the model's context.
    """
    if model.context_length is None:
        return config.max_prompt_length or 2**31
    room = model.context_length - config.max_new_tokens
    if room < (config.max_prompt_length or 1):
        raise ConfigurationError(
            f"max_new_tokens={config.max_new_tokens} and max_prompt_length={config.max_prompt_length} do not fit the "
            f"{model.context_length} positions of agent {agent}'s model: lower them"
        )
    return config.max_prompt_length or room


def check_vocabularies(models: Sequence[AgentModel], prompts: Sequence[Prompt]) -> None:
    """Refuse prompts with tokens that their model has no embedding for.

    Raises:
        ModelError: there is one.
    """
    for agent, model in enumerate(models):
        largest = max(max(prompt.token_ids_A[agent]) for prompt in prompts)
        if largest >= model.vocab_size:
            raise ModelError(
                f"the tokenizer of agent {agent} gives token {largest}, but its model has {model.vocab_size} "
                "embeddings: pass the tokenizer that belongs to the model, or call "
                "model.resize_token_embeddings(len(tokenizer)) first"
            )


def warn_about_choices(
    config: MAGRPOConfig,
    reward_processor: RewardProcessor | None,
    models: Sequence[AgentModel],
    tokenizers: Sequence[PreTrainedTokenizerBase],
) -> None:
    """Warn once of settings that have no effect, or one that may surprise."""
    if config.advantage_normalization and (config.advantage_mode != "mean" or reward_processor is not None):
        warnings.warn(
            "advantages are normalised per group, so advantage_mode makes no difference, and a reward processor that "
            "scales or shifts makes none either (advantage_normalization=False would change that)",
            stacklevel=3,
        )
    if config.truncates_sampling:
        warnings.warn(
            "top_p or top_k samples from a part of the policy, but its whole gradient is taken: importance weights are "
            "1 and the log-prob distance is reported without a limit",
            stacklevel=3,
        )
    for agent, (model, tokenizer) in enumerate(zip(models, tokenizers, strict=True)):
        if not stop_token_ids(model, tokenizer):
            warnings.warn(
                f"agent {agent} has no end-of-sequence token, so every completion runs to max_new_tokens", stacklevel=3
            )
