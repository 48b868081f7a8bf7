"""The configuration of a run: one frozen dataclass, every value checked when it is built."""

from __future__ import annotations

import difflib
import typing
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from common.errors import ConfigurationError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)

_MOVED = {
    "num_agents": "pass num_agents to MAGRPOTrainer, or one entry per agent in its `agents`",
    "learning_rate": "the field is named agent_learning_rate",
    "per_device_train_batch_size": "the field is named train_batch_size (prompts per optimizer step)",
    "max_completion_length": "the field is named max_new_tokens",
    "max_length": "the field is named max_new_tokens",
    "normalize_advantage": "the field is named advantage_normalization",
    "parallel_training": "placement follows rollout_workers and the cluster; leave it out",
    "agent_devices": "placement follows rollout_workers and the cluster; leave it out",
    "reference_devices": "a reference policy is not available here; leave it out",
    "reference_kl_enabled": "a reference policy is not available here; leave it out",
    "reference_kl_coef": "a reference policy is not available here; leave it out",
    "joint_mode": "joint completions are always aligned (completion g of every agent); leave it out",
    "discount": "there is one turn, so nothing is discounted; leave it out",
    "early_termination_threshold": "there is one turn, so nothing ends early; leave it out",
    "external_prompt_passthrough": "there is one turn; leave it out",
    "eval_interval": "evaluation during training is not available here; leave it out",
    "eval_num_samples": "evaluation during training is not available here; leave it out",
    "eval_batch_size": "evaluation during training is not available here; leave it out",
}


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class MAGRPOConfig:
    """Configuration of a MAGRPO run.

    Names and defaults are CoMLRL's where the meaning is the same. Sampling defaults to the untruncated policy at
    temperature 1, because that is the policy whose gradient is taken.

    With `advantage_normalization` every advantage mode, and every positive scale of the reward, gives the same update:
    the mean and the scale are divided out.

    Raises:
        ConfigurationError: a field is unknown, has the wrong type, or is out of its range; the message names the
            field, the value and what is allowed.
    """

    num_train_epochs: Count = _setting(20, "passes over the data set")
    agent_learning_rate: NonNegative = _setting(5e-6, "AdamW learning rate of every agent")
    logging_steps: Count = _setting(50, "steps averaged into one record for W&B and the console")
    num_generations: Annotated[int, Field(ge=2)] = _setting(4, "group size G: completions per prompt and agent")
    max_new_tokens: Count = _setting(256, "limit of a completion, in tokens")
    num_turns: Literal[1] = _setting(1, "turns of a conversation; 1 is what is available")
    rollout_buffer_size: Count = _setting(2, "prompts per rollout")
    train_batch_size: Count | None = _setting(None, "prompts per optimizer step (default: rollout_buffer_size)")
    advantage_normalization: bool = _setting(True, "divide the advantages of a group by their standard deviation")
    advantage_mode: Literal["mean", "rloo", "max", "raw"] = _setting("mean", "the baseline of a group's rewards")

    temperature: Positive = _setting(1.0, "sampling temperature; the learner divides its logits by it too")
    top_p: Annotated[float, Field(gt=0, le=1)] = _setting(1.0, "nucleus sampling; 1 samples from the whole policy")
    top_k: Count | None = _setting(None, "sample from the k likeliest tokens; none samples from the whole policy")
    max_prompt_length: Count | None = _setting(None, "longest prompt accepted, in tokens (default: what fits)")

    rollout_workers: Annotated[int, Field(ge=0)] | None = _setting(
        None, "Ray actors that generate (default: one per agent, as far as the cores go); 0 runs in this process"
    )
    rollout_backend: Literal["auto", "vllm", "hf"] = _setting("auto", "engine; auto is vLLM where it is installed")
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "dtype of the engines; auto is bfloat16 where the hardware multiplies it, else float32"
    )
    rollout_timeout: Positive = _setting(1800.0, "seconds to wait for engines to start, generate or take weights")
    gpus_per_rollout_worker: NonNegative | None = _setting(None, "GPUs of a rollout worker (default: a share)")

    learner_dtype: Literal["auto", "float32", "bfloat16"] = _setting(
        "auto", "autocast dtype of the learner (its weights are float32); auto as in rollout_dtype"
    )
    learner_timeout: Positive = _setting(3600.0, "seconds to wait for the learner to start or make a step")
    learner_gpus: NonNegative | None = _setting(None, "GPUs of the learner (default: a share)")
    micro_batch_tokens: Count = _setting(4096, "tokens, padding included, in one forward and backward pass")
    loss_aggregation: Literal["sequence_sum", "sequence_mean", "token_mean", "constant_length"] = _setting(
        "sequence_sum", "how token terms become the loss of a step"
    )
    importance_cap: Annotated[float, Field(ge=1)] | None = _setting(
        2.0, "cap of the token importance weight learner/engine; none weights every token by 1"
    )
    max_grad_norm: Positive | None = _setting(1.0, "clip an agent's gradient to this norm; none does not clip")
    lr_scheduler_type: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = _setting("constant", "schedule of the learning rate, by transformers' name")
    warmup_steps: Annotated[int, Field(ge=0)] = _setting(0, "steps of linear warm-up, for schedules that have one")
    weight_decay: NonNegative = _setting(0.0, "AdamW weight decay")

    seed: Annotated[int, Field(ge=0, lt=2**63)] = _setting(42, "seed of the run; every completion derives its own")
    output_dir: Annotated[str, Field(min_length=1)] = _setting("magrpo_output", "folder of metrics and curve")

    def __new__(cls, *args: Any, **kwargs: Any) -> MAGRPOConfig:
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = _MOVED.get(name) or (f"did you mean {close[0]}?" if close else f"fields: {', '.join(known)}")
                raise ConfigurationError(f"MAGRPOConfig has no field {name!r}: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, annotation in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            try:
                TypeAdapter(annotation, config=_STRICT).validate_python(value)
            except ValidationError as error:
                allowed = "; ".join(detail["msg"] for detail in error.errors())
                raise ConfigurationError(f"MAGRPOConfig.{name} = {value!r} is not allowed: {allowed}") from None
        if self.train_batch_size is not None and self.train_batch_size > self.rollout_buffer_size:
            raise ConfigurationError(
                f"MAGRPOConfig.train_batch_size = {self.train_batch_size} is not allowed: an optimizer step cannot use "
                f"more prompts than a rollout has; raise rollout_buffer_size ({self.rollout_buffer_size}) to at least "
                "that number"
            )

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one optimizer step."""
        return self.train_batch_size or self.rollout_buffer_size

    @property
    def truncates_sampling(self) -> bool:
        """Whether completions are sampled from a part of the policy's distribution only."""
        return self.top_p < 1.0 or self.top_k is not None
