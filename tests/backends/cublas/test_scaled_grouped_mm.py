"""Float8 operands through torch's scaled_grouped_mm: what it takes, what it is called with, and the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cublas import BACKEND, scaled_grouped_mm
from multigemm.backends.cublas.config import Config
from multigemm.errors import BackendUnsupported
from multigemm.planning import launch_cache
from multigemm.planning.binding import Choice
from multigemm.planning.plan import Plan
from multigemm.quantize import quantize
from tests.support.cublas_fake import CUDA, Fake, HostCublas

T, K, N, G = 72, 64, 48, 4
SIZES = [10, 0, 30, 20]
HEADED = [7, 17, 17, 47, 67]
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


def whole(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).float().to(E4M3)


def powers(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-3, 4, shape).float())


def chosen(problem: mg.GroupedGemmProblem) -> Choice:
    backend = HostCublas("scaled_grouped_mm")
    assert backend.not_supported_reasons(problem.spec, CUDA) == []
    return Choice("cublas", backend.plan(problem.spec, Config("scaled_grouped_mm"), CUDA), problem.spec, "")


def checked(a: Tensor, b: Tensor, **keywords: Any) -> Tensor:
    """The result, judged to the last bit: elements are whole numbers and scales powers of two."""
    problem = mg.GroupedGemmProblem(a, b, **keywords)
    out: Tensor = launch_cache.solve(chosen(problem), problem)
    verdict = mg.verify(problem, out)
    assert verdict, verdict.text
    return out


SCALES = {
    "rows": (powers(T, 1), powers(G, 1, N)),
    "rows in e8m0": (powers(T, 1).to(E8M0), powers(G, 1, N).to(E8M0)),
    "numbers": (powers(1).reshape(()), powers(1).reshape(())),
    "columns shared, rows apart": (powers(T, 3)[:, 1:2], powers(1, 1, N)),
    "groups of b": (powers(T, 1), powers(G)),
    "none": (None, None),
}
CUTS: dict[str, dict[str, Any]] = {
    "host sizes": {"sizes": SIZES},
    "live sizes": {"sizes": torch.tensor(SIZES)},
    "host offsets": {"offsets": HEADED},
    "live offsets": {"offsets": torch.tensor(HEADED, dtype=torch.int32)},
    "live ends": {"ends": torch.tensor(SIZES).cumsum(0)},
}


@pytest.mark.parametrize("given", [False, True], ids=["ours", "given"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("scale", SCALES)
def test_rows_of_tokens(fake: Fake, scale: str, cut: str, given: bool) -> None:
    a, b, (sa, sb) = whole(T, K), whole(G, N, K).mT, SCALES[scale]
    out = {"out": torch.full((T, N), 5.0, dtype=torch.bfloat16)} if given else {}
    checked(a, b, scale_a=sa, scale_b=sb, accumulate="fast" if given else "promoted", **CUTS[cut], **out)
    assert ("scaled_grouped_mm", given) in fake.log


def test_ends_on_the_device_may_lie(fake: Fake) -> None:
    ends = torch.tensor(SIZES).cumsum(0)
    problem = mg.GroupedGemmProblem(whole(T, K), whole(G, N, K).mT, ends=ends, scale_a=powers(T, 1))
    for lie in ([-5, 4, 4, 900], [90] * G, [0] * G):
        ends.copy_(torch.tensor(lie))
        assert mg.verify(problem, launch_cache.solve(chosen(problem), problem))
    ends.copy_(torch.tensor([30, 20, 90, 60]))  # groups that overlap: some result, and no row beyond the last
    assert launch_cache.solve(chosen(problem), problem).isfinite().all()


def test_shared_weights_and_few_rows(fake: Fake) -> None:
    checked(whole(T, K), whole(N, K).mT, sizes=SIZES, scale_a=powers(T, 1), scale_b=powers(1, N))
    checked(whole(1, K), whole(1, N, K).mT, sizes=[1], scale_a=powers(1, 1), scale_b=powers(1, 1, N))
    checked(whole(T, 2 * K)[:, :K], whole(G, N, K).mT, sizes=SIZES, scale_a=powers(T, 1))
    checked(whole(0, K), whole(G, N, K).mT, sizes=[0] * G)
    checked(whole(T, 0), whole(G, N, 0).mT, sizes=SIZES)
    assert len(fake.log) >= 3


K_CUTS = {"multiples of 16": [0, 16, 16, 64, 80], "a start": [16, 32, 32, 80, 80], "any": [3, 20, 20, 65, 77]}


@pytest.mark.parametrize("total", [80, 77 + 6])
@pytest.mark.parametrize("cut", K_CUTS)
@pytest.mark.parametrize("scale", ["rows", "shared rows", "numbers", "groups", "none"])
def test_weight_gradients(fake: Fake, scale: str, cut: str, total: int) -> None:
    rows, wide = 24, 96
    a = torch.zeros(rows, wide).to(E4M3)[:, :total]
    a.copy_(whole(rows, total))
    b = torch.zeros(N, wide).to(E4M3)[:, :total].mT
    b.copy_(whole(total, N))
    scales: Any = {
        "rows": (powers(rows, G), powers(G, N)),
        "shared rows": (powers(rows, 1), powers(1, N)),
        "numbers": (powers(1).reshape(()), powers(1).reshape(())),
        "groups": (powers(G), powers(G)),
        "none": (None, None),
    }[scale]
    if scale == "rows":
        scales[0][:, 1] = torch.nan  # of a group without tokens: never used
    checked(a, b, offsets=K_CUTS[cut], jagged="k", scale_a=scales[0], scale_b=scales[1])
    assert ("scaled_grouped_mm", False) in fake.log
    checked(a, b, sizes=[0] * G, jagged="k", scale_a=scales[0], scale_b=scales[1])


def test_a_plan_reads_operands_and_scales_anew(fake: Fake) -> None:
    a, b, sa, sb = whole(T, K), whole(G, N, K).mT, powers(T, 2)[:, :1], powers(G, 1, N)
    problem = mg.GroupedGemmProblem(a, b, sizes=SIZES, scale_a=sa, scale_b=sb)
    plan = Plan(chosen(problem), problem)
    first = plan().clone()
    sa.mul_(2)
    sb.mul_(2)
    assert torch.equal(plan(), first * 4)


def test_without_private_names_torchs_result_is_copied(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_grouped_mm, "redispatched_scaled_grouped_mm", None)
    checks = torch._scaled_grouped_mm

    def public(a: Tensor, *rest: Any) -> Tensor:
        return checks(a, *rest) if a.is_meta else fake.scaled_grouped_mm(None, a, *rest)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", public)
    for out in ({}, {"out": torch.ones(T, N, dtype=torch.bfloat16)}):
        checked(whole(T, K), whole(G, N, K).mT, sizes=SIZES, scale_a=powers(T, 1), scale_b=powers(G, 1, N), **out)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "e5m2": (
        "multiplies float8_e4m3fn by float8_e4m3fn, not float8_e4m3fn x float8_e5m2",
        {"b": whole(G, N, K).mT.to(E5M2)},
    ),
    "float32 out": ("writes bfloat16, not torch.float32", {"out_dtype": "float32"}),
    "bias": ("no epilogue", {"bias": torch.ones(N)}),
    "alpha": ("no epilogue", {"alpha": 2.0}),
    "activation": ("no epilogue", {"activation": "relu"}),
    "batch invariant": ("batch_invariant=True", {"batch_invariant": True}),
    "blocks of a": (
        "scale_a covers 1 x 32: scaled_grouped_mm takes one number for each row",
        {"scale_a": powers(T, 2)},
    ),
    "blocks of b": ("scale_b covers 1 x 32", {"scale_b": powers(G, 2, N)}),
    "groups of a": ("scale_a covers groups of rows", {"scale_a": powers(G)}),
    "b by rows": ("reads both operands along K", {"b": whole(G, K, N)}),
    "odd N": ("needs N to be a multiple of 16, got 40", {"b": whole(G, 40, K).mT}),
    "odd K": ("needs K to be a multiple of 16, got 24", {"a": whole(T, 32)[:, :24], "b": whole(G, N, 32)[..., :24].mT}),
    "off 16 bytes": ("multiples of 16 bytes", {"a": whole(T, K + 8)[:, 8:]}),
    "out by columns": ("output by rows", {"out": torch.empty(N, T, dtype=torch.bfloat16).t()}),
    "batched": ("runs jagged m and jagged k, not batched", {"a": whole(G, T, K), "sizes": None}),
    "no groups": ("takes 1 to 1023 groups, got 0", {"b": whole(0, N, K).mT, "sizes": []}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_by_name(fake: Fake, name: str) -> None:
    text, changed = REFUSED[name]
    given: dict[str, Any] = {"a": whole(T, K), "b": whole(G, N, K).mT, "sizes": SIZES} | changed
    spec = mg.GroupedGemmProblem(given.pop("a"), given.pop("b"), **given).spec
    reasons = HostCublas("scaled_grouped_mm").not_supported_reasons(spec, CUDA)
    assert any(text in reason for reason in reasons), reasons


def test_other_quantised_operands_devices_and_variants_are_refused(fake: Fake, monkeypatch: Any) -> None:
    weights: Any = quantize(torch.randn(G, K, N), "int4", "row", side="b")
    spec = mg.GroupedGemmProblem(
        torch.ones(T, K).half(), weights.data, sizes=SIZES, scale_b=weights.scale, b_format="int4"
    ).spec
    assert "int4" in BACKEND.not_supported_reasons(spec, CUDA)[0]
    spec = mg.GroupedGemmProblem(whole(T, K), whole(G, N, K).mT, sizes=SIZES).spec
    assert "operands are on cpu" in BACKEND.not_supported_reasons(spec, torch.device("cpu"))[0]
    assert [c.variant for c in BACKEND.configs(spec, CUDA)] == ["scaled_grouped_mm"]
    with pytest.raises(BackendUnsupported, match="float8 operands take 'scaled_grouped_mm'"):
        BACKEND.plan(spec, Config("loop"), CUDA)
    plain = mg.GroupedGemmProblem(torch.ones(T, K), torch.ones(G, K, N), sizes=SIZES).spec
    with pytest.raises(BackendUnsupported, match="float8 operands take 'scaled_grouped_mm'"):
        BACKEND.plan(plain, Config("scaled_grouped_mm"), CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "compute capability 9.x" in BACKEND.not_supported_reasons(spec, CUDA)[0]
