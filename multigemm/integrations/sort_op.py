"""`torch.ops.multigemm.sort_by_expert`: a stable sort of pairs by expert, as an operator that graphs can hold.

Gives (order, inverse, ends): the pairs by expert, where each pair went, and where each expert's pairs end. Experts
are few, so on a GPU with Triton it is a counting sort in one to three kernels; elsewhere torch's sort.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.integrations.routing_op import triton_is_here

NARROW = 1 << 15
Sorted = tuple[Tensor, Tensor, Tensor]
_library: Any = torch.library.Library("multigemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "sort_by_expert(Tensor pairs, int experts) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)


def sort_by_expert(pairs: Tensor, experts: int) -> Sorted:
    """pairs [S] of expert numbers -> order [S], inverse [S], ends [experts]; numbers outside go behind all others."""
    return torch.ops.multigemm.sort_by_expert(pairs, experts)  # type: ignore[no-any-return]


def _plain(pairs: Tensor, experts: int) -> Sorted:
    known = torch.where((pairs >= 0) & (pairs < experts), pairs, experts)
    # two-byte keys sort several times faster than eight-byte ones
    by_expert, order = torch.sort(known.to(torch.int16 if experts < NARROW else torch.int64), stable=True)
    steps = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, steps)
    numbers = torch.arange(experts, device=pairs.device, dtype=by_expert.dtype)
    return order, inverse, torch.searchsorted(by_expert, numbers, right=True, out_int32=True)


def _cuda(pairs: Tensor, experts: int) -> Sorted:
    if not triton_is_here():
        return _plain(pairs, experts)
    from multigemm.integrations import sort_kernels

    if experts > sort_kernels.MOST_EXPERTS or pairs.shape[0] == 0:
        return _plain(pairs, experts)
    return sort_kernels.sort_by_expert(pairs, experts)  # type: ignore[no-any-return, no-untyped-call]


def _like(pairs: Tensor, experts: int) -> Sorted:
    order = pairs.new_empty(pairs.shape, dtype=torch.int64)
    return order, torch.empty_like(order), pairs.new_empty((experts,), dtype=torch.int32)


_library.impl("sort_by_expert", _plain, "CPU")
_library.impl("sort_by_expert", _cuda, "CUDA")
torch.library.register_fake("multigemm::sort_by_expert", _like, lib=_library)
