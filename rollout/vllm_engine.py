"""An engine on vLLM, in the process of whoever hosts it: token ids in, token ids and log-probs out."""

from __future__ import annotations

import contextlib
import os
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from common.errors import WeightTransferError
from common.types import Group, GroupRequest, Weights
from rollout.engine import (
    EngineSpec,
    cache_bytes_per_token,
    check_weights,
    completion,
    group,
    weight_shapes,
)
from rollout.weight_transfer import weight_transfer_config

_CPU_CACHE_LIMIT = 4 * 2**30


class VLLMEngine:
    """Hosts one `vllm.LLM`, started with dummy weights: it generates only after the first `update_weights`."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.weights_version: int | None = None
        with torch.device("meta"):
            self._shapes = weight_shapes(AutoModelForCausalLM.from_config(spec.config))
        on_cpu = current_platform.is_cpu()
        with tempfile.TemporaryDirectory() as folder, _unpatched_torch():
            spec.config.save_pretrained(folder)
            self._llm = LLM(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype=spec.dtype,
                max_model_len=spec.max_model_len,
                max_num_seqs=min(spec.max_completions, 256),
                enforce_eager=on_cpu,
                gpu_memory_utilization=spec.memory_fraction,
                kv_cache_memory_bytes=self._cpu_cache_bytes() if on_cpu else None,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                weight_transfer_config=weight_transfer_config(),
                disable_log_stats=True,
                seed=0,
            )

    def generate(self, requests: list[GroupRequest]) -> list[Group]:
        """The groups asked for, all in one batch, every completion with its own seed."""
        version = self.weights_version
        prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests for _ in r.seeds_G]
        params = [self._sampling_params(seed) for r in requests for seed in r.seeds_G]
        outputs = iter(self._llm.generate(prompts, params, use_tqdm=False))
        return [group(r, [self._completion(next(outputs)) for _ in r.seeds_G], version) for r in requests]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Load weights, drop keys and values of the old ones, then raise the version.

        Raises:
            WeightTransferError: they are not this model's, or vLLM did not take them; the engine then holds no version.
        """
        self.weights_version = None
        check_weights(self.spec, self._shapes, weights, version)
        try:
            self._llm.collective_rpc("start_weight_update")
            self._llm.collective_rpc("update_weights", args=({"weights": weights},))
            self._llm.collective_rpc("finish_weight_update")
        except Exception as error:
            raise WeightTransferError(
                f"the engine of agent {self.spec.agent} did not take weights version {version}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not self._llm.reset_prefix_cache():
            raise WeightTransferError(f"the engine of agent {self.spec.agent} kept its prefix cache in an update")
        self._llm.llm_engine.set_weight_version(str(version))
        self.weights_version = version

    def close(self) -> None:
        """Shut the engine core down and drop the model."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _sampling_params(self, seed: int) -> SamplingParams:
        sampling = self.spec.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=list(self.spec.stop_token_ids),
        )

    def _completion(self, output):
        sample = output.outputs[0]
        token_ids = list(sample.token_ids)
        logprobs = [position[token].logprob for position, token in zip(sample.logprobs, token_ids, strict=True)]
        return completion(self.spec, token_ids, logprobs)

    def _cpu_cache_bytes(self) -> int:
        sequence = self.spec.max_model_len * cache_bytes_per_token(
            self.spec.config, getattr(torch, self.spec.dtype).itemsize
        )
        wanted = sequence * (self.spec.max_completions + 1)
        return max(2 * sequence, min(wanted, _CPU_CACHE_LIMIT), 64 * 2**20)


@contextlib.contextmanager
def _unpatched_torch():
    """Keep `torch.set_num_threads`, which vLLM's CPU worker replaces, and the random state, which it seeds."""
    set_num_threads, state = torch.set_num_threads, torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_rng_state(state)
