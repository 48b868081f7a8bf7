"""The learner: scores joint completions, and steps every agent's policy, with Ray around it or without."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.config import MAGRPOConfig
from common.errors import LearnerError, WeightTransferError, shown
from common.metrics import AgentMetrics, StepMetrics
from common.models import AgentModel
from common.rewards import RewardFunction, RewardProcessor, call_reward, process_reward
from common.types import Completion, RolloutBatch, Weights
from learner.advantages import group_advantages, has_spread
from learner.batching import Sample
from learner.policy import GradientReport, Policy

# Mean |learner - engine| log-prob that the dtypes explain at temperature 1: float32 differs by about 1e-5, 16-bit
# floats by some hundredths (0.07 was seen with a 135M model, bfloat16 on both sides).
_DISTANCE_LIMIT_FLOAT32 = 5e-3
_DISTANCE_LIMIT_16_BIT = 0.3


@dataclass(frozen=True)
class LearnerSpec:
    """What a learner is built from: the agents' models, the reward, the configuration, and the dtypes `auto` became."""

    models: tuple[AgentModel, ...]
    reward_func: RewardFunction
    reward_processor: RewardProcessor | None
    config: MAGRPOConfig
    total_steps: int
    rollout_dtype: str
    learner_dtype: str


class Learner:
    """Holds a policy per agent. `version` counts the steps made, and is the version of the weights."""

    def __init__(self, spec: LearnerSpec) -> None:
        self._spec = spec
        self._policies: list[Policy] = []
        self.version = 0

    def start(self) -> None:
        """Build the policies.

        Raises:
            ModelError: a model cannot be read where the learner runs.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        spec = self._spec
        self._policies = [
            Policy(model.build(), spec.config, spec.total_steps, spec.learner_dtype, device) for model in spec.models
        ]

    def weights(self, agent: int, dtype: str) -> Weights:
        """A copy of an agent's current parameters in `dtype`."""
        return self._policies[agent].weights(dtype)

    def step(self, rollout: RolloutBatch) -> StepMetrics:
        """Score the rollout and make one optimizer step of every agent, or of none where anything is wrong.

        Raises:
            RewardError: the reward function or processor failed.
            WeightTransferError: the completions are not from this learner's weights.
            LearnerError: a number is not finite, or log-probs differ by more than the dtypes explain.
        """
        fresh = self._check_versions(rollout)
        rewards_PG, processed_PG = self.score(rollout)
        config = self._spec.config
        advantages_PG = group_advantages(processed_PG, config.advantage_mode, config.advantage_normalization)
        try:
            reports = [
                policy.compute_gradient(_samples(rollout, agent, advantages_PG))
                for agent, policy in enumerate(self._policies)
            ]
            for agent, report in enumerate(reports):
                self._check(agent, report, rollout, fresh)
        except BaseException:
            for policy in self._policies:
                policy.discard_gradient()
            raise
        rates = [policy.learning_rate for policy in self._policies]
        for policy in self._policies:
            policy.apply_gradient()
        self.version += 1
        agents = [
            _agent_metrics(rollout, agent, report, rate)
            for agent, (report, rate) in enumerate(zip(reports, rates, strict=True))
        ]
        return StepMetrics(
            reward_mean=float(rewards_PG.mean()),
            reward_std=float(rewards_PG.std()),
            processed_reward_mean=float(processed_PG.mean()),
            processed_reward_std=float(processed_PG.std()),
            zero_spread=float(1.0 - has_spread(processed_PG).mean()),
            completion_tokens=sum(len(report.entropies_N) for report in reports),
            weights_version=self.version,
            agents=tuple(agents),
        )

    def score(self, rollout: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
        """Raw and processed rewards of the joint completions, float64, each of shape [P, G]."""
        spec = self._spec
        raw = [
            call_reward(
                spec.reward_func,
                [[c.text for c in groups_P[p].completions_G] for groups_P in rollout.groups_AP],
                prompt.text,
                prompt.item,
            )
            for p, prompt in enumerate(rollout.prompts_P)
        ]
        processor = spec.reward_processor
        processed = raw if processor is None else [[process_reward(processor, r) for r in rewards] for rewards in raw]
        return np.asarray(raw, np.float64), np.asarray(processed, np.float64)

    def _check_versions(self, rollout: RolloutBatch) -> bool:
        """Whether the completions are from the current weights, rather than from those at the start of the rollout."""
        config = self._spec.config
        steps_per_rollout = -(-config.rollout_buffer_size // config.prompts_per_step)
        versions = {group.weights_version for groups_P in rollout.groups_AP for group in groups_P}
        if len(versions) > 1 or not self.version - steps_per_rollout < min(versions) <= self.version:
            raise WeightTransferError(
                f"completions of weights version(s) {sorted(versions)} reached the learner at version {self.version}: "
                "a weight update did not arrive"
            )
        return versions == {self.version}

    def _check(self, agent: int, report: GradientReport, rollout: RolloutBatch, fresh: bool) -> None:
        distance = report.distances_N.mean().item()
        for name, value in (
            ("loss", report.loss),
            ("gradient norm", report.grad_norm),
            ("log-prob distance", distance),
        ):
            if not np.isfinite(value):
                raise LearnerError(
                    f"the {name} of agent {agent} is {value} at step {self.version + 1} (prompts "
                    f"{shown([p.text for p in rollout.prompts_P])}): no agent was updated. Lower agent_learning_rate, "
                    "or use learner_dtype='float32'"
                )
        limit = self._distance_limit()
        if fresh and not self._spec.config.truncates_sampling and distance > limit:
            raise LearnerError(
                f"the log-probs of agent {agent}'s completions differ between engine and learner by {distance:.3g} on "
                f"average at step {self.version + 1}, weights version {self.version}; {self._spec.rollout_dtype} "
                f"engines and a {self._spec.learner_dtype} learner explain at most {limit:.3g}. The engine computes "
                "another model than the learner: check that rollout_backend supports this model "
                "(rollout_backend='hf' runs the learner's own code), or use float32 for rollout_dtype and learner_dtype"
            )

    def _distance_limit(self) -> float:
        exact = self._spec.rollout_dtype == self._spec.learner_dtype == "float32"
        return (_DISTANCE_LIMIT_FLOAT32 if exact else _DISTANCE_LIMIT_16_BIT) / min(1.0, self._spec.config.temperature)


def _completions(rollout: RolloutBatch, agent: int) -> list[Completion]:
    return [completion for group in rollout.groups_AP[agent] for completion in group.completions_G]


def _samples(rollout: RolloutBatch, agent: int, advantages_PG: np.ndarray) -> list[Sample]:
    return [
        Sample(group.prompt_ids, completion.token_ids, completion.logprobs_T, float(advantage))
        for group, advantages_G in zip(rollout.groups_AP[agent], advantages_PG, strict=True)
        for completion, advantage in zip(group.completions_G, advantages_G, strict=True)
    ]


def _agent_metrics(rollout: RolloutBatch, agent: int, report: GradientReport, learning_rate: float) -> AgentMetrics:
    completions = _completions(rollout, agent)
    return AgentMetrics(
        characters=float(np.mean([len(c.text) for c in completions])),
        tokens=float(np.mean([len(c.token_ids) for c in completions])),
        ended=float(np.mean([c.finish_reason == "stop" for c in completions])),
        loss=report.loss,
        grad_norm=report.grad_norm,
        entropy=report.entropies_N.mean().item(),
        logprob_distance_mean=report.distances_N.mean().item(),
        logprob_distance_p99=report.distances_N.quantile(0.99).item(),
        logprob_distance_max=report.distances_N.max().item(),
        importance_mean=report.importance_N.mean().item(),
        importance_capped=report.capped_N.float().mean().item(),
        learning_rate=learning_rate,
    )
