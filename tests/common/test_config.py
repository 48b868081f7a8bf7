"""The configuration refuses what cannot work, and says which field, which value and what is allowed."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest

from common.cli import argument_parser
from common.config import MAGRPOConfig
from common.errors import ConfigurationError, MAGRPOError

AT_THE_BOUND = {
    "num_train_epochs": [1],
    "agent_learning_rate": [0, 0.0, 1e-5, np.float64(1e-3)],
    "logging_steps": [1],
    "num_generations": [2],
    "max_new_tokens": [1],
    "num_turns": [1],
    "rollout_buffer_size": [1, 1000],
    "train_batch_size": [None, 1, 2],
    "advantage_normalization": [True, False],
    "advantage_mode": ["mean", "rloo", "max", "raw"],
    "temperature": [1e-3, 1, 5.0],
    "top_p": [1e-3, 1, 1.0],
    "top_k": [None, 1],
    "max_prompt_length": [None, 1],
    "rollout_workers": [None, 0, 5],
    "rollout_backend": ["auto", "vllm", "hf"],
    "rollout_dtype": ["auto", "float32", "bfloat16", "float16"],
    "rollout_timeout": [0.1, 60],
    "gpus_per_rollout_worker": [None, 0, 0.5, 1],
    "learner_dtype": ["auto", "float32", "bfloat16"],
    "learner_timeout": [0.1, 60],
    "learner_gpus": [None, 0, 0.5],
    "micro_batch_tokens": [1],
    "loss_aggregation": ["sequence_sum", "sequence_mean", "token_mean", "constant_length"],
    "importance_cap": [None, 1, 1.0, 10],
    "max_grad_norm": [None, 1e-3, 1],
    "lr_scheduler_type": [
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
    ],
    "warmup_steps": [0, 10],
    "weight_decay": [0, 0.1],
    "seed": [0, 2**63 - 1],
    "output_dir": ["x"],
}

COUNT = [(0, "greater than or equal to 1"), (-1, "1"), (1.5, "integer"), ("3", "integer"), (True, "integer")]
NOT_FINITE = [(math.nan, "finite"), (math.inf, "finite"), ("1", "number"), (True, "number")]
NON_NEGATIVE = [(-1e-9, "greater than or equal to 0"), *NOT_FINITE]
POSITIVE = [(0, "greater than 0"), (-1.0, "greater than 0"), *NOT_FINITE]
PAST_THE_BOUND = {
    "num_train_epochs": [*COUNT, (None, "integer")],
    "agent_learning_rate": [*NON_NEGATIVE, (None, "number")],
    "logging_steps": COUNT,
    "num_generations": [(1, "greater than or equal to 2"), (4.0, "integer")],
    "max_new_tokens": COUNT,
    "num_turns": [(2, "1"), (0, "1"), ("1", "1")],
    "rollout_buffer_size": COUNT,
    "train_batch_size": [*COUNT, (3, "at least")],
    "advantage_normalization": [("yes", "bool"), (1, "bool"), (None, "bool")],
    "advantage_mode": [("median", "'mean', 'rloo', 'max' or 'raw'"), (None, "'mean'")],
    "temperature": [*POSITIVE, (None, "number")],
    "top_p": [(0.0, "greater than 0"), (1.01, "less than or equal to 1"), (math.nan, "finite")],
    "top_k": [(0, "1"), (-1, "1"), (5.0, "integer")],
    "max_prompt_length": COUNT,
    "rollout_workers": [(-1, "greater than or equal to 0"), (1.5, "integer"), ("2", "integer")],
    "rollout_backend": [("trl", "'auto', 'vllm' or 'hf'")],
    "rollout_dtype": [("fp16", "'auto', 'float32', 'bfloat16' or 'float16'")],
    "rollout_timeout": POSITIVE,
    "gpus_per_rollout_worker": NON_NEGATIVE,
    "learner_dtype": [("float16", "'auto', 'float32' or 'bfloat16'")],
    "learner_timeout": POSITIVE,
    "learner_gpus": NON_NEGATIVE,
    "micro_batch_tokens": COUNT,
    "loss_aggregation": [("sum", "'sequence_sum', 'sequence_mean', 'token_mean' or 'constant_length'")],
    "importance_cap": [(0.9, "greater than or equal to 1"), *NOT_FINITE],
    "max_grad_norm": POSITIVE,
    "lr_scheduler_type": [("step", "'cosine'")],
    "warmup_steps": [(-1, "greater than or equal to 0"), (0.1, "integer")],
    "weight_decay": NON_NEGATIVE,
    "seed": [(-1, "greater than or equal to 0"), (2**63, "less than 9223372036854775808"), (1.0, "integer")],
    "output_dir": [("", "at least 1"), (None, "string"), (5, "string")],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_every_field_is_tried():
    names = {field.name for field in dataclasses.fields(MAGRPOConfig)}
    assert AT_THE_BOUND.keys() == PAST_THE_BOUND.keys() == names


@pytest.mark.parametrize("name, value", cases(AT_THE_BOUND))
def test_what_is_allowed_is_kept(name, value):
    assert getattr(MAGRPOConfig(**{name: value}), name) == value


@pytest.mark.parametrize("name, value", cases(PAST_THE_BOUND))
def test_what_is_not_allowed_is_refused_with_field_value_and_what_is_allowed(name, value):
    value, allowed = value
    with pytest.raises(ConfigurationError) as refused:
        MAGRPOConfig(**{name: value})
    message = str(refused.value)
    assert f"MAGRPOConfig.{name} = {value!r}" in message
    assert allowed in message.removeprefix(f"MAGRPOConfig.{name} = {value!r}")
    assert isinstance(refused.value, MAGRPOError) and isinstance(refused.value, ValueError)


def test_the_defaults_are_those_that_are_known():
    defaults = MAGRPOConfig()
    assert (defaults.num_train_epochs, defaults.agent_learning_rate, defaults.logging_steps) == (20, 5e-6, 50)
    assert (defaults.num_generations, defaults.max_new_tokens, defaults.num_turns) == (4, 256, 1)
    assert (defaults.rollout_buffer_size, defaults.prompts_per_step) == (2, 2)
    assert (defaults.advantage_normalization, defaults.advantage_mode) == (True, "mean")
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (1.0, 1.0, None)
    assert not defaults.truncates_sampling


def test_truncated_sampling_is_known():
    assert MAGRPOConfig(top_p=0.99).truncates_sampling and MAGRPOConfig(top_k=50).truncates_sampling


@pytest.mark.parametrize(
    "name, hint",
    [
        ("learning_rate", "agent_learning_rate"),
        ("num_agents", "MAGRPOTrainer"),
        ("joint_mode", "aligned"),
        ("per_device_train_batch_size", "train_batch_size"),
        ("max_completion_length", "max_new_tokens"),
        ("early_termination_threshold", "leave it out"),
        ("discount", "leave it out"),
        ("parallel_training", "rollout_workers"),
        ("agent_devices", "leave it out"),
        ("external_prompt_passthrough", "leave it out"),
        ("eval_interval", "not available"),
        ("eval_num_samples", "not available"),
        ("eval_batch_size", "not available"),
        ("reference_kl_enabled", "not available"),
        ("reference_kl_coef", "not available"),
        ("reference_devices", "not available"),
        ("num_generation", "did you mean num_generations?"),
        ("Temperature", "did you mean temperature?"),
        ("qqqq", "num_train_epochs, agent_learning_rate"),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(name, hint):
    with pytest.raises(ConfigurationError, match=f"no field {name!r}") as refused:
        MAGRPOConfig(**{name: 1})
    assert hint in str(refused.value)


def test_it_pickles_compares_and_does_not_change():
    config = MAGRPOConfig(seed=7, top_k=5, output_dir="elsewhere")
    assert pickle.loads(pickle.dumps(config)) == config != MAGRPOConfig()
    assert dataclasses.replace(config, seed=8).top_k == 5
    with pytest.raises(ConfigurationError, match="seed"):
        dataclasses.replace(config, seed=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 8


def parsed(*arguments):
    return argument_parser(MAGRPOConfig).parse_args_into_dataclasses(list(arguments))[0]


def test_without_flags_the_parser_gives_the_defaults():
    assert parsed() == MAGRPOConfig()


@pytest.mark.parametrize("dash", ["-", "_"])
def test_every_field_is_a_flag_with_dashes_or_underscores(dash):
    chosen = {name: values[-1] for name, values in AT_THE_BOUND.items()}
    flags = [part for name, value in chosen.items() for part in (f"--{name.replace('_', dash)}", str(value))]
    assert parsed(*flags) == MAGRPOConfig(**chosen)


@pytest.mark.parametrize("none", ["none", "None"])
@pytest.mark.parametrize("name", [name for name, values in AT_THE_BOUND.items() if None in values])
def test_a_flag_whose_field_may_be_none_takes_none(name, none):
    assert getattr(parsed(f"--{name}", none), name) is None


def test_a_flag_past_its_bound_is_refused_like_an_argument():
    with pytest.raises(ConfigurationError, match="num_generations = 1"):
        parsed("--num-generations", "1")


def test_a_flag_whose_field_may_not_be_none_refuses_none(capsys):
    with pytest.raises(SystemExit):
        parsed("--seed", "none")
    assert "--seed" in capsys.readouterr().err
