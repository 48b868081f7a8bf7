"""Scripts run as a user runs them, in a process of their own, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "story-len-ratio.py"


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        status: its exit status.
        stdout, stderr: what it wrote.
        seconds: how long it ran.
        survivors: command lines of the processes it started, directly or not, that outlived it.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    survivors: list[str]

    @property
    def output(self) -> str:
        """Everything it wrote."""
        return self.stdout + self.stderr


def user_environment(home: Path, **variables: str) -> dict[str, str]:
    """The environment of a user who has no logins, no running cluster and no network.

    Args:
        home: the home folder.
        variables: what is added.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "RAY_", "PYTEST_", "HF_"))}
    own = {"HOME": str(home), "PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": "local", "HF_HUB_OFFLINE": "1"}
    return kept | own | variables


def run_python(arguments: Sequence[str | Path], cwd: Path, env: dict[str, str], timeout: float) -> Outcome:
    """Run this interpreter with some arguments to its end; it is killed, with all it started, after `timeout` s.

    Raises:
        subprocess.TimeoutExpired: it did not end; the message has its output so far.
    """
    started = time.monotonic()
    with open(cwd / ".stdout", "w+") as stdout, open(cwd / ".stderr", "w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        family = _watch(process, timeout)
        written = []
        for file in (stdout, stderr):
            file.seek(0)
            written.append(file.read())
    seconds = time.monotonic() - started
    survivors = _outlived(family)
    for survivor in survivors:
        survivor.kill()
    if process.poll() is None:
        process.kill()
        process.wait()
        raise subprocess.TimeoutExpired(process.args, timeout, *written)
    return Outcome(process.returncode, *written, seconds, [_describe(survivor) for survivor in survivors])


def _watch(process: subprocess.Popen, timeout: float) -> set[psutil.Process]:
    """Every process that descends from one, collected until that one ends or the time is over."""
    family: set[psutil.Process] = set()
    root = psutil.Process(process.pid)
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        try:
            family.update(root.children(recursive=True))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.2)
    return family


def _outlived(family: set[psutil.Process], grace: float = 10.0) -> list[psutil.Process]:
    """Those that still run after some seconds of grace."""
    return psutil.wait_procs(list(family), timeout=grace)[1]


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return str(process)
