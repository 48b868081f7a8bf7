"""What a run leaves in its folder and says while it goes, however it ends."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from PIL import Image

from common.config import MAGRPOConfig
from common.errors import ConfigurationError
from common.reporting import Reporter, check_output_dir
from tests.builders import agent_metrics, step_metrics

SECONDS = {"rollout": 2.0, "learning": 3.0, "weight_transfer": 0.5}


def report(folder, steps, fail=False, spread=None, **changes):
    """A run of some steps, of which each may have a share of groups without spread; returns the reporter."""
    config = MAGRPOConfig(output_dir=str(folder), **changes)
    with Reporter(check_output_dir(folder), config, steps, None) as reporter:
        for step in range(1, steps + 1):
            zero_spread = 0.0 if spread is None else spread[step - 1]
            metrics = step_metrics(reward_mean=float(step), weights_version=step, zero_spread=zero_spread)
            reporter.record(step, 0, metrics, SECONDS)
            if fail:
                raise RuntimeError("the run fails")
    return reporter


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_is_one_record_on_disk_whatever_the_logging_interval(tmp_path):
    reporter = report(tmp_path, 3, logging_steps=10)
    written = records(tmp_path / "metrics.jsonl")
    assert written == reporter.history
    assert [record["step"] for record in written] == [record["weights_version"] for record in written] == [1, 2, 3]
    assert [record["reward_mean"] for record in written] == [1.0, 2.0, 3.0]
    assert {name: written[0][f"seconds/{name}"] for name in SECONDS} == SECONDS
    assert {"epoch", "zero_spread", "agent_0/loss", "agent_1/entropy"} <= written[0].keys()


def test_a_record_is_on_disk_before_the_next_step(tmp_path):
    with Reporter(tmp_path, MAGRPOConfig(), 2, None) as reporter:
        reporter.record(1, 0, step_metrics(), SECONDS)
        assert len(records(tmp_path / "metrics.jsonl")) == 1


def test_the_configuration_is_saved(tmp_path):
    report(tmp_path, 1, seed=7)
    assert json.loads((tmp_path / "config.json").read_text()) == asdict(MAGRPOConfig(seed=7, output_dir=str(tmp_path)))


def test_metrics_of_earlier_runs_are_kept_under_a_number(tmp_path):
    for steps in (1, 2, 3):
        report(tmp_path, steps)
    found = {path.name: len(records(path)) for path in tmp_path.glob("metrics*.jsonl")}
    assert found == {"metrics-1.jsonl": 1, "metrics-2.jsonl": 2, "metrics.jsonl": 3}


@pytest.mark.parametrize("fail", [False, True])
def test_records_and_reward_curve_are_there_however_the_run_ends(tmp_path, fail):
    if fail:
        with pytest.raises(RuntimeError, match="the run fails"):
            report(tmp_path, 2, fail=True)
    else:
        report(tmp_path, 2)
    assert len(records(tmp_path / "metrics.jsonl")) == 2 - fail
    with Image.open(tmp_path / "reward_curve.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 100


def test_a_run_that_fails_before_its_first_step_shows_its_own_error(tmp_path):
    with pytest.raises(RuntimeError, match="no engine"), Reporter(tmp_path, MAGRPOConfig(), 2, None):
        raise RuntimeError("no engine")
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "reward_curve.png").exists()


def test_the_progress_line_says_what_a_person_looks_for(tmp_path, capfd):
    with Reporter(tmp_path, MAGRPOConfig(), 4, None) as reporter:
        agents = [agent_metrics(characters=120.0), agent_metrics(characters=300.0, logprob_distance_mean=2e-5)]
        agents[0] = agent_metrics(characters=120.0, logprob_distance_mean=1e-5)
        metrics = step_metrics(agents, reward_mean=0.375, completion_tokens=1100, weights_version=1)
        reporter.record(1, 0, metrics, SECONDS)
    said = capfd.readouterr().err
    for part in ("1/4", "reward 0.375", "ratio 2.50", "120/300", "200 tok/s", "weights v1", "2.0e-05"):
        assert part in said
    assert f"{3 * sum(SECONDS.values()):.0f} s left" in said


def test_an_agent_that_says_nothing_breaks_no_progress_line(tmp_path, capfd):
    with Reporter(tmp_path, MAGRPOConfig(), 1, None) as reporter:
        reporter.record(1, 0, step_metrics([agent_metrics(characters=0.0)] * 2), SECONDS)
    assert "ratio nan" in capfd.readouterr().err


@pytest.mark.parametrize(
    "spread, warned", [([1.0] * 4, 2), ([1.0, 1.0, 0.5, 1.0], 1), ([0.5, 1.0, 1.0, 0.0], 0), ([1.0, 1.0, 1.0], 2)]
)
def test_intervals_in_which_no_group_had_spread_are_warned_about(tmp_path, capfd, spread, warned):
    report(tmp_path, len(spread), spread=spread, logging_steps=2)
    assert capfd.readouterr().err.count("warning: up to step") == warned


def test_an_output_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    folder = check_output_dir(tmp_path / "a" / "b")
    assert folder.is_dir() and not list(folder.iterdir())
    (folder / "kept").write_text("x")
    check_output_dir(str(folder))
    assert (folder / "kept").read_text() == "x"


def test_an_output_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/magrpo", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigurationError, match=r"cannot be written \(.+\): choose another with output_dir"):
            check_output_dir(folder)


def test_an_output_folder_with_a_character_that_no_file_system_takes_is_refused():
    with pytest.raises(ConfigurationError, match="cannot be written"):
        check_output_dir("a\0b")
