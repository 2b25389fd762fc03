"""Launches of fused problems follow their operands: moved, one is byte for byte what a bind to those operands gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.triton import choice, launch
from multigemm.cuda import nvrtc
from multigemm.cuda.arguments import FUSED_OPERANDS, PLAIN_OPERANDS, Addresses
from multigemm.cuda.launch import Kernel
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from tests.support.cuda_driver import steps_of
from tests.support.triton_world import GPU, world

__all__ = ["world"]

TOKENS, PAIRS, HIDDEN, INNER = 48, 96, 64, 128


@pytest.fixture(autouse=True)
def steps_that_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "loaded", lambda source, name, defines, index: Kernel(b"", name, index))


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def gated(groups: int) -> mg.GroupedGemmProblem:
    return mg.GroupedGemmProblem(
        half(TOKENS, HIDDEN), half(groups, HIDDEN, 2 * INNER), ends=numbers(groups), a_rows=numbers(PAIRS),
        activation="swiglu", preact_out=half(PAIRS, 2 * INNER), row_scale=torch.zeros(PAIRS), bias=half(2 * INNER),
    )  # fmt: skip


def combined(groups: int) -> mg.GroupedGemmProblem:
    sums = numbers(TOKENS, 2), torch.zeros(TOKENS, 2)
    return mg.GroupedGemmProblem(
        half(PAIRS, INNER), half(groups, INNER, HIDDEN), ends=numbers(groups), combine=sums, c=half(TOKENS, HIDDEN)
    )


def both(groups: int) -> mg.GroupedGemmProblem:
    return mg.GroupedGemmProblem(
        half(TOKENS, HIDDEN), half(groups, HIDDEN, INNER), sizes=numbers(groups), a_rows=numbers(PAIRS),
        combine=(numbers(TOKENS, 2), None), row_scale=torch.zeros(PAIRS),
    )  # fmt: skip


def weights(groups: int) -> mg.GroupedGemmProblem:
    """Gradients of weights: both operands are picked."""
    return mg.GroupedGemmProblem(
        half(TOKENS, HIDDEN).T, half(TOKENS, INNER), ends=numbers(groups), jagged="k", a_rows=numbers(PAIRS),
        b_rows=numbers(PAIRS),
    )  # fmt: skip


CASES: dict[str, Callable[[int], mg.GroupedGemmProblem]] = {
    "gated": gated, "combined": combined, "both": both, "weights": weights
}  # fmt: skip


def staged(problem: mg.GroupedGemmProblem) -> Operands:
    spec = replace(staged_spec(problem), device_sizes=True)
    return replace(stage(problem, spec, allocate(problem), sums_sizes=True).ops, device=torch.device("cpu"))


def addresses(ops: Operands, work: int) -> Addresses:
    """What a call of the same key hands to `move`."""
    fused: Any = ops.fused
    index = fused.combine or fused.out_rows
    rows = [None if x is None else x.values for x in (fused.a_rows, fused.b_rows)]
    tensors = (*rows, fused.preact, fused.row_scale, None if index is None else index.values, fused.weights)
    given = [*(getattr(ops, name) for name in PLAIN_OPERANDS), *tensors]
    assert len(tensors) == len(FUSED_OPERANDS)
    return (*(0 if x is None else x.data_ptr() for x in given), work)


def described(launch: Any, work: int) -> list[Any]:
    """Everything that the kernels of a launch are started with; -1 for memory of its own, and for what it is lent."""
    steps = steps_of(launch)
    kept: list[Tensor] = [x for step in steps for x in step._keep if isinstance(x, Tensor)]
    kept += [x for step in steps if step._fields is not None for x in step._fields._copies.values()]
    own = {x.data_ptr() for x in kept} | {work}
    found: list[Any] = []
    for step in steps:
        blocks = [step._block, *([] if step._fields is None else [step._fields._content])]
        words = [[-1 if word in own else word for word in np.frombuffer(x._words, np.uint64).tolist()] for x in blocks]
        found.append((step._kernel.name, tuple(step._records._record.grid), words))
    return found


def lent(launch: Any) -> int:
    """Where the memory lies that a launch has before it is lent any."""
    return next((step._lent.data_ptr() for step in steps_of(launch) if step._lent is not None), 0)


@pytest.mark.parametrize("groups", [3, 300])
@pytest.mark.parametrize("case", CASES)
def test_a_moved_launch_is_the_one_bound_there(case: str, groups: int, world: Any) -> None:
    here, there = staged(CASES[case](groups)), staged(CASES[case](groups))
    assert here.spec == there.spec
    for config in choice.candidates_of(here.spec, (9, 0)):
        bind = launch.plan(here.spec, config, GPU).bind
        moving: Any = bind(here)
        fresh: Any = bind(there)
        first = bytes(str(described(moving, lent(moving))), "utf8")
        moving.move(addresses(there, lent(fresh)))
        rows = {"combined": 2 * PAIRS * HIDDEN, "both": 2 * PAIRS * INNER}.get(case, 0)
        in_steps = config.kernel == "hopper" and case != "combined"
        assert moving.work_bytes == fresh.work_bytes and (
            fresh.work_bytes > rows if in_steps else moving.work_bytes == rows
        )
        moved = described(moving, lent(fresh))
        assert moved == described(fresh, lent(fresh)), config
        assert bytes(str(moved), "utf8") != first
        assert lent(moving) == 0, "what it had before goes"
        fused: Any = here.fused
        tensors = [here.a, here.b, here.out, here.c, here.bias, here.ends, *fused.tensors()]
        spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors if isinstance(x, Tensor)]
        assert not moving.stays_behind(spans), config
        assert moving.workspace_bytes() < 2 * PAIRS * HIDDEN, "rows between two launches are lent"


def test_sums_by_place_are_bound_anew(world: Any) -> None:
    """Their places are sorted by torch before each launch, in memory of the launch's own."""
    problem = mg.GroupedGemmProblem(
        half(PAIRS, INNER), half(3, INNER, HIDDEN), ends=numbers(3), out_rows=numbers(PAIRS), rows=TOKENS
    )
    ops = staged(problem)
    config = next(iter(choice.candidates_of(ops.spec, (9, 0))))
    assert not hasattr(launch.plan(ops.spec, config, GPU).bind(ops), "move")
