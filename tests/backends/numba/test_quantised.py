"""The kernel of quantised operands: which config, what it is launched with, and registers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")

from multigemm.backends.numba import choice, launch, support
from multigemm.backends.numba.arguments import Grids, code_tables, grids_of
from multigemm.backends.numba.config import (
    GENERIC,
    GENERIC_EMULATED,
    MMA,
    QUANTISED,
    QUANTISED_EMULATED,
    QUANTISED_FEW,
    QuantisedConfig,
    QuantisedSignature,
)
from multigemm.planning.scale_grids import NO_GRID
from multigemm.problem.problem import GroupedGemmProblem
from tests.support import numba_world
from tests.support.cuda_driver import FakeDriver
from tests.support.numba_world import compiles
from tests.support.small_problems import blocks, float8, staged

CPU, GPU = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
REFERENCE: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e8m0": ml_dtypes.float8_e8m0fnu, "int8": np.int8,
    "i8": np.int8, "u8": np.uint8,
}  # fmt: skip
FLOAT8 = QuantisedSignature("e4m3", "e5m2", "f32", "f32", None, "bf16", None, None, None, True, "row", "col")
UINT4 = QuantisedSignature("bf16", "uint4", None, "bf16", "u8", "f16", "f32", "bf16", "gelu_tanh", True, "row", "row")
MXFP4 = QuantisedSignature("f16", "e2m1", None, "e8m0", None, "f32", None, None, "silu", False, "col", "col")


# --- which config -----------------------------------------------------------------------------------


def test_few_rows_take_the_low_tile(hopper: None) -> None:
    assert choice.candidates(blocks().spec, GPU)[-2:] == [QUANTISED, QUANTISED_FEW]
    few = GroupedGemmProblem(float8(30, 400), float8(3, 400, 520), sizes=[10, 0, 20])
    assert choice.candidates(few.spec, GPU) == [QUANTISED_FEW, QUANTISED]
    assert choice.candidates(blocks().spec, CPU) == [QUANTISED_EMULATED]
    assert support.not_supported_reasons(blocks().spec, GPU) == []
    assert "float8 operands in float32" in choice.why(QUANTISED, blocks().spec, GPU)


def test_kernels_for_plain_operands_take_no_quantised_ones(hopper: None) -> None:
    plain = GroupedGemmProblem(torch.ones(300, 400), torch.ones(3, 400, 512), sizes=[100, 0, 200]).spec
    for config in (GENERIC, MMA):
        assert "take a QuantisedConfig" in choice.problem_with(config, blocks().spec, GPU)
    assert "take a QuantisedConfig" in choice.problem_with(QUANTISED, plain, GPU)
    assert "take a QuantisedConfig" in choice.problem_with(QUANTISED_EMULATED, plain, CPU)
    assert not choice.problem_with(GENERIC_EMULATED, plain, CPU)
    assert "is made for" in choice.problem_with(QuantisedConfig(24, 64), blocks().spec, GPU)


def test_every_tile_has_the_same_bits_for_an_element(hopper: None) -> None:
    """All take steps of 32 along k, which every block of a scale is a multiple of."""
    assert choice.candidates(blocks(batch_invariant=True).spec, GPU) == [QUANTISED, QUANTISED_FEW]
    assert {config.bk for config in (QUANTISED, QUANTISED_FEW, QUANTISED_EMULATED)} == {32}


# --- what it is launched with -----------------------------------------------------------------------


@pytest.mark.parametrize("name", REFERENCE)
def test_tables_hold_every_code(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(REFERENCE[name]).astype(np.float32)
    if name in ("e4m3", "e5m2", "int8"):
        found = code_tables(replace(FLOAT8, a=name if name != "int8" else "e4m3", b=name))[256:512]
    elif name == "e8m0":
        found = code_tables(replace(FLOAT8, scale_a=name))[512:768]
    else:
        found = code_tables(replace(UINT4, zero=name))[1024:]
    np.testing.assert_array_equal(found, want)


def test_tables_of_half_bytes() -> None:
    e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    found = {name: code_tables(replace(MXFP4, b=name))[256:272].tolist() for name in ("int4", "uint4", "e2m1")}
    assert found == {
        "int4": [*range(8), *range(-8, 0)], "uint4": [*range(16)], "e2m1": [*e2m1, *(-x for x in e2m1)]
    }  # fmt: skip


def words(problem: GroupedGemmProblem) -> dict[str, int]:
    found, _ = grids_of(staged(problem))
    return dict(zip(Grids._fields, found, strict=False))


def test_words_of_scales() -> None:
    problem = blocks()
    found = words(problem)
    assert found["scale_a"] == problem.scale_a.data_ptr()  # type: ignore[union-attr]
    wanted = {"scale_a_group": 0, "scale_a_line": 4, "scale_a_deep": 1, "scale_a_line_shift": 0, "scale_a_k_shift": 7,
              "scale_b_group": 20, "scale_b_line": 1, "scale_b_deep": 5, "scale_b_line_shift": 7, "scale_b_k_shift": 7,
              "zero_b": 0, "zero_b_k_shift": 40}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    found = words(blocks(scale_a=torch.tensor(2.0), scale_b=torch.ones(3)))
    assert (found["scale_a_group"], found["scale_a_line"], found["scale_a_k_shift"]) == (0, 0, 40)
    assert (found["scale_b_group"], found["scale_b_line"], found["scale_b_k_shift"]) == (1, 0, 40)


def test_matrices_of_a_list_have_their_own_blocks() -> None:
    a, b = [float8(8, 256), float8(8, 96)], [float8(256, 130), float8(96, 40)]
    scales = [torch.ones(2, 2), torch.ones(3, 40)]
    _, table = grids_of(staged(GroupedGemmProblem(a, b, scale_b=scales)))
    assert table is not None
    assert table[:, 0].tolist() == [list(NO_GRID)] * 2
    assert table[:, 1, 1:].tolist() == [[0, 1, 2, 7, 7], [0, 1, 40, 0, 5]]
    assert table[:, 1, 0].tolist() == [x.data_ptr() for x in scales]


def test_a_launch_follows_its_operands_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: FakeDriver = numba_world.install(monkeypatch)
    ops = staged(blocks())
    made: Any = launch.bind_for(QUANTISED, ops.spec, 0)(ops)
    assert fake.calls.count("cuModuleLoadData") == 1
    before = made._block.snapshot().tolist()
    assert len(before) == 39 + len(Grids._fields) + 2
    scale: Any = ops.scale_a
    assert before[39] == scale.data_ptr()
    assert made.stays_behind([(scale.data_ptr(), 1)]) is False


# --- machine code -----------------------------------------------------------------------------------


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signature", "capability", "config"),
    [(FLOAT8, (8, 0), QUANTISED), (FLOAT8, (9, 0), QUANTISED_FEW), (UINT4, (9, 0), QUANTISED),
     (UINT4, (10, 0), QUANTISED_FEW), (MXFP4, (7, 5), QUANTISED)],
    ids=["float8 8.0", "float8 9.0, few", "uint4 9.0", "uint4 10.0, few", "mxfp4 7.5"],
)  # fmt: skip
def test_nothing_is_spilled(
    signature: QuantisedSignature, capability: tuple[int, int], config: QuantisedConfig
) -> None:
    made = numba_world.assembled(config, signature, capability)
    assert re.findall(r"(\d+) bytes spill stores", made.log) == ["0"], made.log
    assert "quantised" in made.entry
