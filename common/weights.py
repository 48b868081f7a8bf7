"""Between torch parameters and the numpy arrays that travel."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from common.types import Weights

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def pack(named_tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> Weights:
    """Copy tensors into numpy arrays on the host, floating ones cast to `dtype` first."""
    arrays: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for name, tensor in named_tensors:
        cast = tensor.detach().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        host = cast.cpu().contiguous()
        if host.data_ptr() == tensor.data_ptr():
            host = host.clone()
        arrays[name] = host.view(_BITS.get(host.dtype, host.dtype)).numpy()
        dtypes[name] = str(host.dtype).removeprefix("torch.")
    return Weights(arrays, dtypes)


def unpack(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by name, sharing memory with the arrays: read them, never write into them."""
    for name, array in weights.arrays.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array)
        yield name, tensor.view(getattr(torch, weights.dtypes[name]))


def named_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each once, and the buffers that a saved model has."""
    saved = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}


def load_into(model: torch.nn.Module, weights: Weights) -> None:
    """Copy the arrays into the model's tensors of the same names, cast to their dtypes.

    Raises:
        KeyError: names of the arrays and of the model's tensors differ.
    """
    state = named_state(model)
    if state.keys() != weights.arrays.keys():
        raise KeyError(f"weights and model differ in {sorted(state.keys() ^ weights.arrays.keys())[:5]}")
    with torch.no_grad():
        for name, tensor in unpack(weights):
            state[name].copy_(tensor)
