"""`ray job submit` with the repository as working directory runs the example on a cluster of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.builders import save_tiny_model
from tests.processes import REPOSITORY, user_environment

RAY = Path(sys.executable).with_name("ray")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def ray(*arguments: str, env: dict[str, str], timeout: float) -> str:
    """The output of a ray command that succeeds; one that comes before the cluster takes jobs is repeated."""
    for _ in range(10):
        done = subprocess.run(
            [RAY, *arguments], env=env, timeout=timeout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if "No available agent" not in done.stdout:
            break
        time.sleep(3)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def cluster(tmp_path_factory):
    """The environment and dashboard address of a cluster with a token; everything it started ends with the test."""
    home = tmp_path_factory.mktemp("home")
    scratch = Path("/tmp") / f"ray-{os.getpid()}"
    activated = f"{RAY.parent}{os.pathsep}{os.environ['PATH']}"
    env = user_environment(home, RAY_AUTH_MODE="token", PATH=activated)
    del env["RAY_ADDRESS"], env["PYTHONPATH"]
    port, dashboard, client, agent = free_ports(4)
    before = set(psutil.pids())
    try:
        ray("get-auth-token", "--generate", env=env, timeout=60)
        ray(
            "start", "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2",
            f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}",
            f"--temp-dir={scratch}", "--disable-usage-stats",
            env=env, timeout=120,
        )  # fmt: skip
        yield env, f"http://127.0.0.1:{dashboard}"
    finally:
        _end(scratch, before)
        shutil.rmtree(scratch, ignore_errors=True)


def _end(scratch: Path, before: set[int]) -> None:
    """Kill the processes of the cluster that lives in `scratch`, and what they started."""
    started = []
    for process in psutil.process_iter():
        try:
            if process.pid not in before and any(str(scratch) in part for part in process.cmdline()):
                started += [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
    for process in started:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(started, timeout=15)


def test_the_example_runs_as_a_job(cluster, tmp_path):
    env, address = cluster
    model, output = save_tiny_model(tmp_path / "model"), tmp_path / "output"
    submitted = ray(
        "job", "submit", f"--address={address}", f"--working-dir={REPOSITORY}", "--",
        "python", "examples/story-len-ratio.py", f"--model={model}", f"--output-dir={output}",
        "--num-train-epochs=1", "--num-generations=2", "--max-new-tokens=8", "--rollout-buffer-size=5",
        env=env, timeout=300,
    )  # fmt: skip
    assert re.search(r"Job '.*' succeeded", submitted), submitted
    assert (output / "models" / "agent_1" / "config.json").exists()
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 2
