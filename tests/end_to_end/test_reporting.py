"""What a run leaves behind: metrics on disk, a picture, and W&B where it is asked for."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import matplotlib.image
import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from common.errors import RewardError
from tests.builders import tiny_model
from tests.runs import config, trainer

STEP_FIELDS = {
    "step",
    "epoch",
    "reward_mean",
    "reward_std",
    "processed_reward_mean",
    "processed_reward_std",
    "zero_spread",
    "weights_version",
    "seconds/rollout",
    "seconds/learning",
    "seconds/weight_transfer",
}
AGENT_FIELDS = {
    "characters",
    "tokens",
    "ended",
    "loss",
    "grad_norm",
    "entropy",
    "logprob_distance_mean",
    "logprob_distance_max",
}
SECRET = "0123456789abcdef" * 2 + "01234567"


def run(folder, tokenizer, wandb_config=None, reward_func=None, **changes):
    rewards = {} if reward_func is None else {"reward_func": reward_func}
    training = trainer(
        [tiny_model(), tiny_model(seed=1)], tokenizer, config(folder, **changes), wandb_config=wandb_config, **rewards
    )
    return training.train()


def records_of(path) -> Iterator[Record]:
    """The records of an offline W&B file: LevelDB's log format behind a header of 7 bytes."""
    data, whole = path.read_bytes(), b""
    position, block = 7, 32768
    while position + 7 <= len(data):
        room = block - position % block
        if room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def offline_runs(folder) -> list[tuple[list[dict], list[int]]]:
    """The history rows and exit codes of every offline W&B run below a folder."""
    runs = []
    for path in sorted(folder.rglob("*.wandb")):
        rows, exits = [], []
        for record in records_of(path):
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            elif record.HasField("exit"):
                exits.append(record.exit.exit_code)
        runs.append((rows, exits))
    return runs


def test_there_is_a_record_of_every_step_and_a_picture(tmp_path, tokenizer):
    output = run(tmp_path, tokenizer, num_train_epochs=2)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == output.history
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    agent_fields = {f"agent_{agent}/{name}" for agent in range(2) for name in AGENT_FIELDS}
    for record in records:
        assert STEP_FIELDS | agent_fields <= record.keys()
        assert record["weights_version"] == record["step"]
        assert all(record[f"seconds/{part}"] > 0 for part in ("rollout", "learning", "weight_transfer"))
    assert matplotlib.image.imread(tmp_path / "reward_curve.png").std() > 0
    assert json.loads((tmp_path / "config.json").read_text())["num_train_epochs"] == 2


def test_without_a_wandb_config_there_is_no_wandb_run(tmp_path, tokenizer):
    run(tmp_path, tokenizer)
    assert not list(tmp_path.rglob("*wandb*"))


def test_wandb_gets_one_finished_run_with_the_numbers_of_the_file(tmp_path, tokenizer):
    history = run(tmp_path, tokenizer, wandb_config={"project": "tiny"}, logging_steps=1).history
    ((rows, exits),) = offline_runs(tmp_path)
    assert exits == [0]
    assert len(rows) == len(history)
    for row, record in zip(rows, history, strict=True):
        for name in STEP_FIELDS | {"agent_0/loss", "agent_1/characters"}:
            assert row[name] == pytest.approx(record[name]), name


def test_wandb_gets_the_mean_over_the_logging_interval(tmp_path, tokenizer):
    history = run(tmp_path, tokenizer, wandb_config={"project": "tiny"}, logging_steps=2, num_train_epochs=2).history
    ((rows, _),) = offline_runs(tmp_path)
    assert [row["step"] for row in rows] == [2, 4]
    for row, records in zip(rows, (history[:2], history[2:]), strict=True):
        assert row["agent_0/loss"] == pytest.approx(sum(record["agent_0/loss"] for record in records) / 2)


def test_wandb_is_finished_as_failed_when_the_run_fails(tmp_path, tokenizer):
    calls = []

    def reward_that_fails_later(first, second):
        calls.append(1)
        return [float(len(text)) for text in second] if len(calls) < 3 else [float("nan")] * len(second)

    with pytest.raises(RewardError, match="nan"):
        run(tmp_path, tokenizer, {"project": "tiny"}, reward_that_fails_later, logging_steps=1)
    assert wandb.run is None
    ((rows, exits),) = offline_runs(tmp_path)
    assert exits == [1]
    assert len(rows) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_api_key_is_never_written(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    run(tmp_path, tokenizer, wandb_config={"project": "tiny"})
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_saving_does_not_finish_a_wandb_run_of_the_user(tmp_path, tokenizer):
    training = trainer([tiny_model()], tokenizer, config(tmp_path / "run"))
    training.train()
    own = wandb.init(project="mine", dir=str(tmp_path))
    try:
        training.save_model(tmp_path / "models")
        assert wandb.run is own
    finally:
        own.finish()


def test_progress_lines_name_step_reward_ratio_lengths_and_time_left(tmp_path, tokenizer, capfd):
    run(tmp_path, tokenizer)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    for wanted in ("step 1/2", "reward", "ratio", "characters", "tok/s", "weights v1", "log-prob distance", "left"):
        assert wanted in lines[0]
