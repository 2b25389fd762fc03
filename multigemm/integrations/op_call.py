"""What runs when the torch operator is called on real tensors.

An eager call should cost little more on the host than a launch. In a loop, calls meet the same memory again and
again, and on a GPU what was bound for it is kept: such a call looks itself up by address, allocates, launches. Any
other call takes its route: see op_route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multigemm.cuda.device import capturing
from multigemm.errors import InvalidProblem
from multigemm.integrations import bound_calls, op_route
from multigemm.integrations.eager import any_requires_grad, current_device, grad_enabled
from multigemm.select import table as tuning

KEEPING = ("cuda",)
"""Where launches are kept for the next call: on a CPU binding is cheap, and its workspaces cannot be told."""
launches = bound_calls.Launches()
_known = launches.kept
_empty = torch.empty_strided
# compiled graphs allocate by this one, on the current device and in half the time
empty_cuda: Any = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
capturing_now: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing


def _memory(x: Tensor) -> Any:
    return (x.data_ptr(), x.dtype, x.shape, x.stride())


def _asked(options: dict[str, Any]) -> Any:
    """Keywords as a key; a backend's name alone, which is what is usually given, stands for itself."""
    if not options:
        return None
    return (options.get("backend") if len(options) == 1 else None) or tuple(options.items())


def key_of(tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a call is kept by; no device: an address belongs to one."""
    a, b, offsets, sizes, ends, valid_rows, c, bias = tensors
    if ends is not None and offsets is sizes is valid_rows is c is None:  # what layers call, written out
        return (
            a.data_ptr(), a.dtype, a.shape, a.stride(), b.data_ptr(), b.dtype, b.shape, b.stride(),
            ends.data_ptr(), ends.dtype, ends.shape, ends.stride(), bias is None or _memory(bias),
            _asked(options), tuning.generation,
        )  # fmt: skip
    return (*(x is None or _memory(x) for x in tensors), _asked(options), tuning.generation)


def entry(special: int, general: Callable[..., Any]) -> Callable[..., Tensor]:
    """The operator on real tensors, as a kernel of torch's dispatcher.

    `special` holds the dispatch keys, as bits, that have work to do below autograd. With one of them, or where
    gradients are wanted, the call goes to `general`, torch's own way.
    """

    def run(
        keyset: Any, a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None,
        ends: Tensor | None = None, valid_rows: Tensor | None = None, c: Tensor | None = None,
        bias: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if special and (keyset.raw_repr() & special or (grad_enabled() and any_requires_grad(a, b, c, bias))):
            return general(keyset, a, b, offsets, sizes, ends, valid_rows, c, bias, **options)  # type: ignore[no-any-return]
        if a is None or b is None:  # torch lets it through
            raise InvalidProblem("a or b is None; both must be tensors")
        tensors = (a, b, offsets, sizes, ends, valid_rows, c, bias)
        if forward_ad._current_level >= 0:  # tangents, which no key tells
            return op_route.whole_way(tensors, options)[0]
        key = key_of(tensors, options)
        known = _known.get(key)
        return _by_route(key, tensors, options) if known is None else _again(key, *known, tensors)

    return run


def _again(key: Any, route: op_route.Route, made: dict[Any, Any], tensors: tuple[Any, ...]) -> Tensor:
    """A call whose operands were seen at these addresses."""
    index = route.index
    if index == current_device():
        out: Tensor = empty_cuda(route.shape, route.strides, route.dtype)
    else:
        out = _empty(route.shape, route.strides, dtype=route.dtype, device=route.device)
    launch = made.get(out.data_ptr())
    if launch is None or (index >= 0 and capturing_now()):
        fresh(key, route, tensors, out)
        return out
    if route.checked:
        _check(route, tensors)
    launch()
    return out


def _by_route(key: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """A call whose operands were not seen at these addresses."""
    if tensors[3] is not None and summed(tensors, options):
        return _by_ends(tensors, options)
    route, out = op_route.find(tensors, options)
    if route is None:
        assert out is not None
        return out
    out = _empty(route.shape, route.strides, dtype=route.dtype, device=route.device)
    fresh(key, route, tensors, out)
    return out


def summed(tensors: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether sizes on a GPU may be summed up here: such a call went the whole way before, which does the same."""
    a, sizes = tensors[0], tensors[3]
    return a.device == sizes.device and a.device.type in KEEPING and op_route.met(tensors, options)


def ends_of(sizes: Tensor) -> Tensor:
    return torch.cumsum(sizes, 0, dtype=torch.int64)


def _by_ends(tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """A call with sizes as the one with ends that it is for a kernel."""
    a, b, _, sizes, _, _, c, bias = tensors
    tensors = (a, b, None, None, ends_of(sizes), None, c, bias)
    key = key_of(tensors, options)
    known = _known.get(key)
    return _by_route(key, tensors, options) if known is None else _again(key, *known, tensors)


def _check(route: op_route.Route, tensors: tuple[Any, ...]) -> None:
    op_route.check(route, tensors[2], tensors[4], tensors[5])


def fresh(key: Any, route: op_route.Route, tensors: tuple[Any, ...], out: Tensor) -> None:
    """Binds and launches; what is bound the second time at the same addresses is kept for the third.

    Addresses of empty tensors say nothing, and a graph may outlive whatever is kept.
    """
    if route.checked:
        _check(route, tensors)
    given = (*tensors[:3], *tensors[4:], out)  # sizes have no route
    lasting = route.device.type in KEEPING and all(x is None or x.numel() for x in given)
    at = out.data_ptr()
    if not lasting or capturing(route.device) or not launches.met(key, at):
        op_route.bind(route, *given)()
        return
    borrowed = [bound_calls.borrow(x) for x in given]
    launches.keep(key, route, at, lambda: op_route.bind(route, *borrowed))()


def forget() -> None:
    """Drops all routes and launches; for tests that change which backends exist."""
    op_route.forget()
    launches.clear()
