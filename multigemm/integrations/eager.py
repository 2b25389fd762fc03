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

from multigemm.torch_internals import (
    AFTER_AUTOGRAD,
    SPECIAL,
    any_requires_grad,
    below_autograd,
    current_device,
    forward_mode,
    grad_enabled,
)

_SAME: AbstractContextManager[None] = nullcontext()


def differentiable(overload: Any, backward: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
    """An operator's kernel for autograd: `run(keyset, *args, **options)`, with all of `args`.

    `keep(ctx, args, options, output)` saves what `backward(ctx, grad)` reads, which gives a gradient for each argument.
    torch's own way, torch.library.register_autograd, reads the schema at each call, for as long as many launches take.
    """

    def forward(ctx: Any, keyset: Any, options: dict[str, Any], *args: Any) -> Any:
        output = redispatched(keyset, args, options)
        keep(ctx, args, options, output)
        return output

    def redispatched(keyset: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with below_autograd():
            return overload.redispatch(keyset & AFTER_AUTOGRAD, *args, **options)

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
        plain = not args[0].is_cuda or forward_mode()  # torch's own functions know tangents
        return (cpu if plain else cuda)(*args)

    name = overload.name().split("::")[1]
    library.impl(name, run, "Autograd", with_keyset=True)
    library.impl(name, cpu, "CPU")
    library.impl(name, cuda, "CUDA")


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """The device of x as the current one; entering what is current already costs nothing."""
    return _SAME if x.get_device() == current_device() else torch.cuda.device(x.device)
