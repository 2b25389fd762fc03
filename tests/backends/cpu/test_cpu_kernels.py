"""The kernels of the cpu backend one by one: configs, tiles of every size, and what is left without each library."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from multigemm.backends.cpu import BACKEND, config, jit, mkl
from multigemm.backends.cpu.config import Config, invalid_reasons
from multigemm.backends.cpu.groups import Sizes, empty_products
from multigemm.backends.cpu.segments import segments
from multigemm.backends.cpu.tables import leading, merged
from multigemm.errors import InvalidSetting
from tests.support.cpu_cases import CPU, Case, assert_right, build, run

tiles_needed = pytest.mark.skipif(bool(jit.missing()), reason=jit.missing() or "tiles can be compiled")
blas_needed = pytest.mark.skipif(mkl.library() is None, reason="torch carries no batched BLAS here")


@tiles_needed
@blas_needed
@pytest.mark.parametrize(("rows", "vectors"), [(1, 1), (3, 1), (6, 2), (4, 3), (3, 4)])
def test_tiles_of_every_size(rows: int, vectors: int) -> None:
    for n in (1, 15, 16, 17, 31, 33, 64, 67):
        for transposed in ("", "a"):
            sizes = (0, 1, 2, 5, 6, 7, 13, 14, 15, 29)
            ops = build(Case("jagged_m", sizes=sizes, n=n, k=3, transposed=transposed, head=1, tail=1))
            assert_right(run(ops, Config("tiles", rows, vectors)))


def test_neighbours_without_k_are_cleared_together() -> None:
    """One by one, a thousand empty experts would take longer than the products of all others."""
    ops = build(Case("jagged_k", sizes=(0, 0, 3, 0, 4, 0, 0, 0), m=2, n=3))
    sizes = Sizes(ops)
    sizes.changed()
    assert [x.shape[0] for x in empty_products(ops, sizes.start, sizes.end)] == [2, 1, 3]


@tiles_needed
@blas_needed
def test_a_tile_sums_in_one_order_whatever_its_size() -> None:
    case = Case("jagged_m", sizes=(5, 17, 30), n=50, k=77)
    results = [run(build(case), Config("tiles", r, v)).out for r, v in ((1, 1), (5, 2), (6, 2), (3, 4))]
    assert all(torch.equal(one, two) for one, two in itertools.pairwise(results))  # type: ignore[arg-type]


@tiles_needed
def test_tiles_write_nothing_beside_their_columns() -> None:
    ops = build(Case("jagged_m", sizes=(5, 17, 30), n=21, k=8))
    wide = torch.full((52, 64), 5.0)
    ops.out = wide[:, 20:41]
    for tile in BACKEND.configs(ops.spec, CPU):
        assert_right(run(ops, tile))
        assert bool((wide[:, :20] == 5).all())
        assert bool((wide[:, 41:] == 5).all())


def test_a_machine_without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "missing", lambda: "llvmlite is not installed: pip install llvmlite")
    spec = build(Case("jagged_m")).spec
    assert "tiles" not in {c.kernel for c in BACKEND.configs(spec, CPU)}
    with pytest.raises(InvalidSetting, match="llvmlite"):
        BACKEND.plan(spec, Config("tiles", 4, 2), CPU)


def test_a_torch_without_batched_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "library", lambda: None)
    for dtype in (torch.float32, torch.float16, torch.float64, torch.int8):
        ops = build(Case("jagged_m", dtype, bias="row"))
        assert [c.kernel for c in BACKEND.configs(ops.spec, CPU)] == ["loop"]
        assert_right(run(ops))
    with pytest.raises(InvalidSetting, match="use loop"):
        BACKEND.plan(build(Case("jagged_m")).spec, Config("blas"), CPU)


def test_a_processor_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "has_fast_bf16", lambda: False)
    ops = build(Case("jagged_m", torch.bfloat16))
    assert "bmm" not in {c.kernel for c in BACKEND.configs(ops.spec, CPU)}
    assert_right(run(ops))


@pytest.mark.parametrize(
    ("chosen", "case", "words"),
    [
        (Config("tiles", 14, 2), Case("batched", torch.float64), "float64"),
        (Config("tiles", 0, 2), Case("batched"), "empty"),
        (Config("tiles", 30, 4), Case("batched"), "registers"),
        (Config("bmm"), Case("batched"), "bfloat16"),
        (Config("bmm"), Case("batched", torch.bfloat16, bias="row"), "epilogue"),
        (Config("bmm"), Case("jagged_k", torch.bfloat16), "rows of A"),
        (Config("warp"), Case("batched"), "unknown"),  # type: ignore[arg-type]
    ],
)
def test_configs_that_cannot_be(chosen: Config, case: Case, words: str) -> None:
    reasons = invalid_reasons(chosen, build(case).spec)
    assert any(words in reason for reason in reasons)
    with pytest.raises(InvalidSetting, match=words):
        BACKEND.plan(build(case).spec, chosen, CPU)


@tiles_needed
def test_compiled_code_is_kept_on_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(tmp_path))
    from multigemm.settings import settings

    settings.cache_clear()
    try:
        assert jit._compile(2, 1)
        kept = list((tmp_path / "cpu").iterdir())
        assert len(kept) == 1
        before = kept[0].stat().st_mtime_ns
        assert jit._compile(2, 1)
        assert kept[0].stat().st_mtime_ns == before
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_segments_cover_each_row_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, rng.integers(2, 300), rng.integers(1, 80))
        owned = np.zeros(len(sizes), np.int64)
        for s in segments(sizes, 64, 64):
            owned[s.first : s.last] += 1
            part = sizes[s.first : s.last]
            assert s.height == part.max()
            assert s.even == bool((part == s.height).all())
        assert ((owned == 1) | ((owned == 0) & (sizes == 0))).all()
    assert segments(np.zeros(3, np.int64), 4, 4) == []


def test_what_blas_can_address() -> None:
    assert leading(3, 4, 4, 1) == (True, 4)
    assert leading(3, 4, 1, 3) == (False, 3)
    assert leading(3, 4, 0, 1) is None
    assert leading(3, 4, 8, 2) is None
    assert leading(1, 4, 2**40, 1) == (True, 4)
    assert leading(3, 1, 5, 2**40) == (True, 5)
    assert merged([]).count == 0
