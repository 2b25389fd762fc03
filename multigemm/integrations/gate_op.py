"""`torch.ops.multigemm.gated`: `act(gate) * up` for rows [gate | up], as an operator that graphs can hold.

Formed in the accumulator's precision and rounded once. On a GPU with Triton one kernel does it, and one
its gradient; elsewhere torch's functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multigemm.integrations import eager
from multigemm.integrations.routing_op import triton_is_here

_library: Any = torch.library.Library("multigemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("gated(Tensor x, bool gelu) -> Tensor", tags=_tags)
_library.define("gated_backward(Tensor grad, Tensor x, bool gelu) -> Tensor", tags=_tags)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up for x [S, 2*I] = [gate | up] -> [S, I]."""
    return torch.ops.multigemm.gated(x, False)  # type: ignore[no-any-return]


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) * up."""
    return torch.ops.multigemm.gated(x, True)  # type: ignore[no-any-return]


def _gelu(x: Tensor) -> Tensor:
    """F.gelu, which forms 1 + erf, loses the tail of negative x."""
    area: Tensor = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
    return x * area


def _plain(x: Tensor, gelu: bool) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    return ((_gelu if gelu else F.silu)(gate) * up).to(x.dtype)


def _plain_backward(grad: Tensor, x: Tensor, gelu: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = x.to(wide).chunk(2, dim=-1)
    g = grad.to(wide)
    if gelu:
        dgate = torch.ops.aten.gelu_backward(g * up, gate)
    else:
        s = torch.sigmoid(gate)
        dgate = g * up * s * (1 + gate * (1 - s))
    return torch.cat([dgate, g * (_gelu if gelu else F.silu)(gate)], dim=-1).to(x.dtype)


def _cuda(x: Tensor, gelu: bool) -> Tensor:
    if not triton_is_here():
        return _plain(x, gelu)
    from multigemm.integrations import gate_kernels

    return gate_kernels.gated(x, gelu)  # type: ignore[no-any-return, no-untyped-call]


def _cuda_backward(grad: Tensor, x: Tensor, gelu: bool) -> Tensor:
    if not triton_is_here():
        return _plain_backward(grad, x, gelu)
    from multigemm.integrations import gate_kernels

    return gate_kernels.gated_backward(grad, x, gelu)  # type: ignore[no-any-return, no-untyped-call]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.gelu = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # second derivatives: in operations that have their own
        return _plain_backward(grad, x, ctx.gelu), None
    return torch.ops.multigemm.gated_backward(grad, x, ctx.gelu), None


eager.register(_library, torch.ops.multigemm.gated.default, _plain, _cuda, _backward, _keep)
_library.impl("gated_backward", _plain_backward, "CPU")
_library.impl("gated_backward", _cuda_backward, "CUDA")
torch.library.register_fake(
    "multigemm::gated", lambda x, gelu: x.new_empty((x.shape[0], x.shape[1] // 2)), lib=_library
)
torch.library.register_fake("multigemm::gated_backward", lambda grad, x, gelu: x.new_empty(x.shape), lib=_library)
