"""A whole backend in one file: pads all groups to the longest and multiplies them in one torch.bmm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from multigemm.backend import Availability, Recipe
from multigemm.layouts import Operands
from multigemm.spec import ProblemSpec


@dataclass(frozen=True)
class Config:
    """The longest group is rounded up to a multiple of this."""

    multiple: int = 8


class Padded:
    """The five members of the protocol."""

    name = "padded"

    def availability(self) -> Availability:
        return Availability(ok=True, version="1.0")

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        reasons = []
        if spec.form != "jagged_m" or spec.b.shared:
            reasons.append(f"form is {spec.form}; only jagged_m with one matrix per group runs here")
        if spec.compute is not torch.float32 or spec.out.dtype is not torch.float32:
            reasons.append(f"{spec.compute} to {spec.out.dtype}; only float32 runs here: call .float()")
        if spec.alpha != "one" or spec.c or spec.bias or spec.activation:
            reasons.append("there is no epilogue here: leave alpha, c, bias and activation out")
        return reasons

    def configs(self, spec: ProblemSpec, device: torch.device) -> tuple[Config, ...]:
        return (Config(8), Config(1), Config(64))

    def plan(self, spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
        def bind(ops: Operands) -> Callable[[], None]:
            return lambda: run(ops, config.multiple)

        return Recipe("one padded bmm", config, bind, why="padding is simple", syncs=device.type != "cpu")


def run(ops: Operands, multiple: int) -> None:
    """Offsets are read when the launch runs, and clamped: what they point at must lie inside the operands."""
    a, b, out, ends = ops.a, ops.b, ops.out, ops.ends
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    assert isinstance(out, torch.Tensor)
    assert ends is not None
    total, last = a.shape[0], [int(e) for e in ends.tolist()]
    head = int(ends.as_strided((1,), (1,), ends.storage_offset() - 1).item()) if ops.head else 0
    starts = [min(max(s, 0), total) for s in [head, *last[:-1]]][: len(last)]
    spans = [(s, min(max(e, s), total)) for s, e in zip(starts, last, strict=True)]
    if ops.spec.zero_unowned:
        out.zero_()
    rows = -(-max((e - s for s, e in spans), default=0) // multiple) * multiple
    padded = a.new_zeros(len(spans), rows, a.shape[1])
    for g, (start, end) in enumerate(spans):
        padded[g, : end - start] = a[start:end]
    products = torch.bmm(padded, b)
    for g, (start, end) in enumerate(spans):
        out[start:end] = products[g, : end - start]


BACKEND = Padded()
