"""Copies in front of the triton kernels: what is launched, without a GPU."""

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config, driver
from multigemm.backends.triton.packing_launch import packed_operands
from multigemm.staging import stage, staged_spec


@pytest.mark.parametrize("groups", [0, 2])
def test_weights_of_no_group_are_not_copied(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of no group count as one group at address 0, which a copy would read."""
    monkeypatch.setattr(driver, "launcher", lambda *arguments: lambda: None)
    monkeypatch.setattr(driver, "index_of", lambda device: 0)
    a, b = torch.randn(9, 8), torch.randn(groups, 8, 5)
    problem = mg.GroupedGemmProblem(a, b, ends=torch.tensor([4, 9][:groups], dtype=torch.int32))
    spec = staged_spec(problem)
    ops = stage(problem, spec, torch.empty(9, 5)).ops
    shape, copies = packed_operands(ops, Config(kernel="hopper", pack=("b",)), {"pack b": None})  # type: ignore[dict-item]
    assert len(copies) == (1 if groups else 0)
    assert shape.b.ptr
