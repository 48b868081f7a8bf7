"""What rollout side and learner share: configuration, record types, rewards, data, seeds and reports."""

from common.config import MAGRPOConfig
from common.rewards import RewardProcessors

__all__ = ["MAGRPOConfig", "RewardProcessors"]
