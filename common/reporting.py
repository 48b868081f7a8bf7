"""What a run leaves behind and shows while it goes: metrics.jsonl, a progress line, W&B, a reward curve."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.config import MAGRPOConfig
from common.errors import ConfigurationError
from common.metrics import StepMetrics, average


def check_output_dir(folder: str | Path) -> Path:
    """The output folder, made and tried for writing.

    Raises:
        ConfigurationError: it cannot be made or written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the folder {str(path)!r} cannot be written ({error}): choose another with output_dir"
        ) from None
    return path


def check_wandb_login() -> None:
    """Refuse an online W&B run that nobody is logged in for.

    Raises:
        ConfigurationError: there is no login and WANDB_MODE is online.
    """
    import wandb

    if os.environ.get("WANDB_MODE", "online") in ("online", "shared") and not wandb.login(prompt=False):
        raise ConfigurationError(
            "W&B is asked for but nobody is logged in: run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline "
            "to keep the run on this machine"
        )


class Reporter:
    """Takes the records of a run's steps. Used as a context, so that everything ends with the run, however it ends.

    Args:
        folder: the output folder, prepared.
        config: the run's configuration, saved as config.json.
        total_steps: steps of the run.
        wandb_config: arguments of `wandb.init` (project, entity, name, ...), or None for no W&B.
    """

    def __init__(
        self, folder: Path, config: MAGRPOConfig, total_steps: int, wandb_config: dict[str, Any] | None
    ) -> None:
        self._folder = folder
        self._config = config
        self._total_steps = total_steps
        self._wandb_config = wandb_config
        self._interval: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []

    def __enter__(self) -> Reporter:
        (self._folder / "config.json").write_text(json.dumps(asdict(self._config), indent=2) + "\n")
        self._file = open(self._free_metrics_file(), "x", encoding="utf-8")
        self._wandb_run = self._start_wandb()
        self._bar = tqdm(total=self._total_steps, desc="training", unit="step", disable=not sys.stderr.isatty())
        return self

    def __exit__(self, error_type: type | None, *_: object) -> None:
        if self._interval:
            self._end_interval()
        self._bar.close()
        self._file.close()
        if self._wandb_run is not None:
            self._wandb_run.finish(exit_code=0 if error_type is None else 1)
        if self.history:
            curve = self._folder / "reward_curve.png"
            plot_rewards(self.history, curve)
            first, last = self.history[0], self.history[-1]
            print(
                f"mean reward {first['reward_mean']:.3f} in step {first['step']}, {last['reward_mean']:.3f} in step "
                f"{last['step']}; metrics in {self._folder / 'metrics.jsonl'}, reward curve in {curve}",
                file=sys.stderr,
                flush=True,
            )

    def record(self, step: int, epoch: int, metrics: StepMetrics, seconds: dict[str, float]) -> None:
        """Write one step's record, and show it."""
        record = {"step": step, "epoch": epoch, **metrics.flat()}
        record |= {f"seconds/{name}": value for name, value in seconds.items()}
        self.history.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._show(record, metrics, seconds)
        self._interval.append(record)
        if len(self._interval) == self._config.logging_steps:
            self._end_interval()

    def _free_metrics_file(self) -> Path:
        """metrics.jsonl, after giving that of an earlier run in this folder a number."""
        metrics = self._folder / "metrics.jsonl"
        if metrics.exists():
            numbers = itertools.count(1)
            metrics.rename(next(p for n in numbers if not (p := self._folder / f"metrics-{n}.jsonl").exists()))
        return metrics

    def _show(self, record: dict[str, Any], metrics: StepMetrics, seconds: dict[str, float]) -> None:
        characters = "/".join(f"{agent.characters:.0f}" for agent in metrics.agents)
        distance = max(agent.logprob_distance_mean for agent in metrics.agents)
        line = (
            f"reward {metrics.reward_mean:.3f}, ratio {metrics.length_ratio:.2f}, characters {characters}, "
            f"{metrics.completion_tokens / max(sum(seconds.values()), 1e-9):.0f} tok/s, "
            f"weights v{metrics.weights_version}, log-prob distance {distance:.1e}"
        )
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update()
        if self._bar.disable:
            done = record["step"]
            spent = sum(sum(v for k, v in r.items() if k.startswith("seconds/")) for r in self.history)
            left = spent / done * (self._total_steps - done)
            print(f"step {done}/{self._total_steps}: {line}, {left:.0f} s left", file=sys.stderr, flush=True)

    def _end_interval(self) -> None:
        mean = average(self._interval)
        self._interval = []
        if self._wandb_run is not None:
            self._wandb_run.log(mean, step=mean["step"])
        if all(record["zero_spread"] == 1.0 for record in self.history[-self._config.logging_steps :]):
            print(
                f"warning: up to step {mean['step']} every group had equal rewards, so nothing was learned: look at "
                "the reward function, or raise num_generations or temperature",
                file=sys.stderr,
                flush=True,
            )

    def _start_wandb(self) -> Any:
        if self._wandb_config is None:
            return None
        import wandb

        arguments = {"project": "magrpo", "dir": str(self._folder), **self._wandb_config}
        try:
            return wandb.init(config=asdict(self._config), **arguments)
        except (wandb.Error, TypeError) as error:
            raise ConfigurationError(
                f"the W&B run did not start: {error}. Check wandb_config, the login and the network, or set "
                "WANDB_MODE=offline"
            ) from error


def plot_rewards(history: list[dict[str, Any]], path: Path) -> None:
    """Draw mean and standard deviation of the raw reward over the steps."""
    from matplotlib.figure import Figure

    steps = [record["step"] for record in history]
    means = [record["reward_mean"] for record in history]
    lower = [record["reward_mean"] - record["reward_std"] for record in history]
    upper = [record["reward_mean"] + record["reward_std"] for record in history]
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    axes.fill_between(steps, lower, upper, alpha=0.2, linewidth=0, label="± standard deviation")
    axes.plot(steps, means, marker="o", markersize=3, label="mean")
    axes.set(xlabel="step", ylabel="raw reward of joint completions")
    axes.legend(frameon=False)
    axes.figure.savefig(path, dpi=150)
