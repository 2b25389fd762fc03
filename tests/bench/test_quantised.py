"""The suites of quantised operands: bytes, tensors, what counts as right, and the peers that multiply them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.bench.entries import Refused, backend_entry, ceiling_entry
from multigemm.bench.operands import make
from multigemm.bench.peers import PEERS
from multigemm.bench.suites import suite
from multigemm.bench.workloads import RECIPES, Rates, Workload
from multigemm.integrations import deep_gemm as stand_in
from tests.support.bench_entries import by_name, measured

CPU = torch.device("cpu")
BASE = Workload("case", "fp8", groups=4, n=160, k=256, total=70, distribution="zipf", dtype="fp8-blocks")
FORMS = {
    "jagged_m": BASE,
    "masked": replace(BASE, form="masked", m=40, cap=40),
    "batched": replace(BASE, form="batched", m=20, total=0),
    "jagged_k": replace(BASE, form="jagged_k", m=48, k=0),
}


def test_the_suites() -> None:
    fp8, wonly = suite("fp8"), suite("wonly")
    assert {case.dtype for case in fp8} == {"fp8-blocks", "fp8-rows", "fp8-1x128", "mxfp8"}
    assert {case.dtype for case in (*fp8, *wonly)} == set(RECIPES)
    assert len({case.key for case in (*fp8, *wonly)}) == len(fp8) + len(wonly)
    assert {case.suite for case in fp8} == {"fp8"}
    assert {case.form for case in wonly} == {"jagged_m", "masked"}


def test_bytes_count_codes_and_scales() -> None:
    """3 groups of 10 rows, one of none: codes, scales of rows and blocks, results in bfloat16."""
    case = replace(BASE, groups=4, n=300, k=200, total=30, given=(10, 0, 10, 10))
    outs = 30 * 300 * 2
    wanted = {
        "fp8-rows": 30 * 200 + 3 * 300 * 200 + 4 * (30 + 3 * 300),
        "fp8-blocks": 30 * 200 + 3 * 300 * 200 + 4 * (30 * 2 + 3 * 3 * 2),
        "fp8-1x128": 30 * 200 + 3 * 300 * 200 + 4 * (30 * 2 + 3 * 300 * 2),
        "mxfp8": 30 * 200 + 3 * 300 * 200 + 30 * 7 + 3 * 300 * 7,
        "fp8-weights": 2 * 30 * 200 + 3 * 300 * 200 + 4 * 3 * 300,
        "int8-weights": 2 * 30 * 200 + 3 * 300 * 200 + 4 * 3 * 300,
        "int4-weights": 2 * 30 * 200 + 3 * 300 * 100 + 4 * 3 * 300 * 2,
        "mxfp4-weights": 2 * 30 * 200 + 3 * 300 * 100 + 3 * 300 * 7,
    }
    assert {name: replace(case, dtype=name).bytes - outs for name in RECIPES} == wanted
    rows = replace(case, dtype="fp8-rows")
    assert rows.floor_us(Rates(1400.0, 4.0)) == max(rows.flops / 1.4e9, rows.bytes / 4e6)


IN_FORMS = [("masked", "fp8-blocks"), ("batched", "int4-weights"), ("batched", "mxfp8")]
IN_FORMS += [("jagged_k", name) for name in ("fp8-rows", "fp8-1x128", "mxfp8", "int8-weights")]


@pytest.mark.parametrize(("form", "dtype"), [*(("jagged_m", name) for name in RECIPES), *IN_FORMS])
def test_right_results_are_right_and_others_wrong(form: str, dtype: str) -> None:
    tensors = make(replace(FORMS[form], dtype=dtype), CPU)
    truth, given = tensors.reference(), tensors.problem
    ready = backend_entry("cpu").prepare(tensors)
    tensors.poison()
    assert truth.verdict(ready.result(None)).startswith("wrong answer")
    ready.call()
    assert truth.verdict(ready.result(None)) == ""
    scale: Any = given.scale_b
    codes = scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale
    index = (int(tensors.workload.sizes.argmax()),) if codes.dim() == 3 else ()
    if index:
        codes[index] = codes[index] + 1 if codes.dtype is torch.uint8 else codes[index] * 1.5
    else:
        codes.add_(1) if codes.dtype is torch.uint8 else codes.mul_(1.5)
    ready.call()
    assert truth.verdict(ready.result(None)).startswith("wrong answer")


def test_tensors_lie_as_kernels_read_them_fastest() -> None:
    given = make(BASE, CPU).problem
    assert given.spec.b.order == "col" and given.spec.a.order == "row"
    scale: Any = given.scale_a
    assert scale.stride() == (1, 70)
    undrawn = make(replace(BASE, dtype="mxfp4-weights"), CPU, drawn=False).problem
    assert undrawn.spec.b.packed == "e2m1"


def test_peers_without_scales_and_ceilings_say_so() -> None:
    tensors = make(BASE, CPU)
    for name in ("torch_grouped", "torch_loop", "torch_bmm", "quack"):
        with pytest.raises(Refused, match="operands without scales"):
            PEERS[name].prepare(tensors)
    with pytest.raises(Refused, match="no dense product"):
        ceiling_entry().prepare(tensors)
    rows = make(replace(BASE, dtype="fp8-rows"), CPU)
    with pytest.raises(Refused, match="needs a CUDA device"):
        PEERS["torch_grouped"].prepare(rows)


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours under its name: the same call, which asks for less."""
    found = SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: 128,
        m_grouped_fp8_gemm_nt_contiguous=stand_in.m_grouped_fp8_gemm_nt_contiguous,
    )
    monkeypatch.setitem(__import__("sys").modules, "deep_gemm", found)


def test_deep_gemm_gets_padded_rows_and_its_result_is_checked(deep_gemm: None) -> None:
    tensors = make(BASE, CPU)
    ready = PEERS["deep_gemm"].prepare(tensors)
    assert tensors.reference().verdict(ready.result(ready.call())) == ""
    assert ready.kernel == "m_grouped_fp8_gemm_nt_contiguous"
    with pytest.raises(Refused, match="K that is a multiple of 128"):
        PEERS["deep_gemm"].prepare(make(replace(BASE, k=200), CPU))
    with pytest.raises(Refused, match="packed rows only"):
        PEERS["deep_gemm"].prepare(make(FORMS["masked"], CPU))


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    report = measured(tmp_path, "--suite fp8 --only fp8_small/empty/fp8-blocks --backends cpu --peers none --reps 2")
    row = by_name(report)["cpu"]
    assert row.status == "ok" and row.case == "fp8_small/empty/fp8-blocks" and row.us
