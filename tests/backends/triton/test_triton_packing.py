"""Copies in front of the triton kernels, and maps of operands without elements: what is launched, without a GPU."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config
from multigemm.backends.triton.hopper import canonical, canonical_shape, map_of_a, map_of_b
from multigemm.cuda import driver
from multigemm.cuda.arguments import OPERANDS
from multigemm.planning.operands import packed
from multigemm.planning.staging import stage, staged_spec
from tests.support.triton_world import GPU, FakeDriver, kernels_of, world

__all__ = ["world"]


@pytest.mark.parametrize("groups", [0, 2])
def test_weights_of_no_group_are_not_copied(groups: int, world: FakeDriver) -> None:
    """Weights of no group count as one group at address 0, which a copy would read."""
    a, b = torch.randn(9, 8).bfloat16(), torch.randn(groups, 8, 5).bfloat16()
    problem = mg.GroupedGemmProblem(a, b, ends=torch.tensor([4, 9][:groups], dtype=torch.int32))
    ops = stage(problem, staged_spec(problem), torch.empty(9, 5, dtype=torch.bfloat16)).ops
    config = Config("hopper", block_m=128, block_n=128, warps=4, stages=4, pack=("b",))
    bound = BACKEND.plan(ops.spec, config, GPU).bind(ops)
    launched = [kernel._kernel.name for kernel in kernels_of(bound)]
    assert launched == ["pack_kernel"] * (groups > 0) + ["hopper_kernel"]


@pytest.mark.parametrize("shift", [0, 7])
@pytest.mark.parametrize("jagged", ["k", "m"])
def test_maps_of_operands_without_elements_lie_where_a_map_may(
    jagged: Literal["m", "k"], shift: int, world: FakeDriver
) -> None:
    """They borrow the result's address, which may be any; a map wants a multiple of 16 bytes, and reads nothing."""
    groups, rows, total = (2, 48, 0) if jagged == "k" else (0, 9, 9)
    if jagged == "k":  # no element of K in any group
        a, b = torch.empty(total, rows, dtype=torch.bfloat16).T, torch.empty(total, 16, dtype=torch.bfloat16)
    else:  # no group
        a, b = torch.empty(total, 48, dtype=torch.bfloat16), torch.empty(groups, 48, 16, dtype=torch.bfloat16)
    shape = (groups, rows, 16) if jagged == "k" else (rows, 16)
    out = torch.empty(shift + 2 * 48 * 16, dtype=torch.bfloat16)[shift:][: torch.Size(shape).numel()].view(shape)
    problem = mg.GroupedGemmProblem(a, b, ends=torch.zeros(groups, dtype=torch.int32), jagged=jagged, out=out)
    ops = stage(problem, staged_spec(problem), out).ops
    spec, seen, box = canonical(ops.spec), canonical_shape(packed(ops)), ((64, 64, 1, 1),)
    with driver.on_device(0):
        maps = [map_of_a(spec, seen, box), map_of_b(spec, seen, box)]
    assert all(address and address % 16 == 0 for address, *_ in world.encoded)
    borrowed = [slot for encoded in maps for slot in encoded.slots if slot.operand == OPERANDS.index("out")]
    assert len(borrowed) == (2 if jagged == "k" else 1)
    assert all(slot.distance == -(out.data_ptr() % 16) for slot in borrowed), "they follow the result"
