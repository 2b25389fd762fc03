"""The bound of gates and sums of rows accepts what right kernels may do, and accuses what they must not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.problem.spec import GATES
from multigemm.reference import answer, judge

F32 = np.float32
GRID = np.concatenate([np.linspace(-110, 110, 1001), np.linspace(-12, 12, 2001), [0.0, -0.0]]).astype(F32)
Array = Any


def gate_of(g: Array, u: Array, gate: str, **numbers: Any) -> mg.GroupedGemmProblem:
    """A problem whose products are g and u themselves."""
    a = torch.from_numpy(np.stack([g, u], 1))
    return mg.GroupedGemmProblem(a, torch.eye(2)[None], sizes=[len(g)], activation=gate, **numbers)


def in_float32(g: Array, u: Array, gate: str, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """A kernel's own evaluation, each step rounded to float32."""
    with np.errstate(all="ignore"):
        sigmoid = F32(1) / (F32(1) + np.exp(-(F32(alpha) * g)))
        inner = F32(np.sqrt(8 / np.pi)) * (g + F32(0.044715) * g * g * g)
        erfc = torch.special.erfc(torch.from_numpy(g * F32(-np.sqrt(0.5)))).numpy()
        acts = {
            "swiglu": g * sigmoid, "glu": sigmoid, "reglu": np.maximum(g, F32(0)), "geglu": F32(0.5) * g * erfc,
            "geglu_tanh": g / (F32(1) + np.exp(-inner)),
        }  # fmt: skip
        return (acts[gate] * (u + F32(beta))).astype(F32)


@pytest.mark.parametrize(
    ("gate", "alpha"), [*((gate, 1.0) for gate in GATES), *(("swiglu", alpha) for alpha in (1.702, 0.03, -1.5, 40.0))]
)
def test_float32_kernels_are_accepted_from_tail_to_tail(gate: str, alpha: float) -> None:
    u = np.random.default_rng(0).standard_normal(GRID.size).astype(F32)
    for beta in (0.0, 0.3):
        numbers = {"glu_beta": beta} | ({"glu_alpha": alpha} if alpha != 1 else {})
        found = answer(gate_of(GRID, u, gate, **numbers))
        got = in_float32(GRID, u, gate, alpha, beta)
        verdict = judge(found, got[:, None])
        assert verdict.ok, verdict.text
        block, normal = found.blocks[0], np.abs(got) > 1e-30
        width = (block.high - block.low)[normal[:, None]] / np.abs(got[normal])
        assert np.median(width) < (2.0**-16 if gate == "glu" else 2.0**-17), (
            "an interval that accepts anything proves nothing"
        )


@pytest.mark.parametrize("gate", ["swiglu", "geglu_tanh", "glu"])
def test_an_approximate_tanh_is_accused(gate: str) -> None:
    g = np.linspace(0.5, 3, 100).astype(F32)
    found = answer(gate_of(g, np.ones_like(g), gate))
    assert not judge(found, in_float32(g, np.ones_like(g), gate)[:, None] * F32(1 + 2.0**-12))


def test_what_is_lost_is_accused() -> None:
    g, u = (np.random.default_rng(i).standard_normal(50).astype(F32) for i in (1, 2))
    numbers = {"glu_alpha": 1.702, "glu_beta": 1.0, "glu_limit": 0.75}
    found = answer(gate_of(g, u, "swiglu", **numbers))
    limited = np.minimum(g, F32(0.75)), np.clip(u, F32(-0.75), F32(0.75))
    right = in_float32(*limited, "swiglu", 1.702, 1.0)
    assert judge(found, right[:, None])
    wrong = {
        "exchanged": in_float32(np.minimum(u, F32(0.75)), np.clip(g, F32(-0.75), F32(0.75)), "swiglu", 1.702, 1.0),
        "no limit": in_float32(g, u, "swiglu", 1.702, 1.0),
        "no beta": in_float32(*limited, "swiglu", 1.702),
        "no alpha": in_float32(*limited, "swiglu", 1.0, 1.0),
        "bfloat16": torch.from_numpy(right).bfloat16().float().numpy(),
    }
    assert [name for name, got in wrong.items() if judge(found, got[:, None])] == []


def test_a_limit_that_float32_cannot_hold_may_be_its_neighbour() -> None:
    g = np.array([5.0, -1.0], F32)
    limit = 0.1
    found = answer(gate_of(g, np.array([5.0, -5.0], F32), "reglu", glu_limit=limit))
    near = F32(limit)
    for x in (near, np.nextafter(near, F32(0))):
        assert judge(found, np.array([[x * x], [0]], F32))
    assert not judge(found, np.array([[F32(0.1001) ** 2], [0]], F32))
    whole = answer(gate_of(g, np.array([5.0, -5.0], F32), "reglu", glu_limit=2.0)).blocks[0]
    assert (whole.low == whole.high).all() and whole.low[0, 0] == 4


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def test_whole_numbers_are_judged_to_the_last_bit() -> None:
    index = torch.randint(-1, 20, (9, 3), generator=torch.Generator().manual_seed(0))
    keywords: dict[str, Any] = {"activation": "reglu", "glu_beta": 1.0, "glu_limit": 7.0}
    for more in (
        {},
        {"row_scale": integers(20)},
        {"combine": (index, integers(9, 3)), "c": integers(9, 6), "beta": 2.0},
    ):
        problem = mg.GroupedGemmProblem(integers(20, 8), integers(2, 8, 12), sizes=[9, 11], **keywords, **more)
        block = answer(problem).blocks[0]
        assert (block.low == block.high).all()
        got = mg.solve(problem).numpy()
        assert judge(answer(problem), got)
        got[3, 2] = np.nextafter(got[3, 2], F32(np.inf))
        assert not judge(answer(problem), got)


def sums(weights: Tensor, dtype: torch.dtype, factor: float) -> tuple[mg.GroupedGemmProblem, Array]:
    """A sum of six rows, and the rows themselves in float64."""
    a = torch.randn(6, 5, generator=torch.Generator().manual_seed(6)).to(dtype)
    index, b = torch.arange(6)[None], torch.eye(5, dtype=dtype)[None] * factor
    problem = mg.GroupedGemmProblem(a, b, sizes=[6], combine=(index, weights), out_dtype=torch.float32)
    return problem, a.double().numpy() * factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_may_be_rounded_once_and_summed_in_any_order(dtype: torch.dtype) -> None:
    weights = torch.rand(1, 6, generator=torch.Generator().manual_seed(3)) + 0.5
    problem, rows = sums(weights, dtype, 1.5)
    found, w = answer(problem), weights.numpy()[0].astype(F32)
    exact = rows.astype(F32)
    rounded = torch.from_numpy(rows).to(dtype).float().numpy()
    for y in (exact, rounded):
        for order in (range(6), range(5, -1, -1)):
            total = np.zeros(5, F32)
            for j in order:
                total += w[j] * y[j]
            assert judge(found, total[None])
    problem, rows = sums(weights, dtype, 1.0)  # rows that the dtype holds
    found, exact = answer(problem), rows.astype(F32)
    narrow = torch.from_numpy(w).bfloat16().float().numpy()
    assert not judge(found, (narrow @ exact)[None].astype(F32)), "weights are never rounded down"
    low = torch.zeros(5, dtype=torch.bfloat16)
    for j in range(6):
        low = (low.float() + w[j] * torch.from_numpy(exact[j])).bfloat16()
    assert not judge(found, low.float().numpy()[None]), "nor the sum"


def test_nan_and_infinity() -> None:
    """NaN passes the limits; 0 * inf and inf - inf are NaN; a limited gate makes an infinity of g ordinary."""
    a = torch.tensor([[1.0], [torch.inf], [-torch.inf], [torch.nan]])
    index, weights = torch.tensor([[0, 0], [1, 0], [1, 2], [1, 0], [3, 0]]), torch.ones(5, 2)
    weights[3, 0] = 0
    problem = mg.GroupedGemmProblem(a, torch.ones(1, 1, 1), sizes=[4], combine=(index, weights))
    wanted = np.array([2, np.inf, np.nan, np.nan, np.nan], F32)[:, None]
    assert np.array_equal(answer(problem).blocks[0].expected, wanted, equal_nan=True)
    assert judge(answer(problem), wanted) and judge(answer(problem), mg.solve(problem))
    assert not judge(answer(problem), np.nan_to_num(wanted, nan=0))
    both = torch.tensor([[[1.0, 0.5]]])  # g is a, u a half of it
    for limit, right in ((None, [0.5, np.inf, np.nan, np.nan]), (3.0, [0.5, 9.0, -0.0, np.nan])):
        problem = mg.GroupedGemmProblem(a, both, sizes=[4], activation="reglu", glu_limit=limit)
        assert np.array_equal(answer(problem).blocks[0].expected[:, 0], np.array(right, F32), equal_nan=True)
        assert judge(answer(problem), mg.solve(problem))


def test_what_is_not_judged() -> None:
    """A row beyond float16's range may be infinite or not, before the sum; an overflow may be lost before row_scale; a
    row that rounding may make zero, times infinity, may be NaN."""
    a = torch.full((1, 1), 300.0).half()
    problem = mg.GroupedGemmProblem(
        a, a[None], sizes=[1], combine=(torch.tensor([[0]]), torch.tensor([[2.0**-10]])), out_dtype=torch.float32
    )
    assert answer(problem).blocks[0].free.all()
    big = np.array([1e30], F32)
    problem = gate_of(big, big, "reglu", row_scale=torch.tensor([1e-30]))
    assert answer(problem).blocks[0].free.all()
    thirds = torch.tensor([[1 / 3 + 2.0**-25, 1 / 3], [torch.inf, 1.0]])
    for terms in ([0], [0, 1], [1, 0]):
        weights = torch.tensor([[torch.inf if term == 0 else -1.0 for term in terms]])
        problem = mg.GroupedGemmProblem(
            thirds, torch.tensor([[[1.0], [-1.0]]]), sizes=[2], combine=(torch.tensor([terms]), weights)
        )
        assert answer(problem).blocks[0].free.all()


def test_preact_has_an_answer_of_its_own() -> None:
    preact = torch.full((9, 12), 7.0)
    problem = mg.GroupedGemmProblem(
        integers(9, 8), integers(2, 8, 12), offsets=[1, 4, 8], activation="swiglu", glu_limit=0.5, preact_out=preact
    )
    mg.solve(problem)
    found = answer(problem).preact
    assert found is not None and judge(found, preact)
    preact[0] = preact[8] = 9  # what no group owns is not judged here
    assert judge(found, preact)
    preact[3, 11] += 1
    assert not judge(found, preact)
