"""What cannot work stops within seconds, with one message that says why and what to do, and leaves nothing running."""

from __future__ import annotations

import math

import psutil
import pytest
from datasets import Dataset

from common.errors import DataError, MAGRPOError, RewardError
from tests.builders import save_tiny_model, tiny_model
from tests.processes import EXAMPLE, run_python, user_environment
from tests.runs import config, trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def run_example(tmp_path, *flags, **variables):
    work = tmp_path / "work"
    work.mkdir()
    env = user_environment(tmp_path / "home", **variables)
    arguments = [EXAMPLE, "--num-train-epochs", "1", "--num_generations", "2", "--max-new-tokens", "8", *flags]
    return run_python(arguments, work, env, timeout=120)


REFUSED = {
    "missing model folder": (["--model", "./no/such/model"], ["./no/such/model", "check the path"]),
    "wandb without a login": (["--model", "MODEL", "--wandb"], ["nobody is logged in", "wandb login", "WANDB_API_KEY"]),
    "more GPUs than there are": (
        ["--model", "MODEL", "--gpus-per-rollout-worker", "4000"],
        ["8000 GPU(s)", "lower rollout_workers, gpus_per_rollout_worker"],
    ),
    "more workers than cores": (
        ["--model", "MODEL", "--rollout-workers", "1000"],
        ["rollout_workers=1000", "set rollout_workers to at most"],
    ),
    "output folder below a file": (
        ["--model", "MODEL", "--output-dir", "MODEL/config.json/run"],
        ["config.json/run", "cannot be written", "output_dir"],
    ),
    "value out of range": (["--model", "MODEL", "--top-p", "1.5"], ["top_p", "1.5", "less than or equal to 1"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_example_refuses(case, model, tmp_path):
    flags, wanted = REFUSED[case]
    outcome = run_example(tmp_path, *[flag.replace("MODEL", str(model)) for flag in flags])
    assert outcome.status != 0
    assert outcome.seconds < 60
    assert outcome.survivors == []
    assert "Traceback" not in outcome.output
    messages = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, outcome.output
    for part in wanted:
        assert part in messages[0]


BAD_REWARDS = {
    "too few values": (lambda first, second: [1.0], "returned 1 value.*must return 4"),
    "too many values": (lambda first, second: [1.0] * 5, "returned 5 value.*must return 4"),
    "a NaN": (lambda first, second: [1.0, math.nan, 1.0, 1.0], "reward 1 of the reward function is nan.*finite"),
    "a string": (lambda first, second: "1.0", "returned '1.0' .str..*list of 4 numbers"),
    "strings": (lambda first, second: ["1.0"] * 4, "reward 0 of the reward function is '1.0'.*must be a number"),
    "nothing": (lambda first, second: None, "returned None.*list of 4 numbers"),
    "an exception": (lambda first, second: 1 / 0, "the reward function raised.*(.|\n)*ZeroDivisionError"),
}


@pytest.mark.parametrize("case", BAD_REWARDS)
def test_a_bad_reward_stops_at_the_first_step(case, tmp_path, tokenizer):
    """The message names the prompt; no agent has moved."""
    reward, message = BAD_REWARDS[case]
    agents = [tiny_model(), tiny_model(seed=1)]
    before = [model.state_dict()["model.embed_tokens.weight"].clone() for model in agents]
    with pytest.raises(RewardError, match=message) as caught:
        trainer(agents, tokenizer, config(tmp_path), reward_func=reward).train()
    assert "Describe a city in the clouds:" in str(caught.value)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    for model, embedding in zip(agents, before, strict=True):
        assert (model.state_dict()["model.embed_tokens.weight"] == embedding).all()


def test_a_bad_reward_through_ray_has_its_own_type_and_ends_the_actors(tmp_path, tokenizer, ray_cluster):
    others = set(psutil.Process().children(recursive=True))
    training = trainer(
        [tiny_model()], tokenizer, config(tmp_path, rollout_workers=1), reward_func=lambda texts: [math.nan] * 4
    )
    with pytest.raises(RewardError, match="reward 0 of the reward function is nan"):
        training.train()
    started = [p for p in psutil.Process().children(recursive=True) if p not in others]
    _, alive = psutil.wait_procs(started, timeout=15)
    assert not [p for p in alive if "Learner" in p.name() or "RolloutWorker" in p.name()]


BAD_DATA = {
    "no column": ([{"text": "Tell a joke:"}], "row 0 of train_dataset has no column `prompt` .it has 'text'.*rename"),
    "empty": ([{"prompt": "Tell a joke:"}, {"prompt": "  "}], "row 1 .* is empty.*remove the row"),
    "not text": ([{"prompt": 7}], "row 0 .* is 7 .int.: it must be text"),
    "conversation": ([{"prompt": [{"role": "user", "content": "Hi"}]}], "row 0 .*apply_chat_template"),
    "too long": ([{"prompt": "word " * 5000}], "row 0 .* tokens, more than the .*shorten it"),
    "no rows": ([], "has no rows"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_refused_before_anything_starts(case, tmp_path, tokenizer):
    rows, message = BAD_DATA[case]
    with pytest.raises(DataError, match=message):
        trainer([tiny_model(), tiny_model(seed=1)], tokenizer, config(tmp_path), train_dataset=rows)


def test_bad_rows_of_a_data_set_object_are_refused_too(tmp_path, tokenizer):
    for rows, message in [({"text": ["a"]}, "no column `prompt`"), ({"prompt": ["a", None]}, "row 1 .* is None")]:
        with pytest.raises(DataError, match=message):
            trainer([tiny_model()], tokenizer, config(tmp_path), train_dataset=Dataset.from_dict(rows))


def test_every_refusal_is_one_family(tmp_path, tokenizer):
    """A script catches one class."""
    for settings in ({"train_dataset": []}, {"reward_func": None}, {"tokenizer": [tokenizer] * 3}):
        with pytest.raises(MAGRPOError):
            trainer(**{"agents": [tiny_model()], "tokenizer": tokenizer, "args": config(tmp_path), **settings})
