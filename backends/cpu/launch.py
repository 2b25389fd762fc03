"""Plans and launches: reads the sizes, computes the products, applies the epilogue and stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.cpu.config import Config, invalid_reasons
from multigemm.backends.cpu.epilogue import finisher, is_plain
from multigemm.backends.cpu.fused import FusedLaunch, bare_fused
from multigemm.backends.cpu.groups import Sizes, bare, empty_products, is_inference, unowned
from multigemm.backends.cpu.loop import INT8_EXACT_K, bind_loop
from multigemm.backends.cpu.stacks import STEP, Call, ProductCalls, reads_into_next_row
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec

_MAGNITUDE, _INFINITY = 0x7FFF, 0x7F80


# --- few calls for all products ---------------------------------------------------------------------


def _as_list(operand: Any) -> list[Tensor]:
    return operand if isinstance(operand, list) else [operand]


def _product_dtype(ops: Operands, native: bool) -> torch.dtype:
    """The dtype to which the operands are widened exactly, because torch's product has its operands' dtype."""
    spec = ops.spec
    if native:
        return spec.compute
    if spec.compute == torch.int8:
        depth = max((x.shape[-1] for x in _as_list(ops.a)), default=0)
        return torch.float32 if depth <= INT8_EXACT_K else torch.float64
    return torch.float64 if spec.compute == torch.float64 else torch.float32


def _exact_float32() -> bool:
    """Whether torch's float32 products are exact float32: a global switch may turn them into bfloat16 ones."""
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul.fp32_precision in ("none", "ieee")


def _finite_heads(a: Tensor) -> bool:
    """Whether no row of A (a matrix or a stack) starts with an infinity or a NaN that the row before could read."""
    width = min(a.shape[-1], -a.shape[-1] % STEP)
    bits = a.view(torch.int16)[..., :width]
    return not bits.numel() or int((bits & _MAGNITUDE).max()) < _INFINITY


class ProductLaunch:
    """One bound problem as calls of torch's products, which are prepared once for given sizes.

    Steps of a launch: (1) read the sizes, and prepare the calls anew if they changed; (2) copy operands that have to be
    widened; (3) zero what no product will write; (4) the calls; (5) unless they wrote into `out`, the epilogue over
    whole operands. `slow` is the plain loop, for what (4) would get wrong: offsets that are not in order, float32
    products that a switch of torch has lowered, and rows of bfloat16 that meet.

    Rows meet because oneDNN reads a row-major A of bfloat16 in steps of 32 columns: where K is not a multiple of 32,
    the last step of a row reads on into the next row and multiplies that by zeros. An infinity or NaN at the start of
    a row then turns the row above into NaN. Nothing beyond the last row is read, and a column-major A is rearranged
    first. So where K asks for it, A is made contiguous if it is not, and the columns in question are looked through.
    """

    def __init__(self, ops: Operands, native: bool, slow: Launch) -> None:
        self._ops, self._slow, self._sizes = ops, slow, Sizes(ops)
        dtype = _product_dtype(ops, native)
        self._needs_exact_float32 = dtype == torch.float32
        direct = is_plain(ops.spec) and ops.spec.out.dtype == dtype
        target = ops.out if direct else self._accumulators(dtype)
        self._copies: list[tuple[Tensor, Tensor]] = []
        a: Any = ops.a
        b: Any = ops.b
        if ops.spec.alpha != "zero":
            a, b = self._widened(a, dtype), self._widened(b, dtype)
        self._rows: Tensor | None = None
        if native and ops.spec.form in ("jagged_n", "jagged_m", "masked", "batched"):
            if ops.spec.form == "jagged_n":
                self._rows = self._apart(b.t())
                b = self._rows.t()
            else:
                self._rows = a = self._apart(a)
        self._products = replace(ops, a=a, b=b, out=target)
        self._calls_of = ProductCalls(self._products)
        self._finish = None if direct else finisher(ops, target)
        self._calls: list[Call] = []
        self._zeros: list[Tensor] = []

    def _accumulators(self, dtype: torch.dtype) -> Any:
        made = [torch.empty(x.shape, dtype=dtype, device="cpu") for x in _as_list(self._ops.out)]
        return made if isinstance(self._ops.out, list) else made[0]

    def _widened(self, operand: Any, dtype: torch.dtype) -> Any:
        """The operand in `dtype`; a matrix that is in a list several times is copied once."""
        if isinstance(operand, list):
            places = [(x.data_ptr(), x.shape, x.stride()) for x in operand]
            given = dict(zip(places, operand, strict=True))
            copies = {place: self._widened(x, dtype) for place, x in given.items()}
            return [copies[place] for place in places]
        if operand.dtype == dtype:
            return operand
        return self._copy_of(operand, dtype)

    def _copy_of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        work = torch.empty(x.shape, dtype=dtype, device="cpu")
        self._copies.append((work, x))
        return work

    def _apart(self, a: Tensor) -> Tensor:
        """A in a layout in which a product reads nothing but rows of A."""
        apart = not reads_into_next_row(a) or a.is_contiguous() or a.stride(-2) == 1
        return a if apart else self._copy_of(a, a.dtype)

    def _rows_meet(self) -> bool:
        if self._rows is None or not reads_into_next_row(self._rows):
            return False
        if self._ops.spec.jagged:
            lo, hi = self._sizes.owned
        else:
            end = self._sizes.end
            lo, hi = 0, self._rows.shape[1] if end is None else int(end.max(initial=0))
        return not _finite_heads(self._rows[..., lo:hi, :])

    def _prepare(self) -> None:
        start, end = self._sizes.start, self._sizes.end
        if self._ops.spec.alpha == "zero":
            self._zeros = list(_as_list(self._products.out))
        else:
            self._calls = self._calls_of.make(start, end)
            self._zeros = empty_products(self._products, start, end)
        if self._ops.spec.zero_unowned:
            self._zeros += unowned(self._ops, start, end)

    def __call__(self) -> None:
        if self._sizes.changed() and not self._sizes.lie:
            self._prepare()
        if self._sizes.lie or (self._needs_exact_float32 and not _exact_float32()):
            self._slow()
            return
        for work, operand in self._copies:
            work.copy_(operand)
        if self._rows_meet():
            self._slow()
            return
        for part in self._zeros:
            part.zero_()
        with np.errstate(all="ignore"):
            for call in self._calls:
                call()
        if self._finish is not None:
            self._finish(self._sizes)


# --- recipes ----------------------------------------------------------------------------------------


def _guarded(bind: Callable[[Operands], Launch], ops: Operands) -> Launch:
    """A launch that records no gradients and may write tensors made in inference mode."""
    ops = replace(ops, a=bare(ops.a), b=bare(ops.b), out=bare(ops.out), c=bare(ops.c), bias=bare(ops.bias))
    if ops.fused is not None:
        ops.fused = bare_fused(ops.fused)
    run = bind(ops)
    if not is_inference(ops):
        return run

    def launch() -> None:
        with torch.inference_mode():
            run()

    return launch


def plan(spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
    """The recipe of one config; nothing is compiled."""
    if not isinstance(config, Config):
        raise InvalidSetting(f"the cpu backend takes its own Config, not {type(config).__name__}")
    if reasons := invalid_reasons(config, spec):
        raise InvalidSetting(f"{config}: {'; '.join(reasons)}")

    def bind_products(ops: Operands) -> Launch:
        loop = bind_loop(ops, config.kernel == "ordered")
        one_by_one = config.kernel in ("loop", "ordered")
        return loop if one_by_one else ProductLaunch(ops, config.kernel == "bmm", loop)

    def bind_fused(ops: Operands) -> Launch:
        return FusedLaunch(ops, bind_products, config.kernel == "ordered")

    bind = bind_products if spec.fused is None else bind_fused
    why = ["batch invariant: one accumulator, ascending k"] if spec.batch_invariant else []
    if spec.fused is not None and spec.fused.scatters:
        why.append("rows stay in the accumulator's precision until they are summed, in order")
    return Recipe(kernel=config.kernel, config=config, bind=lambda ops: _guarded(bind, ops), why="; ".join(why))
