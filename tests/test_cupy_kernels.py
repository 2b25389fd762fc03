"""Compiles every CUDA kernel and shipped config of the cupy backend with NVRTC, without a GPU.

What is read back is what a profiler would show first: registers, spills, shared memory, and whether
the main loop is made of wgmma instructions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("cupy", reason="the package cupy is not installed", exc_type=ImportError)

from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import hopper, mma_shapes, portable
from multigemm.backends.cupy.build import Source, architecture, compile_source, headers
from multigemm.backends.cupy.config import Config
from multigemm.spec import OperandSpec, ProblemSpec

REGISTERS_PER_SM = 65536


def spec(dtype: torch.dtype = torch.bfloat16, a: str = "row", b: str = "row", **changes: object) -> ProblemSpec:
    """A jagged-m problem of one dtype and two layouts."""
    operand = OperandSpec(dtype)
    out = OperandSpec(torch.int32 if dtype == torch.int8 else dtype)
    base = ProblemSpec(
        "jagged_m",
        32,
        None,
        4096,
        4096,
        8192,
        0,
        replace(operand, order=a),
        replace(operand, order=b),
        out,
        compute=dtype,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@cache
def report(source: Source, arch: str) -> tuple[int, int]:
    """Registers per thread and bytes spilled, as ptxas reports them."""
    _, log = compile_source(source, arch, "--ptxas-options=-v")
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))


KINDS = [
    (torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "tf32"),
    (torch.float32, "ieee"), (torch.float64, "ieee"), (torch.int8, "ieee"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "precision"), KINDS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize(
    ("a", "b", "arch"), [("row", "row", "sm_80"), ("col", "col", "sm_90a"), ("row", "col", "sm_100")]
)
def test_portable_kernel_compiles_without_spills(dtype: torch.dtype, precision: str, a: str, b: str, arch: str) -> None:
    registers, spilled = report(portable.source(spec(dtype, a, b, precision=precision)), arch)
    assert spilled == 0
    assert registers * portable.THREADS <= REGISTERS_PER_SM


PLAIN = [
    pytest.param(spec(), configs.WIDE, id="jagged_m"),
    pytest.param(spec(a="col", b="row", form="jagged_k"), configs.WIDE, id="jagged_k"),
    pytest.param(spec(torch.float16, b="col"), configs.MIDDLE, id="middle"),
    pytest.param(spec(b="col", form="per_group"), configs.NARROW, id="list-narrow"),
    pytest.param(spec(activation="silu"), configs.WIDE, id="any-epilogue"),
]


@pytest.mark.parametrize(("problem", "config"), PLAIN)
def test_hopper_kernel_does_not_spill_in_its_consumers(problem: ProblemSpec, config: Config) -> None:
    registers, spilled = report(hopper.source(problem, config), "sm_90a")
    assert registers * hopper.THREADS <= REGISTERS_PER_SM
    assert spilled <= 64, "a few words in the producer thread are harmless; an accumulator in memory is not"


def test_every_width_is_one_wgmma_instruction() -> None:
    text = mma_shapes.text()
    assert sorted(int(n) for n in set(re.findall(r"m64n(\d+)k16", text))) == list(range(8, 257, 8))


def test_headers_are_complete_and_the_architecture_has_its_suffix() -> None:
    names = [name for name, _ in headers()]
    assert len(names) == len(set(names)) and "mma.cuh" in names
    assert [architecture(c) for c in ((8, 0), (9, 0), (10, 0))] == ["sm_80", "sm_90a", "sm_100"]
