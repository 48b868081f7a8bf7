"""The learner side, and the trainer that joins it with the rollout side."""

from common.config import MAGRPOConfig
from learner.trainer import MAGRPOTrainer, TrainOutput

__all__ = ["MAGRPOConfig", "MAGRPOTrainer", "TrainOutput"]
