"""The names that files and W&B show, and their means over an interval."""

from __future__ import annotations

import math

import pytest

from common.metrics import average
from tests.builders import agent_metrics, step_metrics


def test_the_flat_record_has_one_number_per_name():
    record = step_metrics([agent_metrics(loss=2.0), agent_metrics(loss=3.0), agent_metrics()], zero_spread=0.25).flat()
    assert record["zero_spread"] == 0.25 and record["weights_version"] == 1
    assert [record[f"agent_{agent}/loss"] for agent in range(3)] == [2.0, 3.0, 1.0]
    names = {"characters", "tokens", "ended", "loss", "grad_norm", "entropy", "learning_rate"}
    names |= {f"logprob_distance_{kind}" for kind in ("mean", "p99", "max")} | {"importance_mean", "importance_capped"}
    assert {name.removeprefix("agent_2/") for name in record if name.startswith("agent_2/")} == names
    assert {"reward_mean", "reward_std", "processed_reward_mean", "processed_reward_std"} <= record.keys()
    assert all(isinstance(value, (int, float)) for value in record.values())


def test_the_length_ratio_is_that_of_the_last_agent_to_the_first():
    lengths = [agent_metrics(characters=characters) for characters in (10.0, 99.0, 25.0)]
    assert step_metrics(lengths).length_ratio == 2.5
    assert step_metrics(lengths[:1]).length_ratio == 1.0
    assert math.isnan(step_metrics([agent_metrics(characters=0.0), lengths[0]]).length_ratio)


def test_an_interval_averages_what_is_measured_and_keeps_what_counts():
    records = [
        {"step": 3, "epoch": 0, "weights_version": 3, "reward_mean": 1.0, "agent_0/loss": -1.0},
        {"step": 4, "epoch": 1, "weights_version": 4, "reward_mean": 2.0, "agent_0/loss": 0.0},
        {"step": 5, "epoch": 1, "weights_version": 5, "reward_mean": 6.0, "agent_0/loss": 4.0},
    ]
    mean = average(records)
    assert mean == {"step": 5, "epoch": 1, "weights_version": 5, "reward_mean": 3.0, "agent_0/loss": 1.0}
    assert average(records[:1]) == records[0]


def test_means_are_not_those_of_rounded_numbers():
    assert average([{"x": 0.1}, {"x": 0.2}, {"x": 0.3}])["x"] == pytest.approx(0.2)
