"""However the work is placed, a run is the same run."""

from __future__ import annotations

import json

import pytest

from tests.builders import tiny_model
from tests.runs import PROMPTS, config, length_reward, trainer


def run(folder, tokenizer, **changes):
    """The texts of every reward call in order, and the records of the steps."""
    folder.mkdir(exist_ok=True)
    seen = folder / "texts.jsonl"

    def remembering_reward(*completions):
        with open(seen, "a") as file:
            file.write(json.dumps(completions) + "\n")
        return length_reward(*completions)

    agents = [tiny_model(seed=0, tied=True), tiny_model(seed=1, tied=False)]
    args = config(folder, **{"num_train_epochs": 2, "rollout_backend": "vllm"} | changes)
    training = trainer(agents, tokenizer, args, reward_func=remembering_reward)
    history = training.train().history
    training.close()
    return [json.loads(line) for line in seen.read_text().splitlines()], history


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tokenizer):
    """The run in this process."""
    return run(tmp_path_factory.mktemp("local"), tokenizer, rollout_workers=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_ray_workers_and_local_mode_make_the_same_run(reference, workers, tmp_path, tokenizer, ray_cluster):
    texts, history = run(tmp_path, tokenizer, rollout_workers=workers)
    expected_texts, expected_history = reference
    assert texts[: len(PROMPTS)] == expected_texts[: len(PROMPTS)]
    assert len(history) == len(expected_history) == 4
    for record, expected in zip(history, expected_history, strict=True):
        assert record["weights_version"] == expected["weights_version"]
        assert record["reward_mean"] == pytest.approx(expected["reward_mean"], abs=1e-6)
        for agent in range(2):
            for name in ("loss", "grad_norm", "entropy"):
                key = f"agent_{agent}/{name}"
                assert record[key] == pytest.approx(expected[key], abs=1e-4), key
            assert record[f"agent_{agent}/logprob_distance_max"] < 1e-3


def test_a_run_repeats_itself_and_another_seed_gives_another(tmp_path, tokenizer):
    """With the Hugging Face engine, too."""
    (first, records), (second, same_records), (other, _) = (
        run(tmp_path / name, tokenizer, rollout_backend="hf", seed=seed)
        for name, seed in (("first", 42), ("second", 42), ("other", 43))
    )
    assert first == second
    for record, same in zip(records, same_records, strict=True):
        assert record["agent_0/loss"] == pytest.approx(same["agent_0/loss"], abs=1e-6)
    assert other[0] != first[0]


def test_one_prompt_gets_other_completions_in_every_epoch(reference):
    texts, _ = reference
    first, second = texts[: len(PROMPTS)], texts[len(PROMPTS) :]
    assert all(before != after for before, after in zip(first, second, strict=True))


def test_steps_of_one_rollout_are_learned_with_their_own_weights(tmp_path, tokenizer):
    """A rollout of two prompts, one a step: the second step's completions are one version old, and say so."""
    args = config(tmp_path, rollout_backend="vllm", train_batch_size=1)
    history = trainer([tiny_model(), tiny_model(seed=1)], tokenizer, args).train().history
    assert [record["weights_version"] for record in history] == [1, 2, 3]
    fresh, stale, again = [record["agent_0/logprob_distance_mean"] for record in history]
    assert max(fresh, again) < 1e-3 < stale
