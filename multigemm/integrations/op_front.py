"""What stands before torch's dispatcher: an eager call that was made before is launched without crossing it.

The dispatcher turns every argument into a value of its own and back into Python's, which takes longer than a launch.
Here a call is known by the addresses of its operands; torch's own guard then compares, in one foreign call, whatever
could make it another call: kinds of tensors, dispatch keys (with all modes and transforms that are in force), dtypes,
extents, strides. Only launches that `op_call` keeps are found. Everything else goes to the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multigemm.integrations import op_call
from multigemm.integrations.bound_calls import KEPT
from multigemm.integrations.eager import PLAIN, any_requires_grad, current_device, grad_enabled, lazy, watched
from multigemm.select import table as tuning

guards_of: Any = torch._C._dynamo.guards.TensorGuards
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_functions: Callable[[], int] = torch._C._len_torch_function_stack
_seen = op_call.launches.fronts


def _never(*_: Any) -> bool:
    return False


UNSEEN: Any = (_never, None, None, None, None)


def before(dispatcher: Callable[..., Any], defaults: dict[str, Any]) -> Callable[..., Any]:
    """`dispatcher`, the operator's way through torch, with the short way before it; each step in here is paid for."""

    def call(
        a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None, ends: Tensor | None = None,
        valid_rows: Tensor | None = None, c: Tensor | None = None, bias: Tensor | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        tensors, key = (a, b, offsets, sizes, ends, valid_rows, c, bias), None
        given = [x for x in tensors if x is not None]
        plain = PLAIN.issuperset(map(type, given)) and not _functions() and not _profiled()
        if plain and not (grad_enabled() and any_requires_grad(a, b, c, bias)):
            try:
                key = (
                    a.data_ptr(), a.shape, b.data_ptr(), offsets is None or offsets.data_ptr(),
                    sizes is None or sizes.data_ptr(), ends is None or ends.data_ptr(),
                    valid_rows is None or valid_rows.data_ptr(), c is None or c.data_ptr(),
                    bias is None or bias.data_ptr(), tuple(options.items()) if options else None,
                )  # fmt: skip
                same, generation, kept, route, made = _seen.get(key, UNSEEN)
            except (RuntimeError, TypeError, AttributeError):  # no memory under a transform, or no operand at all
                key, same = None, _never
            if same(*given) and generation == tuning.generation and forward_ad._current_level < 0:
                if route is None and sizes is not None:
                    return call(a, b, ends=op_call.ends_of(sizes), c=c, bias=bias, **options)
                if route.index == current_device():
                    out = op_call.empty_cuda(route.shape, route.strides, route.dtype)
                    launch = made.get(out.data_ptr())
                    if launch is None or op_call.capturing_now():
                        op_call.fresh(kept, route, tensors, out)
                    else:
                        launch()
                    return out
                key = None
        result = dispatcher(a, b, offsets, sizes, ends, valid_rows, c, bias, **options)
        if key is not None and a.device.type in op_call.KEEPING:
            spelled = {x: options[x] for x, default in defaults.items() if options.get(x, default) != default}
            _note(key, tensors, given, spelled)
        return result

    return call


def _note(key: Any, tensors: tuple[Any, ...], given: list[Tensor], options: dict[str, Any]) -> None:
    """Remembers the way of such a call, unless more than the result is wanted of this one."""
    way = _way(tensors, options)
    if way is None or watched(*given) or lazy(*given):
        return
    if len(_seen) >= KEPT:
        _seen.clear()
    same = guards_of(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    _seen[key] = (same, tuning.generation, *way)


def _way(tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What launches are kept by, their route, and they by their results; no route where sizes are summed up first."""
    if tensors[3] is not None:
        return (None, None, None) if op_call.summed(tensors, options) else None
    kept = op_call.key_of(tensors, options)
    route, made = op_call.launches.kept.get(kept, (None, None))
    return None if route is None or route.checked else (kept, route, made)


def stand_before(packet: Any, overload: Any, defaults: dict[str, Any]) -> None:
    """Lets calls of `packet`, which torch.ops hands out, come here first; `overload` stays torch's own."""
    packet._op = before(packet._op, defaults)
    torch.jit._builtins._register_builtin(packet._op, overload.name())  # torch.jit.script knows operators by identity
