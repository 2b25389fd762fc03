"""Fused problems on the cpu: sizes that lie, batch invariance, inference tensors. The rest: `test_every_config`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.problem.spec import GATES
from multigemm.reference import answer, judge

G = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=G)


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


def test_rows_of_one_destination_are_added_in_order() -> None:
    """The bits of a loop, for rows of magnitudes whose order matters."""
    tokens, count, columns = 900, 7, 64
    rows = r(tokens, columns) * torch.exp2(torch.randint(-12, 13, (tokens, columns), generator=G).float())
    places = torch.randint(-1, count + 1, (tokens,), generator=G)
    out = mg.grouped_gemm(rows, torch.eye(columns), sizes=[tokens - 1], out_rows=places, rows=count, backend="cpu")
    wanted = torch.zeros(count, columns)
    for s in range(tokens - 1):  # no group owns the last row
        if 0 <= places[s] < count:
            wanted[places[s]] += rows[s]
    assert torch.equal(out, wanted)


def test_inference_tensors_and_numpy_kinds() -> None:
    with torch.inference_mode():
        out, preact = torch.empty(10, 3), torch.empty(10, 6)
    a, b = r(10, 4), r(1, 4, 6)
    problem = mg.GroupedGemmProblem(a, b, sizes=[10], activation="swiglu", out=out, preact_out=preact)
    assert judge(answer(problem), mg.solve(problem))
    array = mg.grouped_gemm(a.numpy(), b.numpy(), sizes=[10], activation="swiglu")
    assert isinstance(array, np.ndarray) and np.array_equal(array, out.numpy())
