"""Operators with a gradient that an eager call without gradients crosses torch's dispatcher for only once.

torch's own registration goes through Python twice, once for autograd and once for the kernel; a layer of small
operators spends most of its time there when it decodes a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_Keys = torch._C.DispatchKeySet
_PLAIN = (
    _Keys(torch._C.DispatchKey.CPU)
    | _Keys(torch._C.DispatchKey.CUDA)
    | _Keys(torch._C.DispatchKey.ADInplaceOrView)
    | _Keys(torch._C.DispatchKey.BackendSelect)
)
SPECIAL: int = torch._C._after_autograd_keyset.raw_repr() & ~_PLAIN.raw_repr()
"""Dispatch keys that have work to do below autograd: a mode, a transform, a wrapper."""
grad_enabled = torch.is_grad_enabled
any_requires_grad = torch._C._any_requires_grad
current_device: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", lambda: None)
_SAME: AbstractContextManager[None] = nullcontext()
PLAIN = frozenset((Tensor, Parameter, type(None)))
_USUAL = {torch._C._dispatch_tls_local_include_set().raw_repr()}
with torch.inference_mode():
    _USUAL.add(torch._C._dispatch_tls_local_include_set().raw_repr())


def differentiable(overload: Any, backward: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
    """An operator's kernel for autograd: `run(keyset, *args, **options)`, with all of `args`.

    `keep(ctx, args, options, output)` saves what `backward(ctx, grad)` reads, which gives a gradient for each argument.
    torch's own way, torch.library.register_autograd, reads the schema at each call, for as long as many launches take.
    """
    below = torch._C._after_autograd_keyset

    def forward(ctx: Any, keyset: Any, options: dict[str, Any], *args: Any) -> Any:
        output = redispatched(keyset, args, options)
        keep(ctx, args, options, output)
        return output

    def redispatched(keyset: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & below, *args, **options)

    def back(ctx: Any, *grads: Any) -> Any:
        return (None, None, *backward(ctx, *grads))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    name = overload.name().replace("::", "_")
    function: Any = type(f"BackwardOf_{name}", (torch.autograd.Function,), methods)

    def run(keyset: Any, *args: Any, **options: Any) -> Any:
        if grad_enabled() and any_requires_grad(*args):
            return function.apply(keyset, options, *args)
        return redispatched(keyset, args, options)

    return run


def register(
    library: Any, overload: Any, cpu: Callable[..., Any], cuda: Callable[..., Any], backward: Any, keep: Any
) -> None:
    """Gives an operator without keywords its kernels and its gradient."""
    general = differentiable(overload, backward, lambda ctx, args, _, output: keep(ctx, args, output))

    def run(keyset: Any, *args: Any) -> Any:
        if keyset.raw_repr() & SPECIAL or (grad_enabled() and any_requires_grad(*args)):
            return general(keyset, *args)
        plain = not args[0].is_cuda or forward_ad._current_level >= 0  # torch's own functions know tangents
        return (cpu if plain else cuda)(*args)

    name = overload.name().split("::")[1]
    library.impl(name, run, "Autograd", with_keyset=True)
    library.impl(name, cpu, "CPU")
    library.impl(name, cuda, "CUDA")


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """The device of x as the current one; entering what is current already costs nothing."""
    return _SAME if x.get_device() == current_device() else torch.cuda.device(x.device)


def watched(*tensors: Tensor | None) -> bool:
    """Whether anything but the plain result is wanted: a gradient, a mode, a transform, a cast, a subclass."""
    if (grad_enabled() and any_requires_grad(*tensors)) or forward_ad._current_level >= 0:
        return True
    if torch._C._dispatch_tls_local_include_set().raw_repr() not in _USUAL:
        return True
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return True
    if torch._C._len_torch_function_stack() or torch._C._get_tracing_state() is not None:
        return True
    return not PLAIN.issuperset(map(type, tensors))


def lazy(*tensors: Tensor) -> bool:
    """Whether memory does not hold the values: a minus sign is pending, or there is none because all are zero."""
    return any(map(Tensor.is_neg, tensors)) or not all(map(Tensor.data_ptr, tensors))
