"""Batch invariance through the operator, its gradients, layers and drop-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.integrations import gmm, ragged_dot, torch_grouped_mm
from multigemm.integrations.torch_op import grouped_gemm
from multigemm.nn import GroupedLinear, MoE


def test_gradients_inherit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    made = mg.GroupedGemmProblem.__init__

    def note(self: Any, *args: Any, **keywords: Any) -> None:
        made(self, *args, **keywords)
        asked.append(self.batch_invariant)

    monkeypatch.setattr(mg.GroupedGemmProblem, "__init__", note)
    a, b = torch.randn(6, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    grouped_gemm(a, b, sizes=torch.tensor([2, 4]), batch_invariant=True).sum().backward()  # type: ignore[no-untyped-call]
    mg.grouped_gemm(a, b, sizes=[2, 4], batch_invariant=True).sum().backward()  # type: ignore[no-untyped-call]
    assert len(asked) >= 6
    assert all(asked)


def test_a_token_of_a_layer_ignores_the_batch() -> None:
    torch.manual_seed(0)
    layer = MoE(64, 48, 4, activation="silu", batch_invariant=True)
    x = torch.randn(50, 64)
    with torch.no_grad():
        whole = layer(x)
        for rows in (slice(0, 1), slice(7, 9), slice(20, 50)):
            assert torch.equal(layer(x[rows]), whole[rows])


def test_layers_and_stand_ins_hand_it_on() -> None:
    torch.manual_seed(1)
    linear = GroupedLinear(2, 300, 40, activation="gelu", batch_invariant=True)
    x, w, ends = torch.randn(40, 300), torch.randn(2, 300, 40), torch.tensor([10, 40], dtype=torch.int32)
    sizes, one = torch.tensor([10, 30]), torch.tensor([1, 0])
    calls: dict[str, Any] = {
        "GroupedLinear": lambda x, sizes: linear(x, sizes=sizes),
        "grouped_mm": lambda x, sizes: torch_grouped_mm.grouped_mm(x, w, sizes.cumsum(0).int(), batch_invariant=True),
        "gmm": lambda x, sizes: gmm.ops.gmm(x, w, sizes, batch_invariant=True),
        "backend.gmm": lambda x, sizes: gmm.backend.gmm(x, w, sizes, batch_invariant=True),
        "ragged_dot": lambda x, sizes: ragged_dot.ragged_dot(x, w, sizes, batch_invariant=True),
    }
    assert int(ends[-1]) == len(x)
    with torch.no_grad():
        for name, call in calls.items():
            assert torch.equal(call(x, sizes)[3:4], call(x[3:4], one)), name
