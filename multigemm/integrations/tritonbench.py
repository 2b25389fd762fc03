"""Adapters for TritonBench's grouped_gemm operator: `(tb_op, group_A, group_B) -> callable`, one for each backend.

    from multigemm.integrations.tritonbench import ADAPTERS
    for name, adapter in ADAPTERS.items():
        register_benchmark_mannually("grouped_gemm", func_name=f"multigemm_{name}", ...)(adapter)

The operator hands out lists and compares rows: the results of all groups below each other. Packing
and planning happen when the adapter is called, as for the operator's own entries; the callable that
it returns only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multigemm import api as dispatch
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select import registry

Adapter = Callable[[Any, Sequence[Tensor], Sequence[Tensor]], Callable[[], Tensor]]


def pack(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """(rows, one b or a stack of them, offsets on the device) of lists that share K and N; None if they do not."""
    if len({b.shape for b in group_b}) != 1 or len({a.dtype for a in group_a}) != 1:
        return None
    first = group_b[0]
    shared = all(b.data_ptr() == first.data_ptr() and b.stride() == first.stride() for b in group_b)
    sizes = torch.tensor([0, *(a.shape[0] for a in group_a)], device=first.device)
    return torch.cat(list(group_a)), first if shared else torch.stack(list(group_b)), sizes.cumsum(0)


def run_with(backend: str, group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A callable that launches and returns [sum of M, N]; lists that differ in K or N are joined after the launch."""
    with torch.no_grad():
        packed = pack(group_a, group_b)
        if packed is not None:
            rows, b, offsets = packed
            return dispatch.plan(GroupedGemmProblem(rows, b, offsets=offsets), backend)
        plan = dispatch.plan(GroupedGemmProblem(list(group_a), list(group_b)), backend)
    return lambda: torch.cat(plan())


def adapter(backend: str) -> Adapter:
    """The adapter of one backend, or of "auto"."""

    def adapted(tb_op: Any, group_A: Sequence[Tensor], group_B: Sequence[Tensor]) -> Callable[[], Tensor]:
        return run_with(backend, group_A, group_B)

    adapted.__name__ = adapted.__qualname__ = f"multigemm_{backend}"
    adapted.__doc__ = f"TritonBench's grouped_gemm on multigemm's {backend} backend."
    return adapted


ADAPTERS: dict[str, Adapter] = {name: adapter(name) for name in ("auto", *registry.names())}
