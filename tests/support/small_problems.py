"""One small bfloat16 problem of every form on the CPU, as `bind` sees it, and the same problem elsewhere in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import multigemm as mg
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec

half = partial(torch.ones, dtype=torch.bfloat16)
OPERANDS = ("a", "b", "out", "c", "bias", "ends", "valid_rows")
ENDS = (8, 24, 48)
BOUNDARY = 256
"""Bytes modulo which an address belongs to the class of a launch."""

Given = tuple[Any, Any, dict[str, Any]]
CASES: dict[str, Callable[[], Given]] = {
    "jagged_m": lambda: (half(48, 64), half(3, 64, 128), {"ends": torch.tensor(ENDS)}),
    "offsets": lambda: (half(48, 64), half(3, 64, 128), {"offsets": torch.tensor((0, *ENDS))}),
    "weights along k": lambda: (half(48, 64), half(3, 128, 64).mT, {"ends": torch.tensor(ENDS)}),
    "jagged_n": lambda: (half(3, 128, 64), half(64, 48), {"ends": torch.tensor(ENDS), "jagged": "n"}),
    "jagged_k": lambda: (half(48, 64).T, half(48, 128), {"ends": torch.tensor(ENDS), "jagged": "k"}),
    "batched": lambda: (half(3, 16, 64), half(3, 64, 128), {}),
    "masked": lambda: (half(3, 16, 64), half(3, 64, 128), {"valid_rows": torch.tensor([3, 16, 0])}),
    "odd": lambda: (half(48, 63), half(3, 64, 128)[:, :63], {"ends": torch.tensor(ENDS)}),
    "odd weights": lambda: (half(48, 64), half(3, 64, 128)[:, :, 1:], {"ends": torch.tensor(ENDS)}),
    "odd batch": lambda: (half(3, 64, 63), half(3, 63, 128), {}),
    "per_group": lambda: ([half(48, 64), half(8, 64)], [half(64, 128)] * 2, {}),
    "odd list": lambda: ([half(48, 63), half(8, 61)], [half(63, 101), half(61, 128)], {}),
}
LISTS = ("per_group", "odd list")
PACKED = tuple(form for form in CASES if form not in LISTS)


def staged(problem: mg.GroupedGemmProblem) -> Operands:
    """A problem as `bind` sees it."""
    return stage(problem, staged_spec(problem), allocate(problem)).ops


def operands(form: str, epilogue: bool = False) -> Operands:
    """The problem of a form; `epilogue`: with all that one can have. "twice" multiplies a matrix by its transpose."""
    if form == "twice":
        w = half(3, 64, 128)
        return staged(mg.GroupedGemmProblem(w, w.mT))
    a, b, grouping = CASES[form]()
    more: dict[str, Any] = {}
    if epilogue:
        shape = mg.GroupedGemmProblem(a, b, **grouping).out_shape
        more = {"c": half(*shape), "beta": 0.5, "alpha": 2.0, "bias": half(shape[-1]), "activation": "relu"}
    return staged(mg.GroupedGemmProblem(a, b, **grouping, **more))


def _moved(x: Any, pages: int) -> Any:
    """The same matrix elsewhere, at an address that is congruent modulo BOUNDARY."""
    if not isinstance(x, Tensor):
        return x
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    memory = torch.zeros(span * x.element_size() + BOUNDARY * (pages + 2), dtype=torch.uint8)
    skipped = (x.data_ptr() - memory.data_ptr()) % BOUNDARY + BOUNDARY * pages
    typed = memory[skipped : skipped + span * x.element_size()].view(x.dtype)
    return typed.as_strided(x.shape, x.stride())


def elsewhere(ops: Operands) -> Operands:
    """Other operands of the same class."""
    return replace(ops, **{name: _moved(getattr(ops, name), i + 1) for i, name in enumerate(OPERANDS)})


def spans(ops: Operands) -> list[tuple[int, int]]:
    """Where the memory of all operands begins and ends."""
    tensors = [x for x in (getattr(ops, name) for name in OPERANDS) if isinstance(x, Tensor)]
    return [(x.data_ptr(), x.data_ptr() + max(x.untyped_storage().nbytes(), 1)) for x in tensors]


def float8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Ones."""
    return torch.ones(shape).to(dtype)


def blocks(**changes: Any) -> mg.GroupedGemmProblem:
    """DeepSeek's recipe: 1x128 of tokens, 128x128 of weights that lie as [G, N, K]."""
    options: dict[str, Any] = {"sizes": [100, 0, 200], "scale_a": torch.ones(300, 4), "scale_b": torch.ones(3, 4, 5)}
    return mg.GroupedGemmProblem(float8(300, 400), float8(3, 520, 400).mT, **{**options, **changes})
