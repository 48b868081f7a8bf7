"""What a step reports: typed records, flattened once into the names that files and W&B show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AgentMetrics:
    """One agent's part of a step.

    Attributes:
        characters: mean characters of a completion.
        tokens: mean tokens of a completion.
        ended: share of completions that ended by themselves.
        loss: loss of the step.
        grad_norm: norm of its gradient before clipping, 0 where no group had spread.
        entropy: mean entropy of the policy over the sampled tokens, in nats.
        logprob_distance_mean, logprob_distance_p99, logprob_distance_max: |learner - engine| over the sampled tokens.
        importance_mean: mean importance weight after the cap.
        importance_capped: share of tokens whose importance weight was cut.
        learning_rate: rate of the step.
    """

    characters: float
    tokens: float
    ended: float
    loss: float
    grad_norm: float
    entropy: float
    logprob_distance_mean: float
    logprob_distance_p99: float
    logprob_distance_max: float
    importance_mean: float
    importance_capped: float
    learning_rate: float


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step of every agent.

    Attributes:
        reward_mean, reward_std: of the raw rewards of the step's joint completions.
        processed_reward_mean, processed_reward_std: the same after the reward processor.
        zero_spread: share of groups whose rewards are all the same.
        completion_tokens: tokens sampled for the step, over all agents.
        weights_version: version of the weights after the step.
        agents: per agent.
    """

    reward_mean: float
    reward_std: float
    processed_reward_mean: float
    processed_reward_std: float
    zero_spread: float
    completion_tokens: int
    weights_version: int
    agents: tuple[AgentMetrics, ...]

    @property
    def length_ratio(self) -> float:
        """Mean characters of the last agent's completions over those of the first agent's (nan if those are none)."""
        first = self.agents[0].characters
        return self.agents[-1].characters / first if first else float("nan")

    def flat(self) -> dict[str, float]:
        """The record by the names that are written: `reward_mean`, ..., `agent_0/loss`, ..."""
        record = asdict(self)
        agents = record.pop("agents")
        for agent, metrics in enumerate(agents):
            record |= {f"agent_{agent}/{name}": value for name, value in metrics.items()}
        return record


def average(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each number over the records; what counts (`step`, `epoch`, `weights_version`) from the last one."""
    last = records[-1]
    counters = {"step", "epoch", "weights_version"}
    return {name: last[name] if name in counters else sum(r[name] for r in records) / len(records) for name in last}
