"""The cublas backend from problem to result without a GPU: cuts, layouts, and the epilogue's own source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.backends.cublas import epilogue, kernels
from multigemm.backends.cublas.config import Config
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.testing import Case, Limits, Stand, World, check, random_case
from multigemm.testing.strategies import legal
from multigemm.testing.subject import Subject
from tests.support.cublas_fake import HostCublas, HostKernel, install_epilogue

TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"c_dtype": "float32", "bias_dtype": "bfloat16", "out_dtype": "bfloat16", "activation": "gelu"},
    "float64": {"c_dtype": "float64", "bias_dtype": "float32", "out_dtype": "float16", "activation": None},
    "int8": {"c_dtype": "int32", "bias_dtype": "int32", "out_dtype": "", "activation": "relu"},
    "float32": {"c_dtype": "", "bias_dtype": "", "out_dtype": "", "activation": None},
    "float16": {"c_dtype": "", "bias_dtype": "float16", "out_dtype": "", "activation": None},
}
LIMITS = Limits(work=1 << 14, longest=70, groups=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("epilogue")


def _case(seed: int, types: str) -> Case:
    """A random case with the types of one compiled epilogue, so that few are compiled."""
    case = random_case(seed, LIMITS)
    fixed, full = TYPES[types] | {"dtype": types, "dtype_b": "", "precision": "ieee", "mode": "int"}, types != "float32"
    bias = "" if not full else "n" if case.form in ("jagged_n", "per_group") else "gn"
    alias = case.alias and fixed["c_dtype"] == (fixed["out_dtype"] or types)
    return legal(replace(case, **fixed, alpha=2, beta=3 if full and fixed["c_dtype"] else 0, bias=bias, alias=alias))


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("variant", ["loop", "batched", "streams"])
def test_random_problems(monkeypatch: pytest.MonkeyPatch, folder: Path, types: str, variant: str) -> None:
    install_epilogue(monkeypatch, folder)
    subject, ran = Subject(HostCublas(variant)), 0
    for seed in range(24):
        case = _case(seed, types)
        outcome = check(Stand.build(World.build(case), torch.device("cpu")), subject)
        assert outcome.ok, (case, [str(f) for f in outcome.findings])
        ran += outcome.ran
    assert ran >= 14


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_blocks_that_take_several_tiles_in_a_row(
    monkeypatch: pytest.MonkeyPatch, folder: Path, types: str, blocks: int
) -> None:
    """As large problems have it; here every problem of enough tiles does."""
    install_epilogue(monkeypatch, folder)
    monkeypatch.setattr(epilogue, "MOST_BLOCKS", blocks)
    subject = Subject(HostCublas("loop"))
    for seed in range(24):
        case = _case(seed, types)
        outcome = check(Stand.build(World.build(case), torch.device("cpu")), subject)
        assert outcome.ok, (case, [str(f) for f in outcome.findings])


def _breaks(monkeypatch: pytest.MonkeyPatch, folder: Path, types: str, old: str, new: str) -> bool:
    """Whether random problems notice a change of the epilogue's source."""
    assert old in kernels.FINISH
    init = HostKernel.__init__

    def broken(self: HostKernel, source: str, *rest: Any) -> None:
        init(self, source.replace(old, new), *rest)

    monkeypatch.setattr(HostKernel, "__init__", broken)
    install_epilogue(monkeypatch, folder)
    subject = Subject(HostCublas("loop"))
    stands = (Stand.build(World.build(_case(seed, types)), torch.device("cpu")) for seed in range(24))
    return any(not check(stand, subject).ok for stand in stands)


@pytest.mark.parametrize(
    ("types", "old", "new"),
    [
        ("float32", "head_tiles = tiles_of(head, lines, slabs);", "head_tiles = 0;"),
        ("bfloat16", "first = middle + 1", "first = middle + 2"),
        ("bfloat16", "&& k != 0, use_c", ", use_c"),
        ("bfloat16", "v[h][i] += beta * more[h][i];", ""),
        ("float16", "v[h][i] += more[h][i];", ""),
        ("float32", "            begin = last;", "            begin = last + 1;"),
        ("float32", "here.high >= end && out_step", "out_step"),
        ("bfloat16", "both[1] < last ? 2 : 1", "2"),
        ("bfloat16", "slow >= known.high", "false"),
    ],
)
def test_a_broken_epilogue_is_noticed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, types: str, old: str, new: str
) -> None:
    assert _breaks(monkeypatch, folder, types, old, new)


@pytest.mark.parametrize("value", [1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-8, 3e300])
def test_float64_rounds_once(monkeypatch: pytest.MonkeyPatch, folder: Path, value: float) -> None:
    install_epilogue(monkeypatch, folder)
    a, b = (torch.full((1, 1, 1), v, dtype=torch.float64) for v in (value, 1.0))
    problem, out = GroupedGemmProblem(a, b, out_dtype=torch.bfloat16), torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    spec = staged_spec(problem)
    HostCublas("loop").plan(spec, Config("loop"), out.device).bind(stage(problem, spec, out).ops)()
    want = 1 + round((value - 1) * 128) / 128 if value < 1e300 else float("inf")
    assert out.item() == want


@pytest.mark.parametrize("n", [8192, 9007])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_lines_longer_than_a_slab(
    monkeypatch: pytest.MonkeyPatch, folder: Path, n: int, by_rows: bool, shift: int
) -> None:
    install_epilogue(monkeypatch, folder)
    gen = torch.Generator().manual_seed(n)
    a, b, bias = (torch.randint(-4, 5, s, generator=gen).bfloat16() for s in ((5, 2), (2, 2, n), (2, n)))
    memory = torch.full((5 * n + 2,), 7.0).bfloat16()
    out = memory[shift : shift + 5 * n].view((5, n) if by_rows else (n, 5))
    problem = GroupedGemmProblem(a, b, sizes=[3, 2], bias=bias, activation="relu", out=out if by_rows else out.t())
    spec = staged_spec(problem)
    HostCublas("loop").plan(spec, Config("loop"), out.device).bind(stage(problem, spec, allocate(problem)).ops)()
    want = torch.cat([a[:3].double() @ b[0].double() + bias[0], a[3:].double() @ b[1].double() + bias[1]]).relu()
    assert torch.equal(problem.given_out.double(), want)
    assert memory[:shift].eq(7).all()
    assert memory[shift + 5 * n :].eq(7).all()


@pytest.mark.parametrize("empties", [1, 3, 12])
def test_products_without_k_are_zeros(monkeypatch: pytest.MonkeyPatch, folder: Path, empties: int) -> None:
    """Few are filled one by one, many by the epilogue."""
    install_epilogue(monkeypatch, folder)
    sizes = [2, *[0] * empties, 3]
    x, dy = (torch.arange(5 * n).remainder(7).view(5, n).float() - 3 for n in (8, 4))
    out = torch.full((len(sizes), 8, 4), float("nan"))
    problem = GroupedGemmProblem(x.t(), dy, sizes=sizes, jagged="k", out=out)
    spec = staged_spec(problem)
    HostCublas("loop").plan(spec, Config("loop"), out.device).bind(stage(problem, spec, out).ops)()
    assert torch.equal(out[0], x[:2].t() @ dy[:2])
    assert torch.equal(out[-1], x[2:].t() @ dy[2:])
    assert out[1:-1].eq(0).all()
