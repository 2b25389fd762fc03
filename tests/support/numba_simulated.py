"""Tests in Numba's simulator, which is chosen when Numba is imported: `test_simulator.py` runs them in one process.

Epilogues that tensor-core kernels decide at run time, formats and granularities of quantised operands, and how the
threads of a block share memory and wait for each other.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from numba.cuda.simulator.kernelapi import FakeCUDAShared

import multigemm as mg
from multigemm.backends.numba.arguments import KIND
from multigemm.backends.numba.kernels.epilogue import make_any_finish, make_any_store, make_finish
from multigemm.backends.numba.kernels.memory import loader, storer
from multigemm.backends.numba.kernels.runtime import cuda, kernel
from multigemm.cuda.arguments import ACTIVATION_CODES
from multigemm.quantize import quantize
from tests.support import activation_cases

NAMED = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
ALPHA, BETA = np.float32(2), np.float32(-1)


def test_simulated_epilogues_chosen_at_run_time_are_the_compiled_ones() -> None:
    """Bit for bit: every activation, with C and bias of every type and without."""
    memory, kinds = torch.randn(16, dtype=torch.float64), (None, *NAMED)
    for activation, c, bias in itertools.product(ACTIVATION_CODES, kinds, kinds[:4]):
        arrays = [memory.to(NAMED[name or "f32"]) for name in (c, bias)]
        at_c, at_bias = (x.data_ptr() for x in arrays)
        codes = KIND[c] if c else 0, KIND[bias] if bias else 0
        compiled, chosen = make_finish("f32", activation, c, bias), make_any_finish("f32")
        for i, value in enumerate(np.array((0.5, -3.0, 40.0), np.float32)):
            want = compiled(value, ALPHA, BETA, at_c, i, at_bias, i + 1)
            got = chosen(
                value, ALPHA, BETA, ACTIVATION_CODES[activation], codes[0], at_c, i, codes[1], at_bias, i + 1
            )  # fmt: skip
            assert float(want) == float(got), (activation, c, bias, value)


def test_simulated_stores_of_every_type_are_the_compiled_ones() -> None:
    for name, dtype in NAMED.items():
        one, two = (torch.zeros(4, dtype=dtype) for _ in range(2))
        storer(name, "f32")(one.data_ptr(), 2, 1.2345678)
        make_any_store("f32")(two.data_ptr(), 2, 1.2345678, KIND[name])
        assert torch.equal(one, two) and float(loader(name)(one.data_ptr(), 2)) != 0, name


@activation_cases.EACH
def test_simulated_activations_down_to_where_they_underflow(activation: str, dtype: torch.dtype) -> None:
    activation_cases.check_emulated("numba", activation, dtype)


# --- quantised operands -------------------------------------------------------------------------------

SIZES = [5, 0, 12]
E8M0 = torch.float8_e8m0fnu


def check(a: Any, b: Any, **keywords: Any) -> None:
    problem = mg.GroupedGemmProblem(a, b, **keywords)
    verdict = mg.verify(problem, mg.solve(problem, "numba"))
    assert verdict, verdict.text


@pytest.mark.parametrize(
    ("rows", "columns"),
    [("row", "row"), ("1x128", "128x128"), ("1x32", "1x32"), ("1x64", "row"), ("tensor", "group")],
)
def test_simulated_granularities(rows: Any, columns: Any) -> None:
    a = quantize(torch.randn(17, 160), "e4m3", rows)
    b = quantize(torch.randn(3, 160, 20), "e5m2", columns, side="b")
    check(a.data, b.data, sizes=SIZES, scale_a=a.scale, scale_b=b.scale, out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("format", "scale", "more"),
    [("uint4", "1x64", {"zero": True}), ("e2m1", "1x32", {"scale_dtype": E8M0}),
     ("int4", "row", {"scale_dtype": torch.bfloat16}), ("int8", "128x128", {})],
)  # fmt: skip
def test_simulated_formats_of_weights(format: Any, scale: Any, more: dict[str, Any]) -> None:
    b = quantize(torch.randn(3, 160, 20), format, scale, side="b", **more)
    packed = None if format == "int8" else format
    options = {"scale_b": b.scale, "zero_b": b.zero, "activation": "silu", "b_format": packed}
    check(torch.randn(17, 160).bfloat16(), b.data, sizes=SIZES, **options)


@pytest.mark.parametrize("scale", ["1x32", "1x128", "row", "group"])
def test_simulated_scales_of_a_jagged_k(scale: Any) -> None:
    cut: dict[str, Any] = {"sizes": [40, 0, 57], "jagged": "k"}
    a = quantize(torch.randn(12, 97), "e4m3", scale, **cut)
    b = quantize(torch.randn(97, 9), "e4m3", scale, side="b", **cut)
    check(a.data, b.data, scale_a=a.scale, scale_b=b.scale, **cut)


# --- threads of a block -------------------------------------------------------------------------------


def test_simulated_threads_share_an_array_that_all_ask_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, found = np.empty, list[Any]()
    shared: Any = FakeCUDAShared(0)  # type: ignore[no-untyped-call]

    def slowly(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(0.05)
        return real(*arguments, **keywords)

    monkeypatch.setattr(np, "empty", slowly)
    threads = [threading.Thread(target=lambda: found.append(shared.array(4, np.float32))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(array) for array in found}) == 1, "each thread has an array of its own"


@kernel
def rounds(seen: Any, early: int, broken: int) -> None:
    thread = cuda.threadIdx.x
    for turn in range(5):
        if thread == early and turn == 2:
            return
        if thread == broken and turn == 3:
            raise ValueError("broken")
        seen[thread] = turn
        cuda.syncthreads()
        for other in range(8):
            assert other in (early, broken) or seen[other] == turn
        cuda.syncthreads()


@pytest.mark.parametrize("early", [-1, 0, 5])
def test_simulated_threads_wait_for_all_that_still_run(early: int) -> None:
    launch: Any = rounds
    seen = np.zeros(8, np.int64)
    launch[3, 8](seen, early, -1)
    assert seen.tolist() == [1 if thread == early else 4 for thread in range(8)]


def test_simulated_threads_raise_the_error_of_one_that_fails() -> None:
    launch: Any = rounds
    with pytest.raises(ValueError, match="broken"):
        launch[1, 8](np.zeros(8, np.int64), -1, 2)
