"""Plans a spec with a config: binds operands to library calls and runs them on the current stream.

A bound launch is a short list of steps, each of which enqueues work: refresh packed copies, write c into the result,
the library calls, the epilogue. Sizes on the device are read back if a call needs them, by `SizesLater`, which refuses
to run inside a CUDA graph. `Method` holds what a spec and a config decide; a bind looks at addresses and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backend import Bind, BindSizes, Launch, Recipe
from multigemm.backends.cublas import library, scaled_grouped_mm
from multigemm.backends.cublas.choice import apart_in_a_graph, choose, problem_with, why
from multigemm.backends.cublas.config import (
    Config,
    grouped_mm_reasons,
    grouped_reasons,
    plain,
    reads_sizes,
    result_type,
)
from multigemm.backends.cublas.epilogue import Finish, Need, without_products
from multigemm.backends.cublas.grouped_mm import bind_grouped_mm, ends_with_head
from multigemm.backends.cublas.host_sizes import bind_sizes
from multigemm.backends.cublas.library import Origins
from multigemm.backends.cublas.products import (
    Bytes,
    Ints,
    Products,
    clamped,
    list_products,
    packed_forms,
    packed_products,
)
from multigemm.backends.cublas.run import FEW_ZEROS, Calls, Steps, Streamed, Zeros
from multigemm.backends.cublas.staging import Copies, Side, expressible, scratch, stage, writable
from multigemm.cuda.arguments import OPERANDS
from multigemm.cuda.device import index_of
from multigemm.cuda.launch import Step
from multigemm.errors import BackendUnsupported, NotCapturable
from multigemm.planning.fused_steps import plan_in_steps, product_spec, taken_in_steps
from multigemm.planning.operands import Operands, group_table, packed
from multigemm.problem.spec import ProblemSpec

A, B, OUT = (OPERANDS.index(name) for name in ("a", "b", "out"))


@dataclass(frozen=True, slots=True)
class Method:
    """What a spec and a config decide for every problem.

    `grouped`, `grouped_mm`: the library's grouped call and torch's may be chosen; torch's takes sizes that only the
    device knows; `cut`: sizes cut the groups; `plain`: the library alone can finish the answer, given a result that it
    can write; `compute` is the library's compute type, `written` the type that it writes; `size` has the bytes of an
    element.
    """

    config: Config
    syncs: bool
    grouped: bool
    grouped_mm: bool
    cut: bool
    plain: bool
    compute: int
    written: torch.dtype
    size: Bytes


def method(spec: ProblemSpec, config: Config, device: torch.device) -> Method:
    """Makes the `Method` for all problems of the spec."""
    auto, written = config.variant == "auto", result_type(spec)
    grouped = auto and not grouped_reasons(spec)
    grouped_mm = config.variant == "grouped_mm" or (auto and not grouped_mm_reasons(spec, device))
    size = Bytes(spec.compute.itemsize, written.itemsize)
    cut = spec.jagged is not None or spec.form == "masked"
    syncs, compute = not grouped_mm and reads_sizes(spec, config.variant), library.compute_type(spec)
    return Method(config, syncs, grouped, grouped_mm, cut, plain(spec), compute, written, size)


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """A recipe for every problem of the spec. Raises BackendUnsupported for a config that cannot run it."""
    if taken_in_steps(spec):
        return plan_in_steps(spec, plan(product_spec(spec), config, device), index_of(device))
    if problem := problem_with(config, spec, device):
        raise BackendUnsupported({f"cublas ({config.variant})": [problem]})
    if spec.quantised:
        return scaled_grouped_mm.plan(config)
    how = method(spec, config, device)
    tell = partial(_tell, how=how) if config.variant == "auto" else None
    said = why(spec, config, how.syncs, how.grouped_mm)
    bind = partial(_bind, how=how)
    return Recipe(f"cublas.{config.variant}", config, bind, said, how.syncs, tell, for_sizes(how, bind))


def for_sizes(how: Method, bind: Bind) -> BindSizes | None:
    """What makes launches of any sizes on the host; None where an epilogue follows."""
    flags = how.grouped, how.grouped_mm
    made = partial(bind_sizes, config=how.config, flags=flags, size=how.size, compute=how.compute, bind=bind)
    return made if how.plain else None


def _tell(ops: Operands, how: Method) -> str:
    """The variant that the sizes lead to, as text."""
    if how.syncs and ops.host_offsets is None and ops.host_valid_rows is None:
        return "the variant is chosen at each launch, by the sizes that it reads"
    nothing = not isinstance(ops.a, list) and not isinstance(ops.b, list) and not (ops.a.numel() and ops.b.numel())
    if ops.device.type != "cuda" or ops.spec.alpha == "zero" or nothing:
        return "nothing to multiply"
    offsets, valid = ops.host_offsets, ops.host_valid_rows
    if how.grouped_mm and offsets is None:
        return "bound: grouped_mm, with the sizes on the device"
    a, b, out = (expressible(x) for x in (ops.a, ops.b, ops.out))
    products = _products(replace(ops, a=a, b=b, out=out), how, offsets, valid)
    return f"bound: {choose(ops.spec, products, how.grouped, how.grouped_mm)} for {len(products)} products"


def _bind(ops: Operands, how: Method) -> Launch:
    if how.syncs and ops.host_offsets is None and ops.host_valid_rows is None:
        return SizesLater(ops, how)
    if torch_internals.current_device() != (ops.device.index or 0):
        with torch.cuda.device(ops.device):
            return _bind(ops, how)
    return bound(ops, how, ops.host_offsets, ops.host_valid_rows)


class SizesLater:
    """Reads the sizes at every launch, then binds and runs, for calls that take sizes from the host."""

    __slots__ = ("_how", "_ops")

    def __init__(self, ops: Operands, how: Method) -> None:
        self._ops, self._how = ops, how

    def __call__(self) -> None:
        ops = self._ops
        with torch.cuda.device(ops.device):
            if torch.cuda.is_current_stream_capturing():
                raise NotCapturable(
                    f"cublas variant {self._how.config.variant!r} reads the group sizes back from the device at each "
                    "launch: give the sizes on the host, or use a backend that reads them on the device"
                )
            bound(ops, self._how, *fetched(ops))()


def fetched(ops: Operands) -> tuple[Ints | None, Ints | None]:
    """Offsets or valid rows, read back from the device."""
    if ops.spec.form == "masked":
        return None, cast(Tensor, ops.valid_rows).to("cpu", torch.int64).numpy()
    read = ends_with_head(ops).to("cpu", torch.int64).numpy()
    return read if ops.head else np.concatenate([np.zeros(1, np.int64), read]), None


def bound(ops: Operands, how: Method, offsets: Ints | None, valid: Ints | None) -> Launch:
    """The bound launch, on the current device. `offsets` and `valid` are on the host; both None if only the device
    knows them, or nothing is cut."""
    spec, a, b = ops.spec, ops.a, ops.b
    if spec.alpha == "zero" or not (isinstance(a, list) or isinstance(b, list) or (a.numel() and b.numel())):
        return without_products(ops)
    if how.grouped_mm and (offsets is None or how.config.variant == "grouped_mm"):
        return bind_grouped_mm(ops, offsets)
    return _general(ops, how, offsets, valid)


def _general(ops: Operands, how: Method, offsets: Ints | None, valid: Ints | None) -> Launch:
    spec, config = ops.spec, how.config
    unknown = how.cut and offsets is None and valid is None  # so the library writes what no group owns, too
    products, target, steps = _laid_out(ops, how, offsets, valid, how.plain and (spec.zero_unowned or not unknown))
    if config.variant == "auto":
        config = choose(spec, products, how.grouped, how.grouped_mm)
        if config.variant == "grouped_mm":
            return bind_grouped_mm(ops, offsets)
    direct = target is ops.out
    if direct and (ops.bias is not None or ops.c is not None) and (laid := _laid(ops, unknown)):
        steps.append(laid)
    alpha, beta, after = _scalars(ops, how, direct)
    if products.shapes:
        steps.append(_calls(ops, how, config, products, (alpha, beta), _origins(products, direct)))
    unowned = spec.zero_unowned and (unknown or _has_unowned(ops, offsets, valid))
    if not direct:
        steps.append(Finish(after, Need(acc=target, unowned=unowned)))
    elif last := _last(ops, offsets, unowned, unknown):
        steps.append(last)
    return Steps(ops.device, steps, [] if direct else target if isinstance(target, list) else [target])


def _origins(products: Products, direct: bool) -> Origins | None:
    """The addresses of the packed operands, which calls follow; None if one was copied."""
    if products.bases is None:
        return None
    operands = (*((B, A) if products.by_rows else (A, B)), OUT if direct else -1)
    first, second, out = zip(operands, products.bases, strict=True)
    return first, second, out


def _laid_out(
    ops: Operands, how: Method, offsets: Ints | None, valid: Ints | None, in_place: bool
) -> tuple[Products, Side, list[Step]]:
    """The products as the library reads and writes them, the memory it writes into, and the step that refreshes
    copies."""
    if in_place and (given := _as_given(ops, how, offsets, valid)) is not None:
        return given, ops.out, []
    copies, target = Copies(), ops.out
    a, b = stage(ops, copies)
    if not (in_place and writable(target)):
        target = scratch(target, how.written, rows=not how.plain)
    products = _products(replace(ops, a=a, b=b, out=target), how, offsets, valid)
    return products, target, [copies] if copies.pairs else []


def _as_given(ops: Operands, how: Method, offsets: Ints | None, valid: Ints | None) -> Products | None:
    """The products of packed operands that the library can read and write in place; None if it cannot."""
    if ops.spec.form == "per_group" or ops.spec.compute is torch.int8:
        return None
    p = packed(ops)
    forms = packed_forms(p, how.size)
    return None if None in forms else packed_products(p, how.size, offsets, valid, forms)


def _scalars(ops: Operands, how: Method, direct: bool) -> tuple[float, float, Operands]:
    """alpha and beta of the library's calls, and the operands with the factors that the epilogue applies.

    A 16-bit result in scratch memory is already rounded, so the library applies alpha; otherwise the step that rounds
    does.
    """
    if direct:
        return ops.alpha, 1.0 if ops.bias is not None else ops.beta if ops.c is not None else 0.0, ops
    if how.plain and ops.spec.out.dtype is not ops.spec.acc:
        return ops.alpha, 0.0, replace(ops, alpha=1.0)
    return 1.0, 0.0, ops


def _laid(ops: Operands, unknown: bool) -> Step | None:
    """Writes into the result what the library is to add: c, or a bias. With a bias it also writes the zeros that
    `_last` would."""
    if ops.bias is not None:
        return Finish(ops, Need(unowned=ops.spec.zero_unowned and not unknown))
    if ops.c is None or _same(ops.c, ops.out):
        return None
    return Finish(ops, Need(bare=True))


def _same(c: Side | None, out: Side) -> bool:
    pairs = zip(c, out, strict=True) if isinstance(c, list) else ((cast(Tensor, c), cast(Tensor, out)),)
    return all(x.data_ptr() == y.data_ptr() and x.stride() == y.stride() for x, y in pairs)


def _products(ops: Operands, how: Method, offsets: Ints | None, valid: Ints | None) -> Products:
    """The products of operands that the library can read and write in place."""
    if ops.spec.form == "per_group":
        return list_products(group_table(ops), how.size)
    p = packed(ops)
    return packed_products(p, how.size, offsets, valid, packed_forms(p, how.size))


def _calls(
    ops: Operands,
    how: Method,
    config: Config,
    products: Products,
    scalars: tuple[float, float],
    origins: Origins | None,
) -> Step:
    """The library calls, which follow their operands from `origins` on (None: they do not move)."""
    blas = library.cublas()
    types = library.types(ops.spec.compute, how.compute, how.written, *scalars)
    captured = None
    if config.variant == "grouped":
        batch = library.one_for_all(blas, products, types, ops.device)
        if how.config.variant == "auto" and apart_in_a_graph(ops.spec, products):
            captured = library.one_each(blas, products, types)
            captured.origins = origins
    elif config.variant == "batched" and ops.spec.compute is not torch.int8:
        batch = library.one_per_shape(blas, products, types, how.size, ops.device)
    else:
        batch = library.one_each(blas, products, types)
    batch.origins = origins
    if config.variant == "streams":
        shapes = [products.shapes[kind] for kind in products.kinds.tolist()]
        return Streamed(blas, batch, shapes, config.streams, ops.device)
    return Calls(blas, batch, captured)


def _last(ops: Operands, offsets: Ints | None, unowned: bool, unknown: bool) -> Step | None:
    """The zeros to write after a library that wrote into the result."""
    if ops.bias is not None:  # all but the unknown was written before the product
        return Finish(ops, Need(owned=False, unowned=True)) if unowned and unknown else None
    empty = _empty_results(ops, offsets) if ops.spec.form in ("per_group", "jagged_k") else []
    if empty and len(empty) <= FEW_ZEROS and ops.c is None and not unowned:
        return Zeros(empty, None if isinstance(ops.out, list) else ops.out)
    return Finish(ops, Need(owned=bool(empty), only_empty=bool(empty), unowned=unowned)) if empty or unowned else None


def _has_unowned(ops: Operands, offsets: Ints | None, valid: Ints | None) -> bool:
    a: Any = ops.a
    b: Any = ops.b
    if valid is not None:
        return bool((valid < a.shape[-2]).any())
    if offsets is None or ops.spec.form == "jagged_k":
        return False
    extent = a.shape[0] if ops.spec.form == "jagged_m" else b.shape[-1]
    return bool(ops.spec.groups == 0 or offsets[0] > 0 or offsets[-1] < extent)


def _empty_results(ops: Operands, offsets: Ints | None) -> list[Tensor]:
    """The results of products with K = 0, which the library does not compute."""
    if ops.spec.form == "per_group":
        return [out.detach() for a, out in zip(ops.a, ops.out, strict=True) if a.shape[1] == 0 and out.numel()]
    if offsets is None:
        return []
    out, lengths = cast(Tensor, ops.out).detach(), clamped(offsets, cast(Tensor, ops.a).shape[-1])[1]
    return [out[g] for g in (lengths == 0).nonzero()[0].tolist()]
