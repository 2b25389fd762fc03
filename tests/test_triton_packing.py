"""Copies in front of the triton kernels: what is launched, without a GPU."""

from typing import Literal

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config, driver, hopper_launch
from multigemm.backends.triton.hopper_forms import canonical, canonical_shape
from multigemm.backends.triton.packing_launch import packed_operands
from multigemm.planning.operands import packed
from multigemm.planning.staging import stage, staged_spec


@pytest.mark.parametrize("groups", [0, 2])
def test_weights_of_no_group_are_not_copied(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of no group count as one group at address 0, which a copy would read."""
    made: list[object] = []
    monkeypatch.setattr(driver, "launcher", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(driver, "index_of", lambda device: 0)
    a, b = torch.randn(9, 8), torch.randn(groups, 8, 5)
    problem = mg.GroupedGemmProblem(a, b, ends=torch.tensor([4, 9][:groups], dtype=torch.int32))
    spec = staged_spec(problem)
    ops = stage(problem, spec, torch.empty(9, 5)).ops
    shape, copies = packed_operands(ops, Config(kernel="hopper", pack=("b",)), {"pack b": None})  # type: ignore[dict-item]
    assert len(copies) == len(made) == (1 if groups else 0)
    assert shape.b.ptr


@pytest.mark.parametrize("shift", [0, 7])
@pytest.mark.parametrize("jagged", ["k", "m"])
def test_maps_of_operands_without_elements_lie_where_a_map_may(
    jagged: Literal["m", "k"], shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They borrow the result's address, which may be any; a map wants a multiple of 16 bytes, and reads nothing."""
    seen: list[int] = []

    def note(address: int, *_: object) -> bytes:
        seen.append(address)
        return b""

    monkeypatch.setattr(hopper_launch, "encode", note)
    monkeypatch.setattr(hopper_launch, "encode_ragged", note)
    groups, rows, total = (2, 48, 0) if jagged == "k" else (0, 9, 9)
    if jagged == "k":  # no element of K in any group
        a, b = torch.empty(total, rows, dtype=torch.bfloat16).T, torch.empty(total, 16, dtype=torch.bfloat16)
    else:  # no group
        a, b = torch.empty(total, 48, dtype=torch.bfloat16), torch.empty(groups, 48, 16, dtype=torch.bfloat16)
    shape = (groups, rows, 16) if jagged == "k" else (rows, 16)
    out = torch.empty(shift + 2 * 48 * 16, dtype=torch.bfloat16)[shift:][: torch.Size(shape).numel()].view(shape)
    problem = mg.GroupedGemmProblem(a, b, ends=torch.zeros(groups, dtype=torch.int32), jagged=jagged, out=out)
    ops = stage(problem, staged_spec(problem), out).ops
    config = Config(kernel="hopper", block_m=128, block_n=128, warps=4, stages=4)
    hopper_launch.maps(canonical(ops.spec), config, canonical_shape(packed(ops)))
    assert len(seen) >= 2
    assert all(address and address % 16 == 0 for address in seen)
