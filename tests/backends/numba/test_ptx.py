"""The PTX layer of the Numba backend: each instruction compiles without a GPU, and is right on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.numba_world import OBSTACLE

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")
if OBSTACLE:
    pytest.skip(OBSTACLE, allow_module_level=True)

from multigemm.backends.numba import build
from multigemm.backends.numba.kernels.runtime import cuda, numpy_names, types
from multigemm.cuda.tensor_map import encode_together
from tests.support.numba_ptx_cases import Case, cases

ALL = cases()
SHARED = 44 * 1024


def signature(case: Case) -> Any:
    given = [types.Array(numba_type(x.dtype), 1, "C") for x in case.arrays]
    if case.by_address or case.tensor_map:
        given[0] = types.Array(types.int64, 1, "C")
    return types.void(*given)


def numba_type(dtype: np.dtype[Any]) -> Any:
    return getattr(types, dtype.name)


def to_ptx(case: Case) -> str:
    cc = (9, 0, "a") if case.hopper else (8, 0)
    with numpy_names(), build._compiling_for(cc):
        text, _ = cuda.compile(
            case.kernel, signature(case), device=False, abi="numba", cc=cc, launch_bounds=(case.threads, 1)
        )
    return str(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_compiles_to_its_instruction(name: str) -> None:
    text = to_ptx(ALL[name])
    assert ALL[name].opcode in text
    assert ".target sm_90a" in text or not ALL[name].hopper
    assert ".local" not in text, "a fragment was pushed out of the registers"


@contextmanager
def needs(case: Case) -> Iterator[None]:
    major = torch.cuda.get_device_capability()[0]
    if case.hopper and major != 9:
        pytest.skip(f"needs compute capability 9.x, this GPU has {major}.x")
    with numpy_names():
        yield


def map_of(case: Case, array: Any) -> Any:
    raw = encode_together(address=array.device_ctypes_pointer.value, **case.tensor_map)
    return cuda.to_device(np.frombuffer(raw, np.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_value_equals_numpy(name: str) -> None:
    case = ALL[name]
    torch.zeros(1, device="cuda")
    with needs(case):
        arrays = [cuda.to_device(x if x.size else np.zeros(1, x.dtype)) for x in case.arrays]
        given, alive = list(arrays), arrays[0]
        if case.tensor_map:
            alive = map_of(case, arrays[0] if case.arrays[0].size else arrays[-1])
        if case.by_address or case.tensor_map:
            given[0] = cuda.to_device(np.array([alive.device_ctypes_pointer.value], np.int64))
        cuda.jit(case.kernel)[1, case.threads, 0, SHARED](*given)
        cuda.synchronize()
        got = arrays[-1].copy_to_host()
    assert np.array_equal(got, case.expected.astype(got.dtype)), f"{name}: {np.flatnonzero(got != case.expected)[:8]}"
