"""What is fused round the products on the cpu: every config, quantised operands, sizes that lie, batch invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends import registry
from multigemm.problem.spec import GATES
from multigemm.reference import answer, judge

G = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=G)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("weights", ["float8_e4m3fn", "int8"])
def test_quantised_products_are_gated_and_summed(weights: str, gate: str) -> None:
    b = (r(3, 32, 24) * 4).to(getattr(torch, weights))
    a = r(20, 32).to(b.dtype if weights.startswith("float8") else torch.bfloat16)
    rows = torch.randint(-1, 21, (30,), generator=G)
    keywords: dict[str, Any] = {"scale_b": torch.rand(3, 1, 24, generator=G) * 0.1}
    if weights.startswith("float8"):
        keywords["scale_a"] = torch.rand(20, 1, generator=G)
    problem = mg.GroupedGemmProblem(
        a, b, sizes=torch.tensor([9, 0, 18]), a_rows=rows, activation=gate, glu_limit=1.0, row_scale=r(30),
        combine=(torch.randint(-1, 30, (9, 4), generator=G), r(9, 4)), out_dtype=torch.float32, **keywords,
    )  # fmt: skip
    verdict = mg.verify(problem, mg.solve(problem, backend="cpu"))
    assert verdict.ok, verdict.text


@pytest.mark.parametrize("fused", ["gate", "combine", "out_rows", "a_rows"])
@pytest.mark.parametrize("lie", [[5, 3, 9, 2], [-4, 2, 10, 99], [0, 0, 50, 1], [7, 6, 5, 4], [2**40, -(2**40), 3, 8]])
def test_offsets_that_lie_touch_nothing_outside(lie: list[int], fused: str) -> None:
    offsets, memory = torch.tensor([0, 2, 4, 9]), torch.full((40, 6), 7.0)
    out = memory[10:20, :3] if fused == "gate" else memory[10:20]
    choices: dict[str, dict[str, Any]] = {
        "gate": {"activation": "swiglu", "row_scale": r(10)},
        "combine": {"combine": (torch.randint(-1, 11, (10, 3), generator=G), r(10, 3))},
        "out_rows": {"out_rows": torch.randint(-1, 11, (10,), generator=G)},
        "a_rows": {"a_rows": torch.randint(-1, 11, (10,), generator=G)},
    }
    keywords = choices[fused]
    plan = mg.plan(r(10, 4), r(3, 4, 6), offsets=offsets, out=out, backend="cpu", **keywords)
    offsets.copy_(torch.tensor(lie))
    plan()
    assert (memory[:10] == 7).all() and (memory[20:] == 7).all()
    assert fused != "gate" or (memory[:, 3:] == 7).all()
    assert fused not in ("combine", "out_rows") or out.isfinite().all()


@pytest.mark.parametrize("keywords", [{"activation": gate} for gate in GATES] + [{"activation": "gelu"}], ids=str)
def test_rows_do_not_depend_on_their_neighbours(keywords: dict[str, Any]) -> None:
    """A row among others, and alone, has the same bits; likewise a token's sum of rows."""
    a, b = r(37, 19), r(2, 19, 26)
    scale = r(37)
    keywords = keywords | {"batch_invariant": True, "backend": "cpu"}
    whole = mg.grouped_gemm(a, b, sizes=[20, 17], row_scale=scale, **keywords)
    for s in (0, 7, 19):
        one = mg.grouped_gemm(a[s : s + 1], b, sizes=[1, 0], row_scale=scale[s : s + 1], **keywords)
        assert torch.equal(one[0], whole[s])
    index, weights = torch.randint(0, 37, (11, 3), generator=G), r(11, 3)
    sums = mg.grouped_gemm(a, b, sizes=[20, 17], combine=(index, weights), **keywords)
    single = mg.grouped_gemm(a, b, sizes=[20, 17], combine=(index[4:5], weights[4:5]), **keywords)
    assert torch.equal(single[0], sums[4])


@pytest.mark.parametrize("form", ["jagged_m", "jagged_k"])
def test_every_config_takes_what_it_says(form: str) -> None:
    rows = torch.arange(24)
    a, b = (r(24, 32), r(3, 32, 16)) if form == "jagged_m" else (r(24, 32).t(), r(24, 16))
    cut: dict[str, Any] = {"sizes": torch.tensor([8, 5, 11]), "jagged": form[-1]}
    backend, seen = registry.get("cpu"), set()
    for dtype in (torch.float32, torch.bfloat16):
        x, y = a.to(dtype), b.to(dtype)
        choices: list[dict[str, Any]] = [{"a_rows": rows}, {"a_rows": rows, "activation": "silu", "preact_out": None}]
        for keywords in choices:
            problem = mg.GroupedGemmProblem(x, y, **cut, **keywords)
            for config in backend.configs(problem.spec, problem.device):
                seen.add(config.kernel)
                got = mg.solve(problem, backend="cpu", config=config)
                plain = {name: value for name, value in keywords.items() if name != "a_rows"}
                without = mg.grouped_gemm(x, y, **cut, **plain, backend="cpu", config=config)
                assert judge(answer(problem), got) and torch.equal(got, without)
    assert seen >= {"blas", "loop"}


def test_inference_tensors_and_numpy_kinds() -> None:
    with torch.inference_mode():
        out, preact = torch.empty(10, 3), torch.empty(10, 6)
    a, b = r(10, 4), r(1, 4, 6)
    problem = mg.GroupedGemmProblem(a, b, sizes=[10], activation="swiglu", out=out, preact_out=preact)
    assert judge(answer(problem), mg.solve(problem))
    array = mg.grouped_gemm(a.numpy(), b.numpy(), sizes=[10], activation="swiglu")
    assert isinstance(array, np.ndarray) and np.array_equal(array, out.numpy())
