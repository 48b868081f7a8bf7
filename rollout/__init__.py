"""The rollout side: engines that generate groups of completions, and the workers and the pool that host them."""

from rollout.engine import Engine, EngineSpec
from rollout.pool import RolloutPool

__all__ = ["Engine", "EngineSpec", "RolloutPool"]
