"""Fixtures that many tests share: a tokenizer, a model folder, a Ray cluster."""

from __future__ import annotations

import os

import pytest

from tests.builders import tiny_tokenizer

# Neither a cluster nor a W&B login of the person who runs the tests is used.
os.environ["RAY_ADDRESS"] = "local"
os.environ["WANDB_MODE"] = "offline"


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster of two CPUs on this machine, which trainers and pools of this process use."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tokenizer():
    """The tiny tokenizer; its pad token is its EOS token."""
    return tiny_tokenizer()
