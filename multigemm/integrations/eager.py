"""Operators with gradients that cross torch's dispatcher once in an eager call without gradients.

An operator registered by torch's own functions crosses it twice through Python, once for autograd and once for the
kernel. For small operators on a few tokens that is most of a layer's time.
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
    """An operator's autograd kernel: `run(keyset, *args, **options)`, with all of `args`.

    `keep(ctx, args, options, output)` saves what `backward(ctx, grad)` needs; `backward` returns a gradient for each
    argument. torch.library.register_autograd reads the schema at each call, which takes as long as many launches.
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
    """Registers the kernels and the gradient of an operator without keywords."""
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
    """A context in which the device of x is current. Free if it already is."""
    return _SAME if x.get_device() == current_device() else torch.cuda.device(x.device)
