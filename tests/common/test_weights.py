"""Parameters as numpy arrays: the same bits on the other side, and nobody writes into anybody's memory."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from common.weights import load_into, pack, unpack
from tests.builders import tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def special_values(dtype: torch.dtype) -> torch.Tensor:
    finfo = torch.finfo(dtype)
    values = [0.0, -0.0, 1 / 3, finfo.max, finfo.min, finfo.tiny, torch.inf, -torch.inf, torch.nan]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_arrives(dtype):
    tensors = {
        "special": special_values(dtype),
        "matrix": torch.randn(5, 7).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
    }
    weights = pickle.loads(pickle.dumps(pack(tensors.items())))
    found = dict(unpack(weights))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype and found[name].shape == tensor.shape
        assert torch.equal(bits(found[name]), bits(tensor))
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_is_torch_s_own_and_leaves_integers_alone(dtype):
    values, counts = torch.randn(100), torch.arange(5)
    found = dict(unpack(pack([("values", values), ("counts", counts)], dtype)))
    assert torch.equal(found["values"], values.to(dtype))
    assert found["counts"].dtype == torch.int64 and torch.equal(found["counts"], counts)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_what_is_packed_is_a_copy(dtype):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"whole": base, "transposed": base.T, "row": base[1], "column": base[:, 1]}
    weights = pack(tensors.items(), dtype)
    expected = {name: tensor.clone().numpy() for name, tensor in tensors.items()}
    base += 100
    for name, array in weights.arrays.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_takes_the_weights_of_another(tied):
    source, target = tiny_model(tied, seed=1), tiny_model(tied, seed=2)
    load_into(target, pack(source.named_parameters()))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(source(ids).logits, target(ids).logits)
    assert ("lm_head.weight" in dict(target.named_parameters())) is not tied


def test_arrays_that_cannot_be_written_are_enough(recwarn):
    source, target = tiny_model(seed=1), tiny_model(seed=2)
    weights = pack(source.named_parameters(), torch.bfloat16)
    for array in weights.arrays.values():
        array.flags.writeable = False
    load_into(target, weights)
    assert not [w for w in recwarn if "writable" in str(w.message)]
    for (_, found), (_, sent) in zip(target.named_parameters(), source.named_parameters(), strict=True):
        assert torch.equal(found, sent.bfloat16().float())
        assert found.requires_grad


def test_parameters_keep_their_dtype():
    target = tiny_model(seed=2).bfloat16()
    load_into(target, pack(tiny_model(seed=1).named_parameters()))
    assert {parameter.dtype for parameter in target.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_weights_of_other_names_are_refused_and_change_nothing(change):
    target = tiny_model(seed=2)
    before = copy.deepcopy(target)
    tensors = dict(tiny_model(seed=1).named_parameters())
    if change == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.bias"] = torch.zeros(3)
    with pytest.raises(KeyError, match="model.norm"):
        load_into(target, pack(tensors.items()))
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), before.parameters(), strict=True))


def test_weights_of_another_shape_are_refused():
    with pytest.raises(RuntimeError):
        load_into(tiny_model(), pack(tiny_model(intermediate_size=64).named_parameters()))
