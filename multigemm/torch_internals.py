"""Every private name of torch that the package uses, from torch 2.11 to 2.13, each with a public replacement.

Each call of `grouped_gemm` asks torch a few questions, for which the public functions take up to twenty times as long
as the private ones. With a torch that lacks a private name the slower public function answers. No other file names
torch's internals.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])
_C: Any = torch._C


def _public_raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _public_any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _public_empty_cuda(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


def _no_wrapped(x: Tensor) -> bool:
    return False


def _unknown() -> int:
    return 1


def _guards() -> Any:
    return getattr(getattr(_C, "_dynamo", None), "guards", None)


current_raw_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _public_raw_stream)
"""The stream of a device on which work of this thread is enqueued, as the driver's handle."""
current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
"""The number of this thread's current device."""
is_capturing: Callable[[], bool] = getattr(_C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
"""Whether the current device's current stream records a CUDA graph."""
any_requires_grad: Callable[..., bool] = getattr(_C, "_any_requires_grad", _public_any_requires_grad)
"""Whether one of some tensors, which may be None, requires grad."""
empty_cuda: Callable[..., Tensor] = getattr(_guards(), "_empty_strided_cuda", _public_empty_cuda)
"""A new tensor (shape, strides, dtype) on the current device."""
is_functorch_wrapped: Callable[[Tensor], bool] = getattr(
    getattr(_C, "_functorch", None), "is_functorch_wrapped_tensor", _no_wrapped
)
"""Whether a tensor stands for another one under vmap, grad and the like."""
dispatch_modes: Callable[[], int] = getattr(_C, "_len_torch_dispatch_stack", _unknown)
"""How many modes stand between a call of torch and its kernels; where torch does not tell, it is taken as one."""
grad_enabled: Callable[[], bool] = torch.is_grad_enabled


blas_handle: Callable[[], int] = getattr(_C, "_cuda_getCurrentBlasHandle", torch.cuda.current_blas_handle)
"""torch's own cuBLAS handle for this thread's current device and stream."""

has_matrix_unit: Callable[[], bool] = getattr(torch.cpu, "_is_amx_tile_supported", bool)
"""Whether the processor multiplies tiles of bfloat16 (AMX)."""


def forward_mode() -> bool:
    """Whether forward-mode differentiation is active in this thread, so that tensors may carry tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0


# --- torch's dispatcher ------------------------------------------------------------------------------

_Keys: Any = _C.DispatchKeySet
_WITHOUT_KERNELS = _Keys(_C.DispatchKey.ADInplaceOrView) | _Keys(_C.DispatchKey.BackendSelect)
"""Dispatch keys for which custom operators have no kernel; the dispatcher skips them."""
_PLAIN_KEYS = _Keys(_C.DispatchKey.CPU) | _Keys(_C.DispatchKey.CUDA) | _WITHOUT_KERNELS
AFTER_AUTOGRAD: Any = _C._after_autograd_keyset
SPECIAL: int = AFTER_AUTOGRAD.raw_repr() & ~_PLAIN_KEYS.raw_repr()
"""Dispatch keys, as bits, that have work to do below autograd: a mode, a transform, a wrapper."""
below_autograd: Callable[[], Any] = _C._AutoDispatchBelowAutograd
"""A context in which operators do not record gradients."""
_AUTOCAST = _Keys(_C.DispatchKey.AutocastCPU) | _Keys(_C.DispatchKey.AutocastCUDA)
_any_autocast: Callable[[], bool] = getattr(
    _C, "_is_any_autocast_enabled", lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
)
_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)
_function_modes: Callable[[], int] = getattr(_C, "_len_torch_function_stack", _unknown)
_transforms: Callable[[], int] = getattr(_C, "_are_functorch_transforms_active", _unknown)
_traced: Callable[[], bool] = getattr(_C, "_is_tracing", lambda: _C._get_tracing_state() is not None)


def without_autocast() -> Any:
    """A context that switches autocast off."""
    return _C._ExcludeDispatchKeyGuard(_AUTOCAST)


def in_transform() -> bool:
    """Whether a mode, a transform (such as those of torch.func) or a trace of this thread has to see each operator
    call."""
    return bool(_transforms() or dispatch_modes() or _traced())


def is_watched() -> bool:
    """Whether something has to see each operator call: autocast or a profiler, besides what `in_transform` names."""
    return bool(_function_modes() or _any_autocast() or _profiled() or in_transform())


def take_calls(packet: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `torch.ops.x.y.__call__` by a function. Returns the original call through torch's dispatcher.

    The dispatcher takes 5 us to read 22 arguments, about as long as the rest of a warm call.
    """
    dispatched: Any = type(packet)
    packet.__class__ = type("TakenCalls", (dispatched,), {"__call__": staticmethod(call)})
    return partial(dispatched.__call__, packet)


def dispatch_keys(*tensors: Tensor | None) -> Any:
    """The dispatch keys of a call with these tensors. A kernel registered `with_keyset` would make every call
    slower."""
    keys = _C._dispatch_tls_local_include_set()
    for x in tensors:
        if x is not None:
            keys = keys | _C._dispatch_keys(x)
    return keys - _C._dispatch_tls_local_exclude_set() - _WITHOUT_KERNELS


def only_result_wanted(*tensors: Tensor | None) -> bool:
    """Whether a call needs only its result: no gradient, mode, transform, autocast or trace is active."""
    if grad_enabled() and any_requires_grad(*tensors):
        return False
    watched = _transforms() or dispatch_modes() or _traced() or _any_autocast() or _function_modes()
    return not watched and not forward_mode()


def _redispatched(name: str) -> tuple[Any, ...] | None:
    try:
        call = getattr(torch.ops.aten, name).default._handle.redispatch_boxed
        keys = _Keys(_C.DispatchKey.CUDA)
        return call, keys, _C._push_on_torch_dispatch_stack, _C._pop_torch_dispatch_stack
    except AttributeError:
        return None


redispatched_grouped_mm, redispatched_scaled_grouped_mm = map(_redispatched, ("_grouped_mm", "_scaled_grouped_mm"))
"""torch's grouped_mm and scaled_grouped_mm below autograd, their dispatch keys, what sets and ends a mode; None where a
name is missing. The public ways are functions of `torch.nn.functional`, whose results have to be copied."""


PAUSE_CYCLES = 10_000
"""5 us on an H200."""


def group_timeout(group: Any, device: torch.device) -> float:
    """The seconds after which a collective of a process group times out; torch's default if the group does not tell."""
    try:
        found: float = group._get_backend(device).options._timeout.total_seconds()
        return found
    except (AttributeError, RuntimeError):
        return 1800.0 if device.type == "cpu" else 600.0


def pause_stream(device: torch.device) -> None:
    """Keeps the current GPU stream busy for some microseconds, so that work waiting on another stream starts first."""
    if device.type == "cuda":
        torch.cuda._sleep(PAUSE_CYCLES)  # type: ignore[no-untyped-call]


# --- operators with gradients ------------------------------------------------------------------------
#
# An operator registered by torch's own functions crosses the dispatcher twice through Python in an eager call, once for
# autograd and once for the kernel. For small operators on a few tokens that is most of a layer's time. These cross it
# once if no gradients are wanted.

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


def register_differentiable(
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


# --- torch.compile -----------------------------------------------------------------------------------


UNTRACEABLE = (
    "it looks at addresses, which a graph has not: in a whole graph, use multigemm.grouped_gemm with packed tensors"
)


def no_dynamo(function: Function) -> Function:
    """Excludes a function, and everything that it calls, from tracing by torch.compile, at no cost per call.

    Problems, plans and the reference read addresses, call libraries by address and compute in NumPy. Dynamo would trace
    all of that, and either fail far from the caller's line or substitute its own NumPy. A call of a marked function
    breaks the graph. `torch.compiler.disable` does the same, but has to load Dynamo.
    """
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, UNTRACEABLE
    frames: Any = _C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def run_while_tracing(function: Function) -> Function:
    """Lets Dynamo call a function while tracing, and keep the returned value in the graph as a constant.

    `torch.compiler.assume_constant_result` does the same, but has to load Dynamo.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
