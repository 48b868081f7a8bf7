"""The trainer a user holds: it checks what it is given, places the rollout side and the learner, and runs the loop."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.config import MAGRPOConfig
from common.data import Formatter, build_prompts, count_steps, resolve_formatters, rollout_schedule
from common.metrics import StepMetrics
from common.models import describe_agent, resolve_agents, resolve_tokenizers, stop_token_ids
from common.reporting import Reporter, check_output_dir
from common.rewards import RewardFunction, RewardProcessor
from common.seeds import request_seed
from common.types import GroupRequest, RolloutBatch, Sampling, Weights
from common.weights import load_into
from learner.checks import check_arguments, check_vocabularies, prompt_limit, refuse_unsupported, warn_about_choices
from learner.learner import Learner, LearnerSpec
from rollout.engine import EngineSpec, resolve_backend, resolve_dtype
from rollout.placement import Plan, plan_resources
from rollout.pool import RolloutPool
from rollout.runtime import LocalRuntime, RayRuntime, Resources


@dataclass(frozen=True)
class TrainOutput:
    """What `train` returns.

    Attributes:
        global_step: optimizer steps made so far.
        first_reward: mean raw reward of the first step.
        last_reward: mean raw reward of the last step.
        history: one record per step, as in metrics.jsonl.
        output_dir: folder of metrics.jsonl, config.json and reward_curve.png.
    """

    global_step: int
    first_reward: float
    last_reward: float
    history: list[dict[str, Any]]
    output_dir: Path


class MAGRPOTrainer:
    """Trains cooperating agents with multi-agent group-relative policy optimisation (MAGRPO, arXiv:2508.04652).

    Args:
        agents: a model object or a name (hub or folder) per agent. Of an object the weights in memory count; after
            `train` it holds the trained ones.
        agent_model: instead of `agents`, the name that all of them start from.
        num_agents: number of agents with `agent_model` (default 2).
        reward_func: takes one list of texts per agent, all for one prompt, and returns one number per joint completion.
            Where its signature names `prompts` or `batch_items`, it gets them by keyword, one entry per joint
            completion. With Ray it runs in the learner's process.
        reward_processor: applied to each raw reward, for instance `RewardProcessors.scale(factor=100.0)`.
        formatters: makes a row's prompt; one for all agents or one per agent. Without it the row's `prompt` is used.
        args: the configuration.
        train_dataset: a `datasets.Dataset` or a list of dictionaries.
        tokenizer: one for all agents or one per agent; without it the one that lies beside each model.
        wandb_config: arguments of `wandb.init` (project, entity, name, ...); without it there is no W&B run.

    Raises:
        ConfigurationError, DataError, ModelError: what is given cannot work. Everything that can be checked without
            starting an engine is checked here.
    """

    def __init__(
        self,
        agents: Sequence[str | PreTrainedModel] | None = None,
        *,
        agent_model: str | None = None,
        num_agents: int | None = None,
        reward_func: RewardFunction | None = None,
        reward_processor: RewardProcessor | None = None,
        formatters: Formatter | Sequence[Formatter] | None = None,
        args: MAGRPOConfig | None = None,
        train_dataset: Any = None,
        tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
        wandb_config: dict[str, Any] | None = None,
        **unsupported: Any,
    ) -> None:
        refuse_unsupported(unsupported)
        self.args = MAGRPOConfig() if args is None else args
        sources = resolve_agents(agents, agent_model, num_agents)
        self.num_agents = len(sources)
        check_arguments(self.args, self.num_agents, reward_func, reward_processor, wandb_config)
        resolved_formatters = resolve_formatters(formatters, self.num_agents)
        self.output_dir = check_output_dir(self.args.output_dir)
        self.backend = resolve_backend(self.args.rollout_backend)
        self.rollout_dtype = resolve_dtype(self.args.rollout_dtype)

        self.tokenizers = resolve_tokenizers(tokenizer, sources)
        models = [describe_agent(source) for source in sources]
        limits = [prompt_limit(agent, model, self.args) for agent, model in enumerate(models)]
        self._prompts = build_prompts(train_dataset, resolved_formatters, self.tokenizers, limits)
        check_vocabularies(models, self._prompts)

        self.total_steps = count_steps(
            len(self._prompts), self.args.rollout_buffer_size, self.args.prompts_per_step, self.args.num_train_epochs
        )
        self._learner_spec = LearnerSpec(
            models=tuple(models),
            reward_func=reward_func,
            reward_processor=reward_processor,
            config=self.args,
            total_steps=self.total_steps,
            rollout_dtype=self.rollout_dtype,
            learner_dtype=resolve_dtype(self.args.learner_dtype),
        )
        self._models = [dataclasses.replace(model, weights=None) for model in models]
        self._objects = {agent: s for agent, s in enumerate(sources) if isinstance(s, PreTrainedModel)}
        self._wandb_config = wandb_config
        self._runtime = None
        self._learner = None
        self._pool = None
        self._step = 0
        self._rollouts = 0
        warn_about_choices(self.args, reward_processor, self._models, self.tokenizers)

    def train(self) -> TrainOutput:
        """Run every epoch; the trained weights stay with the learner, and go into the model objects that were given.

        Raises:
            MAGRPOError: the run cannot start or go on; nothing is left running.
        """
        config = self.args
        try:
            with Reporter(self.output_dir, config, self.total_steps, self._wandb_config) as reporter:
                self._start()
                self._push_weights()
                schedule = rollout_schedule(len(self._prompts), config.rollout_buffer_size, config.num_train_epochs)
                for epoch, indices in schedule:
                    lap = _stopwatch()
                    rollout = self._generate(indices)
                    seconds = {"rollout": lap()}
                    for batch in rollout.split(config.prompts_per_step):
                        metrics = self._learn(batch)
                        seconds["learning"] = lap()
                        self._push_weights()
                        seconds["weight_transfer"] = lap()
                        reporter.record(self._step, epoch, metrics, seconds)
                        seconds = {"rollout": 0.0}
            self._pool.close()
            self._pool = None
            self._return_weights()
        except BaseException:
            self.close()
            raise
        rewards = [record["reward_mean"] for record in reporter.history]
        return TrainOutput(self._step, rewards[0], rewards[-1], reporter.history, self.output_dir)

    def save_model(self, output_dir: str | os.PathLike) -> None:
        """Write `agent_0/`, `agent_1/`, ...: float32 weights, configuration, generation configuration and tokenizer.

        Raises:
            ConfigurationError: the folder cannot be written.
        """
        if self._learner is None:
            self._start_learner()
        for agent, (model, tokenizer) in enumerate(zip(self._models, self.tokenizers, strict=True)):
            folder = check_output_dir(Path(output_dir) / f"agent_{agent}")
            trained = model.empty()
            load_into(trained, self._trained_weights(agent))
            trained.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            print(f"agent {agent}: model saved in {folder}", file=sys.stderr)

    def close(self) -> None:
        """End the learner and the workers, and Ray where it was started here. Weights that were not saved are gone."""
        if self._pool is not None:
            self._pool.close()
        if self._learner is not None:
            self._runtime.kill(self._learner)
        if self._runtime is not None:
            self._runtime.close()
        self._pool = self._learner = self._runtime = None

    def _generate(self, indices: list[int]) -> RolloutBatch:
        """Every agent's group for each of the prompts, sampled with the current weights."""
        prompts = tuple(self._prompts[index] for index in indices)
        requests = [
            GroupRequest(
                agent,
                p,
                prompt.token_ids_A[agent],
                tuple(
                    request_seed(self.args.seed, self._rollouts, p, agent, generation)
                    for generation in range(self.args.num_generations)
                ),
            )
            for agent in range(self.num_agents)
            for p, prompt in enumerate(prompts)
        ]
        groups = self._pool.generate(requests, weights_version=self._step)
        self._rollouts += 1
        P = len(prompts)
        return RolloutBatch(prompts, tuple(tuple(groups[a * P : (a + 1) * P]) for a in range(self.num_agents)))

    def _learn(self, batch: RolloutBatch) -> StepMetrics:
        metrics = self._ask_learner("make a step", "step", batch)
        self._step = metrics.weights_version
        return metrics

    def _push_weights(self) -> None:
        weights_A = [self._learner.submit("weights", agent, self.rollout_dtype) for agent in range(self.num_agents)]
        self._pool.update_weights(weights_A, version=self._step)

    def _trained_weights(self, agent: int) -> Weights:
        return self._ask_learner("hand out weights", "weights", agent, "float32")

    def _return_weights(self) -> None:
        for agent, model in self._objects.items():
            load_into(model, self._trained_weights(agent))

    def _ask_learner(self, waiting_for: str, method: str, *args: Any) -> Any:
        call = (self._learner, self._learner.submit(method, *args))
        return self._runtime.gather([call], waiting_for, self.args.learner_timeout)[0]

    def _start(self) -> None:
        """Start engines and learner side by side."""
        starting = self._create_learner() if self._learner is None else []
        self._pool = RolloutPool(
            self._runtime, self._plan, self.backend, self._engine_specs(), self.args.rollout_timeout
        )
        starting += self._pool.start()
        self._runtime.gather(starting, "start", max(self.args.rollout_timeout, self.args.learner_timeout))

    def _start_learner(self) -> None:
        self._runtime.gather(self._create_learner(), "start", self.args.learner_timeout)

    def _create_learner(self) -> list:
        config = self.args
        self._runtime = LocalRuntime() if config.rollout_workers == 0 else RayRuntime()
        self._plan: Plan = plan_resources(
            self._runtime.cluster(),
            self.num_agents,
            1 if config.rollout_workers == 0 else config.rollout_workers,
            config.gpus_per_rollout_worker,
            config.learner_gpus,
        )
        resources = Resources(self._plan.learner_cpus, self._plan.learner_gpus, self._plan.learner_threads)
        self._learner = self._runtime.create("the learner", Learner, resources, self._learner_spec)
        self._learner_spec = None
        return [(self._learner, self._learner.submit("start"))]

    def _engine_specs(self) -> list[EngineSpec]:
        config = self.args
        sampling = Sampling(config.temperature, config.top_p, config.top_k, config.max_new_tokens)
        engines_per_worker = -(-self.num_agents // self._plan.workers)
        return [
            EngineSpec(
                agent=agent,
                config=model.config,
                tokenizer=tokenizer,
                stop_token_ids=stop_token_ids(model, tokenizer),
                sampling=sampling,
                dtype=self.rollout_dtype,
                max_model_len=config.max_new_tokens
                + (config.max_prompt_length or max(len(prompt.token_ids_A[agent]) for prompt in self._prompts)),
                max_completions=config.rollout_buffer_size * config.num_generations,
                memory_fraction=0.9 * min(1.0, self._plan.worker_gpus or 1.0) / engines_per_worker,
            )
            for agent, (model, tokenizer) in enumerate(zip(self._models, self.tokenizers, strict=True))
        ]


def _stopwatch() -> Callable[[], float]:
    """A function that returns the seconds since its last call."""
    last = time.perf_counter()

    def lap() -> float:
        nonlocal last
        now = time.perf_counter()
        passed, last = now - last, now
        return passed

    return lap
