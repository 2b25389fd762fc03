"""spec + config -> Recipe: binds operands to library calls and runs them on the current stream.

A bound launch is a short list of steps, each of which enqueues work: refresh packed copies, lay c
under the result, the library calls, the epilogue. Sizes that only the device knows are read back
where a call needs them, by `SizesLater`, which refuses to run inside a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.cublas import calls as library_calls
from multigemm.backends.cublas.choose import apart_in_a_graph, choose, fused_calls, pays_to_fuse
from multigemm.backends.cublas.config import (
    FUSED,
    Config,
    fused_reasons,
    grouped_mm_reasons,
    plain,
    reads_sizes,
    result_type,
    variant_reasons,
    whole,
    why,
)
from multigemm.backends.cublas.direct import bind_grouped_mm
from multigemm.backends.cublas.epilogue import Need, finish
from multigemm.backends.cublas.library import Cublas, cublas
from multigemm.backends.cublas.lt import fused
from multigemm.backends.cublas.products import Bytes, Ints, Product, cut, list_products, packed_products
from multigemm.backends.cublas.run import Calls, Steps, Streamed, Zeros
from multigemm.backends.cublas.staging import Copies, Side, expressible, scratch, stage, stage_bias, writable
from multigemm.cuda.nvrtc import Step
from multigemm.errors import BackendUnsupported, NotCapturable
from multigemm.planning.operands import Operands, group_table, packed
from multigemm.problem.spec import ProblemSpec

FEW_ZEROS = 8
"""Results that are worth a fill each; more of them are left to one launch of the epilogue."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the host knows of the groups: both None where only the device knows, or nothing is cut."""

    offsets: Ints | None
    valid: Ints | None


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """A recipe for every problem of the spec; raises BackendUnsupported for a config that cannot run it."""
    reasons = variant_reasons(config, spec, device)
    if reasons:
        raise BackendUnsupported({f"cublas ({config.variant})": reasons})
    syncs = reads_sizes(spec, config.variant, device)
    bind = partial(_bind, config=config, syncs=syncs)
    tell = partial(_tell, config=config, syncs=syncs) if config.variant == "auto" else None
    return Recipe(f"cublas.{config.variant}", config, bind, why(spec, config, syncs), syncs, tell)


def _tell(ops: Operands, config: Config, syncs: bool) -> str:
    """Which variant the sizes lead to."""
    if syncs and _missing(ops):
        return "the variant is chosen at each launch, by the sizes that it reads"
    if ops.device.type != "cuda" or ops.spec.alpha == "zero" or _nothing(ops):
        return "nothing to multiply"
    sizes = Sizes(ops.host_offsets, ops.host_valid_rows)
    if _sizes_stay(ops, config, sizes):
        return "bound: grouped_mm, with the sizes on the device"
    a, b, out = (expressible(x) for x in (ops.a, ops.b, ops.out))
    products = _products(replace(ops, a=a, b=b, out=out, c=None, bias=None), sizes)
    fuses = _fuses(ops, config, sizes)
    chosen = FUSED if fuses else choose(ops.spec, products, ops.device, _written(ops, sizes))
    return f"bound: {chosen} for {len(products)} products"


def _bind(ops: Operands, config: Config, syncs: bool) -> Launch:
    if syncs and _missing(ops):
        return SizesLater(ops, config)
    if ops.device.type != "cuda":
        return _no_groups  # an empty list has no operands, hence no device
    with torch.cuda.device(ops.device):
        return _bound(ops, config, Sizes(ops.host_offsets, ops.host_valid_rows))


def _missing(ops: Operands) -> bool:
    """Whether the host does not know the sizes."""
    return bool(ops.spec.jagged and ops.host_offsets is None) or (
        ops.spec.form == "masked" and ops.host_valid_rows is None
    )


def _sizes_stay(ops: Operands, config: Config, sizes: Sizes) -> bool:
    """Whether grouped_mm can take sizes that only the device knows."""
    return config.variant == "auto" and sizes.offsets is None and not grouped_mm_reasons(ops.spec, ops.device)


def _no_groups() -> None:
    """Nothing to multiply, and nothing to write."""


class SizesLater:
    """Reads the sizes at every launch, then binds and runs: for calls that take them from the host."""

    __slots__ = ("_config", "_ops")

    def __init__(self, ops: Operands, config: Config) -> None:
        self._ops, self._config = ops, config

    def __call__(self) -> None:
        ops = self._ops
        with torch.cuda.device(ops.device):
            if torch.cuda.is_current_stream_capturing():
                raise NotCapturable(
                    f"cublas variant {self._config.variant!r} reads the group sizes back from the device at each "
                    "launch: give the sizes on the host, or use a backend that reads them on the device"
                )
            _bound(ops, self._config, _fetched(ops))()


def _fetched(ops: Operands) -> Sizes:
    if ops.spec.form == "masked":
        return Sizes(None, cast(Tensor, ops.valid_rows).to("cpu", torch.int64).numpy())
    ends = cast(Tensor, ops.ends)
    if ops.head:
        ends = ends.as_strided((ops.spec.groups + 1,), (1,), ends.storage_offset() - 1)
    read = ends.to("cpu", torch.int64).numpy()
    return Sizes(read if ops.head else np.concatenate([np.zeros(1, np.int64), read]), None)


def _bound(ops: Operands, config: Config, sizes: Sizes) -> Steps:
    spec = ops.spec
    if spec.alpha == "zero" or _nothing(ops):
        return Steps(ops, [finish(ops, Need(unowned=spec.zero_unowned))])
    if config.variant == "grouped_mm":
        return bind_grouped_mm(ops, sizes.offsets)
    if _sizes_stay(ops, config, sizes):
        return bind_grouped_mm(ops, None)
    return _general(ops, config, sizes)


def _nothing(ops: Operands) -> bool:
    """Whether no group can have a product: some extent is 0 for all of them."""
    if ops.spec.form == "per_group":
        return False
    a, b = cast(Tensor, ops.a), cast(Tensor, ops.b)
    return 0 in (*a.shape, *b.shape)


def _partly_owned(ops: Operands, sizes: Sizes) -> bool:
    """Whether the library will write elements that no group owns, because the host does not know them."""
    spec = ops.spec
    return (spec.form == "masked" and sizes.valid is None) or (spec.jagged is not None and sizes.offsets is None)


def _direct(ops: Operands, sizes: Sizes) -> bool:
    """Whether the library may write into the result itself."""
    return plain(ops.spec) and writable(ops.out) and (ops.spec.zero_unowned or not _partly_owned(ops, sizes))


def _written(ops: Operands, sizes: Sizes) -> torch.dtype:
    """What the library writes: the result, or an intermediate one."""
    return result_type(ops.spec) if _direct(ops, sizes) else ops.spec.acc


def _general(ops: Operands, config: Config, sizes: Sizes) -> Steps:
    spec, copies, fuses = ops.spec, Copies(), _fuses(ops, config, sizes)
    a, b = stage(ops, copies)
    direct, written = fuses or _direct(ops, sizes), spec.out.dtype if fuses else _written(ops, sizes)
    target = ops.out if direct else scratch(ops.out, spec.acc)
    bias = stage_bias(ops, copies) if fuses else None
    products = _products(replace(ops, a=a, b=b, out=target, c=None, bias=bias), sizes)
    chosen = config if config.variant != "auto" else FUSED if fuses else choose(spec, products, ops.device, written)
    if chosen.variant == "grouped_mm":
        return bind_grouped_mm(ops, sizes.offsets)
    steps: list[Step] = [copies] if copies.pairs else []
    if direct and not fuses and (laid := _laid(ops, sizes)):
        steps.append(laid)
    if products:
        beta = 0.0 if fuses else 1.0 if ops.bias is not None else ops.beta if ops.c is not None else 0.0
        scalars = (ops.alpha, beta) if direct else (1.0, 0.0)
        steps.append(_calls(ops, chosen, products, written, scalars, config.variant == "auto"))
    last = _last(ops, sizes, None if direct else target, _partly_owned(ops, sizes), direct and not fuses)
    return Steps(ops, [*steps, last] if last else steps, (a, b, target, bias))


def _fuses(ops: Operands, config: Config, sizes: Sizes) -> bool:
    """Whether the library itself adds the bias and applies relu. Groups of one weight stay one product."""
    if config.variant != "auto":
        return config.variant == "fused"
    apart = whole(ops.spec) and isinstance(ops.bias, Tensor) and ops.bias.dim() > 1  # not of one bias
    if apart or fused_reasons(ops.spec) or _partly_owned(ops, sizes):
        return False
    lengths = None if whole(ops.spec) else sizes.valid if sizes.offsets is None else np.diff(sizes.offsets)
    calls = fused_calls(lengths, ops.spec.groups if isinstance(ops.out, list) else 1)
    return pays_to_fuse(calls)


def _laid(ops: Operands, sizes: Sizes) -> Step | None:
    """Puts what the library is to add into the result: c, or a bias and at once all that `_last` would write."""
    if ops.bias is not None:
        return finish(ops, Need(unowned=ops.spec.zero_unowned and not _partly_owned(ops, sizes)))
    if ops.c is None or _same(ops.c, ops.out):
        return None
    return finish(ops, Need(bare=True))


def _same(c: Side | None, out: Side) -> bool:
    pairs = zip(c, out, strict=True) if isinstance(c, list) else ((cast(Tensor, c), cast(Tensor, out)),)
    return all(x.data_ptr() == y.data_ptr() and x.stride() == y.stride() for x, y in pairs)


def _products(ops: Operands, sizes: Sizes) -> list[Product]:
    if ops.spec.form == "per_group":
        return list_products(group_table(ops))
    p, offsets = packed(ops), sizes.offsets
    if p.jagged is not None and offsets is None:
        p = replace(p, groups=1)
        offsets = np.array([0, p.m if p.jagged == "m" else p.n if p.jagged == "n" else p.k], dtype=np.int64)
    a, out = cast(Tensor, ops.a), cast(Tensor, ops.out)
    return packed_products(p, Bytes(a.element_size(), out.element_size()), offsets, sizes.valid)


def _calls(
    ops: Operands, config: Config, products: list[Product], dtype: torch.dtype, scalars: tuple[float, float], free: bool
) -> Step:
    """The library calls; `free` where the config was chosen here, and a graph may hold others."""
    library: Cublas = cublas()
    types = library_calls.types(ops.spec, dtype, *scalars)
    if config.variant == "fused":
        batch, work = fused(library, products, types, dtype.itemsize, ops.spec.activation == "relu", ops.device)
        return Calls(library, batch) if len(work) == 1 else Streamed(library, batch, work, config.streams, ops.device)
    if config.variant == "grouped":
        apart = free and apart_in_a_graph(ops.spec, [p.shape for p in products])
        captured = library_calls.one_each(library, products, types) if apart else None
        return Calls(library, library_calls.one_for_all(library, products, types, ops.device), captured)
    if config.variant == "batched" and ops.spec.compute is not torch.int8:
        size = ops.spec.compute.itemsize, dtype.itemsize
        return Calls(library, library_calls.one_per_shape(library, products, types, size, ops.device))
    batch = library_calls.one_each(library, products, types)
    if config.variant == "streams":
        return Streamed(library, batch, [p.shape for p in products], config.streams, ops.device)
    return Calls(library, batch)


def _last(ops: Operands, sizes: Sizes, acc: Side | None, unknown: bool, laid: bool) -> Step | None:
    spec = ops.spec
    unowned = spec.zero_unowned and (unknown or _has_unowned(ops, sizes))
    if acc is not None:
        return finish(ops, Need(acc=acc, unowned=unowned))
    if laid and ops.bias is not None:  # all but the unknown was written before the product
        return finish(ops, Need(owned=False, unowned=True)) if unowned and unknown else None
    empty = _empty_results(ops, sizes)
    if empty and len(empty) <= FEW_ZEROS and ops.c is None and ops.bias is None and not unowned:
        return Zeros(empty)
    return finish(ops, Need(owned=bool(empty), only_empty=bool(empty), unowned=unowned)) if empty or unowned else None


def _has_unowned(ops: Operands, sizes: Sizes) -> bool:
    if sizes.valid is not None:
        return bool((sizes.valid < cast(Tensor, ops.a).shape[-2]).any())
    if ops.spec.jagged not in ("m", "n") or sizes.offsets is None:
        return False
    extent = cast(Tensor, ops.a).shape[0] if ops.spec.jagged == "m" else cast(Tensor, ops.b).shape[-1]
    return bool(ops.spec.groups == 0 or sizes.offsets[0] > 0 or sizes.offsets[-1] < extent)


def _empty_results(ops: Operands, sizes: Sizes) -> list[Tensor]:
    """The results of products with K = 0, which the library is never asked for."""
    if ops.spec.form == "per_group":
        return [out.detach() for a, out in zip(ops.a, ops.out, strict=True) if a.shape[1] == 0 and out.numel()]
    if ops.spec.jagged != "k" or sizes.offsets is None:
        return []
    starts, ends = cut(sizes.offsets, cast(Tensor, ops.a).shape[-1])
    out = cast(Tensor, ops.out).detach()
    return [out[g] for g in np.flatnonzero(starts == ends).tolist()]
