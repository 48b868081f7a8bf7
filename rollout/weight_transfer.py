"""A weight transfer backend for vLLM's own interface: parameters come as host arrays and are loaded layer by layer.

In a Ray worker the arrays are read in place from the object store, in local mode from the learner's copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from common.types import Weights
from common.weights import unpack

BACKEND = "host_arrays"


@dataclass
class HostArraysInit(WeightTransferInitInfo):
    """Nothing has to be agreed on: every update carries its arrays."""


@dataclass
class HostArraysUpdate(WeightTransferUpdateInfo):
    """One whole set of parameters."""

    weights: Weights


class HostArraysEngine(WeightTransferEngine[HostArraysInit, HostArraysUpdate]):
    """Loads whole sets of parameters from host memory."""

    init_info_cls = HostArraysInit
    update_info_cls = HostArraysUpdate

    def init_transfer_engine(self, init_info: HostArraysInit) -> None:
        """No rendezvous is needed."""

    def start_weight_update(self) -> None:
        """Put the layers into the state in which they take checkpoint weights."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: HostArraysUpdate) -> None:
        """Load the parameters by their checkpoint names."""
        self.model.load_weights(unpack(update_info.weights))

    def finish_weight_update(self) -> None:
        """Repack the layers, and the output head of a tied model, which layerwise reloading leaves with the old one."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
            dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def weight_transfer_config() -> WeightTransferConfig:
    """The vLLM configuration that selects this backend, registered on first use."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostArraysEngine)
    return WeightTransferConfig(backend=BACKEND)
