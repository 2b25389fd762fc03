"""Planted faults, and the hunt for them, to prove that the oracles can fail.

Each mutant is a correct model with one fault of a kind that real kernels have shipped with: a change of its source.
`kernel` is a tiled kernel for plain and quantised operands, `fused_kernel` takes fused problems. `hunt` draws
cases, runs every oracle on them, and reports the first oracle that finds the fault. A mutant that survives shows a gap
in the oracles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import getsource
from types import ModuleType
from typing import Any

import numpy as np
import torch

from multigemm.backend import Backend
from multigemm.reference.dtypes import round_once, ulp
from multigemm.reference.numpy_reference import activate
from multigemm.testing import relations
from multigemm.testing.case import Case
from multigemm.testing.deep_oracles import changed_sizes, lying_sizes, other_contents, run_oracles
from multigemm.testing.oracles import Outcome, check
from multigemm.testing.placed_case import DeviceCase, PlacedCase
from multigemm.testing.strategies import Limits, random_case
from multigemm.testing.subject import Subject
from tests.model_mutants import fused_kernel, kernel
from tests.model_mutants.kernel import Kernel, ModelBackend

HUNTING = Limits(work=1 << 14, groups=20, longest=80)
QUANTISED_HUNTING = Limits(work=1 << 15, groups=20, quantised=1)
FUSED_HUNTING = Limits(work=1 << 12, groups=8, longest=40, fused=1)


def _toward_zero(x: Any, dtype: torch.dtype) -> Any:
    near = round_once(x, dtype)
    if not dtype.is_floating_point:
        return near
    wide = near.astype(np.float64)
    with np.errstate(all="ignore"):
        over = np.abs(wide) > np.abs(x.astype(np.float64))
        return np.where(over, wide - np.sign(wide) * ulp(wide, dtype), wide).astype(near.dtype)


def _half_away(x: Any, dtype: torch.dtype) -> Any:
    if x.dtype.kind in "iu":
        return round_once(x, dtype)
    with np.errstate(all="ignore"):
        return round_once(x.astype(np.float64) * (1 + 2.0**-40), dtype)


def _through_bfloat16(x: Any, dtype: torch.dtype) -> Any:
    return round_once(x if x.dtype.kind in "iu" else round_once(x, torch.bfloat16).astype(np.float64), dtype)


def _through_float32(x: Any, dtype: torch.dtype) -> Any:
    twice = x.dtype == np.float64 and dtype.itemsize == 2
    return round_once(round_once(x, torch.float32).astype(np.float64) if twice else x, dtype)


def _saturating(x: Any, dtype: torch.dtype) -> Any:
    if x.dtype.kind in "iu":
        return round_once(np.clip(x, -(2**31) + 1, 2**31 - 2), dtype)
    return round_once(np.clip(x, -1e30, 1e30), dtype)


def _truncate_to_tf32(x: Any) -> Any:
    if x.dtype != np.float32:
        return x
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _round_to_bfloat16(x: Any) -> Any:
    return x if x.dtype.kind == "i" else round_once(x.astype(np.float64), torch.bfloat16).astype(x.dtype)


def _flush(x: Any) -> Any:
    return x if x.dtype.kind == "i" else np.where(np.abs(x) < 2.0**-12, 0, x).astype(x.dtype)


def _flush_results(x: Any, dtype: torch.dtype) -> Any:
    """Flushes subnormal 16-bit results to zero, as a kernel compiled with flush-to-zero does."""
    lost = dtype == torch.float16 and x.dtype.kind == "f"
    return round_once(np.where(np.abs(x) < 2.0**-14, 0, x).astype(x.dtype) if lost else x, dtype)


def _in_bits(x: Any, bits: int) -> Any:
    """float32 sums in an accumulator that keeps only this many bits."""
    if x.dtype != np.float32:
        return x
    kept = np.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)
    return (np.ascontiguousarray(x).view(np.uint32) & kept).view(x.dtype)


def _factor_bfloat16(x: float) -> float:
    return float(round_once(np.array([x]), torch.bfloat16)[0])


def _relu_without_nan(x: Any, name: str | None) -> Any:
    return np.fmax(x, 0).astype(x.dtype) if name == "relu" else activate(x, name)


def _other_gelu(x: Any, name: str | None) -> Any:
    return activate(x, {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(str(name), name))


_erf: Any = np.frompyfunc(math.erf, 1, 1)


def _gelu_cancels(x: Any, name: str | None) -> Any:
    """GELU by torch's formula, whose 1 + erf loses the tail of negative x."""
    if name != "gelu":
        return activate(x, name)
    return 0.5 * x * (1 + np.asarray(_erf(x * math.sqrt(0.5))).astype(x.dtype))


def _gelu_tanh_cancels(x: Any, name: str | None) -> Any:
    """GELU by 1 + tanh, which loses the tail of negative x."""
    if name != "gelu_tanh":
        return activate(x, name)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _zero_code(x: Any) -> Any:
    """Decodes code 0 of e8m0 as 0, as shifting it into the exponent does."""
    wide = x.astype(np.float32)
    return np.where(x.view(np.uint8) == 0, 0, wide).astype(np.float32) if x.dtype.itemsize == 1 else wide


Edit = tuple[str, str]
"""A piece of the model kernel's source, which stands there once, and what a fault makes of it."""


def _after(line: str, *more: str) -> Edit:
    """Inserts lines after a line, with the same indentation."""
    return line, "\n".join([line, *more])


def _before(line: str, more: str) -> Edit:
    return line, f"{more}\n{line}"


def _sum_as(change: str) -> Edit:
    """Replaces `acc + x @ y` by a sum in another accumulator."""
    own = "np.asarray(acc + x @ y, kind)"
    return own, change.format(own)


def _inputs_as(change: str) -> Edit:
    return "(v.astype(wide) for v in (x, y))", f"({change}(v.astype(wide)) for v in (x, y))"


def _rounded_by(function: str) -> Edit:
    return "result = round_once(", f"result = {function}("


def _activated_by(function: str) -> Edit:
    return "acc = activate(acc, ", f"acc = {function}(acc, "


def _extent(name: str, change: str) -> Edit:
    """Changes the extent of each group."""
    extent = f'extents["{name}"]'
    return _before('        if self.spec.alpha == "zero":', f"        {extent} = {change.format(extent)}")


def _group_of(operand: str, number: str) -> Edit:
    return f"self.matrix(ops.{operand}, g, ", f"self.matrix(ops.{operand}, {number}, "


def _strides_of(operand: str, strides: str) -> Edit:
    own = "tensor.stride(-2), tensor.stride(-1)"
    return f"row, col = {own}", f"row, col = ({strides}) if x is self.ops.{operand} else ({own})"


def _scale_block(block: str) -> Edit:
    own = "kk // q + (start // q + g.index if jagged_k else 0)"
    return own, block.format(own)


def _scale_group(number: str) -> Edit:
    return "group = g.index * grid.stride(0)", f"group = {number} * grid.stride(0)"


_SWAPPED, _CONTIGUOUS = "tensor.stride(-1), tensor.stride(-2)", "tensor.shape[-1], 1"
_NO_M_MASK = ("rows & cols, result", "(rows | True) & cols, result")
_NO_N_MASK = ("rows & cols, result", "rows & (cols | True), result")
_NO_K_MASK_A = ("rows[:, None] & inside[None, :])", "rows[:, None] & (kk == kk)[None, :])")
_NO_K_MASK_B = ("inside[:, None] & cols[None, :])", "(kk == kk)[:, None] & cols[None, :])")
_STARTS = "[first, *ends[:-1]] if ends"
_END, _WALK, _ALPHA = "min(max(e, s), total)", "for g, t in walk:", "kind(self.ops.alpha)"
_STEPS = "steps = -(-g.k // self.tile.bk)"
_IN_ORDER = "return self.sums_in_order(g, i, j, np.arange(g.k))"
_IN_PARTS = (
    "parts = np.array_split(np.arange(g.k), {})\n"
    "            return np.asarray(sum(self.sums_in_order(g, i, j, part) for part in parts))"
)

MUTANTS: dict[str, tuple[Edit, ...]] = {
    "K tail lost": ((_STEPS, "steps = max(-(-g.k // self.tile.bk) - 1, min(g.k, 1))"),),
    "last K step lost": ((_STEPS, "steps = max(-(-g.k // self.tile.bk) - 1, 0)"),),
    "one K step too many": ((_STEPS, f"{_STEPS} + 1"), _NO_K_MASK_A, _NO_K_MASK_B),
    "no K mask": (_NO_K_MASK_A, _NO_K_MASK_B),
    "no K mask on A": (_NO_K_MASK_A,),
    "no K mask on B": (_NO_K_MASK_B,),
    "no M mask on the store": (_NO_M_MASK,),
    "no N mask on the store": (_NO_N_MASK,),
    "no masks on the store": (("rows & cols, result", "rows | cols | True, result"),),
    "wrong group's B": (_group_of("b", "max(g - 1, 0)"),),
    "B of group 0 for all": (_group_of("b", "0"),),
    "wrong group's A": (_group_of("a", "min(g + 1, self.spec.groups - 1)"),),
    "wrong group's C": (_group_of("c", "max(g - 1, 0)"),),
    "results of two groups swapped": (_group_of("out", "g ^ 1 if g ^ 1 < self.spec.groups else g"),),
    "start one late": ((_STARTS, "[first, *(e + 1 for e in ends[:-1])] if ends"),),
    "start one early": ((_STARTS, "[first, *(e - 1 for e in ends[:-1])] if ends"),),
    "end one late": ((_END, "min(max(e + 1, s), total)"),),
    "end one early": ((_END, "min(max(e - 1, s), total)"),),
    "first offset ignored": ((_STARTS, "[0, *ends[:-1]] if ends"),),
    "offsets not clamped": (("min(max(s, 0), total)", "s"), (_END, "e")),
    "rows one short": (_extent("m", "max({} - 1, 0)"),),
    "columns one short": (_extent("n", "max({} - 1, 0)"),),
    "k one short": (_extent("k", "max({} - 1, 0)"),),
    "rows rounded up to 8": (_extent("m", "-(-{} // 8) * 8"),),
    "columns rounded up to 8": (_extent("n", "-(-{} // 8) * 8"),),
    "k rounded down to 8": (_extent("k", "({0} // 8 * 8 or {0})"),),
    "stale accumulator": (
        ("acc = np.zeros((self.tile.bm, self.tile.bn), self.acc_dtype())",
         "acc = vars(self).get('last', np.zeros((self.tile.bm, self.tile.bn), self.acc_dtype()))"),
        ("acc = self.products(g, i, j)", "acc = self.last = self.products(g, i, j)"),
    ),
    "a tile skipped": ((_WALK, "for g, t in walk[:-1] if len(walk) > 1 else walk:"),),
    "the first tile skipped": ((_WALK, "for g, t in walk[1:]:"),),
    "tiles numbered past their group": (
        (_WALK, "for g, t in [(g, t + (g > 0 == t and len(walk) > 2)) for g, t in walk]:"),
    ),
    "last group left out": ((_WALK, "for g, t in [(g, t) for g, t in walk if not 0 < g == len(groups) - 1]:"),),
    "indices wrap at 64": tuple(
        (f"{index} * tile.{side} + np.arange(tile.{side}", f"{index} * tile.{side} % 64 + np.arange(tile.{side}")
        for index, side in (("i = (t // across)", "bm"), ("j = (t % across)", "bn"))
    ),
    "strides of A swapped": (_strides_of("a", _SWAPPED),),
    "strides of B swapped": (_strides_of("b", _SWAPPED),),
    "strides of the result swapped": (_strides_of("out", _SWAPPED),),
    "strides of C swapped": (_strides_of("c", _SWAPPED),),
    "A taken for contiguous": (_strides_of("a", _CONTIGUOUS),),
    "B taken for contiguous": (_strides_of("b", _CONTIGUOUS),),
    "result taken for contiguous": (_strides_of("out", _CONTIGUOUS),),
    "C taken for contiguous": (_strides_of("c", _CONTIGUOUS),),
    "tile stored transposed": (("result.astype(", "(result.T if tile.bm == tile.bn else result).astype("),),
    "beta = 0 reads C": (("c = None if ops.c is None", "c = out if ops.c is None"),),
    "alpha forgotten": ((f"acc = acc * {_ALPHA}", "pass"),),
    "beta taken for 1": (("old * kind(self.ops.beta)", "old"),),
    "bias forgotten": (("acc = acc + bias", "pass"),),
    "bias scaled by alpha": (("acc = acc + bias", f"acc = acc + {_ALPHA} * bias"),),
    "activation before C and bias": (
        _before('            if self.spec.alpha == "any":', "            acc = activate(acc, self.spec.activation)"),
        ("acc = activate(acc, self.spec.activation)", "pass"),
    ),
    "activation forgotten": (("acc = activate(acc, self.spec.activation)", "pass"),),
    "rounded before the activation": (
        ("acc = activate(acc, ", "acc = activate(round_once(acc, self.spec.out.dtype).astype(kind), "),
    ),
    "group 0's bias for all": (("g * tensor.stride(0) if tensor.dim() == 2", "0 if tensor.dim() == 2"),),
    "one bias value for all columns": ((", 0, int(tensor.stride(-1)))", ", 0, 0)"),),
    "output rounded toward zero": (_rounded_by("_toward_zero"),),
    "ties rounded away": (_rounded_by("_half_away"),),
    "output through bfloat16": (_rounded_by("_through_bfloat16"),),
    "float64 rounded twice": (_rounded_by("_through_float32"),),
    "output saturates": (_rounded_by("_saturating"),),
    "bfloat16 accumulation": (_sum_as("round_once({}, torch.bfloat16).astype(kind)"),),
    "float16 accumulation": (_sum_as("round_once({}, torch.float16).astype(kind)"),),
    "float32 accumulation of float64": (_sum_as("round_once({}, torch.float32).astype(kind)"),),
    "halves of K rounded": (
        _after("            acc = self.step(acc, x, y)", "            if step == steps // 2:",
               "                acc = round_once(acc, self.spec.out.dtype).astype(acc.dtype)"),
    ),
    "tf32 for float32": (_inputs_as("_truncate_to_tf32"),),
    "inputs through bfloat16": (_inputs_as("_round_to_bfloat16"),),
    "small inputs flushed": (_inputs_as("_flush"),),
    "head rows not zeroed": (("lines[: starts[0] if starts else 0] = 0", "pass"),),
    "tail rows not zeroed": (("out[g, rows:] = 0", "pass"), ("lines[ends[-1] if ends else 0 :] = 0", "pass")),
    "the user's other rows zeroed": (("if self.spec.zero_unowned:", "if True:"),),
    "valid_rows ignored": (("return [0] * len(rows), rows", "return [0] * len(rows), [most] * len(rows)"),),
    "empty K leaves the result unwritten": (
        _after("        acc = self.products(g, i, j)", "        if g.k == 0:", "            return"),
    ),
    "NaN skipped": (_inputs_as("np.nan_to_num"),),
    "sizes read when bound": (
        _before("        self.flats = {", "        self.read = self.sizes()"),
        ("starts, ends = self.sizes()", "starts, ends = self.read"),
    ),
    "adds to the old result": (
        _before("        g.out.flat.store(", "        result += g.out.load(i, j, rows & cols).astype(result.dtype)"),
    ),
    "subnormal results flushed": (_rounded_by("_flush_results"),),
    "an accumulator of 22 bits": (_sum_as("_in_bits({}, 22)"),),
    "an accumulator of 17 bits": (_sum_as("_in_bits({}, 17)"),),
    "factors through bfloat16": (
        (_ALPHA, "kind(_factor_bfloat16(self.ops.alpha))"),
        ("kind(self.ops.beta)", "kind(_factor_bfloat16(self.ops.beta))"),
    ),
    "C through bfloat16": (("old * kind", "_round_to_bfloat16(old) * kind"),),
    "bias through bfloat16": (("acc = acc + bias", "acc = acc + _round_to_bfloat16(bias)"),),
    "integers saturate": (
        ("                acc = _wrapped(acc)", "                acc = np.clip(acc, -(2**31), 2**31 - 1)"),
    ),
    "integers through float32": (
        _before("        kind = acc.dtype", "        acc = np.float32(acc) if acc.dtype.kind == 'i' else acc"),
    ),
    "alpha = 0 multiplies": (('self.spec.alpha == "zero"', "False"), ('self.spec.alpha == "any"', "True")),
    "relu of NaN is 0": (_activated_by("_relu_without_nan"),),
    "gelu and gelu_tanh exchanged": (_activated_by("_other_gelu"),),
    "gelu by 1 + erf, which cancels": (_activated_by("_gelu_cancels"),),
    "gelu_tanh by 1 + tanh, which cancels": (_activated_by("_gelu_tanh_cancels"),),
    "writes beside an input": (
        _after("            self.run_tile(groups[g], t)", "        if groups:",
               "            groups[0].a.flat.data[groups[0].a.base - 1] = 0"),
    ),
    "another answer at the second call": (
        _after("        starts, ends = self.sizes()", "        self.calls = vars(self).get('calls', 0) + 1"),
        _sum_as("{} * kind(1 + 2**-7 * (self.calls % 2 == 0))"),
    ),
    "K in parts where rows are many": ((_IN_ORDER, _IN_PARTS.format("2 if g.m > 3 else 1")),),
    "K in parts where groups are few": ((_IN_ORDER, _IN_PARTS.format("3 if self.spec.groups < 3 else 1")),),
    "K backwards in odd tiles": (
        (_IN_ORDER, _IN_ORDER.replace("np.arange(g.k)", "np.arange(g.k)[:: -1 if i[0] // self.tile.bm % 2 else 1]")),
    ),
}  # fmt: skip
"""By name: the edits that plant the fault."""

QUANTISED_MUTANTS: dict[str, tuple[Edit, ...]] = {
    "blocks of a jagged K counted from its start": (_scale_block("(start + kk) // q + (g.index if jagged_k else 0)"),),
    "entry of the next group at a group's start": (_scale_block("{} + (kk < q)"),),
    "block index one short in the tail": (_scale_block("{} - ((kk // q == (g.k - 1) // q) & (g.k > q))"),),
    "scale of the group before": (_scale_group("max(g.index - 1, 0)"),),
    "scale of group 0 for all": (_scale_group("0"),),
    "scales of rows counted from the group's": (("(g.starts[direction] + i) // cover", "i // cover"),),
    "promotion lost": (_sum_as("_in_bits({}, 14)"),),
    "code 0 of e8m0 is zero": (("return stored.astype(np.float64)", "return _zero_code(stored).astype(np.float64)"),),
    "scales through bfloat16": (("return stored.astype", "return _round_to_bfloat16(stored).astype"),),
    "zero points added": (("y = y - self.scale_of", "y = y + self.scale_of"),),
    "high four bits first": (("high = kk % 2 == 1", "high = kk % 2 == 0"),),
}
"""Faults of kernels for quantised operands; they fall to cases within QUANTISED_HUNTING."""

_READ = "        row = s if index is None else int(index.values[s])"
_LIMIT = "    if gate.limit is not None:"
_BIAS = "            x = x + bias_of(ops, g, where, b.shape[1]).double()"
_ACT = "            y = (act(x, spec.activation, 1.0)"
_KEPT = "                rows |= {where.start + i: row for i, row in enumerate(y)}"
_ROW = "            s = int(index[r, j])"
_ABSENT = "            if s not in rows:\n                continue"
_TERM = "            total = total + weight * rows[s]"
FUSED_MUTANTS: dict[str, Edit] = {
    "index off by one": _after(_READ, "        row += index is not None"),
    "last row of a tile": (_READ, _READ.replace("values[s]", "values[s - ((s - lo) % 16 == 15)]")),
    "index of another group": (_READ, _READ.replace("values[s]", "values[s - lo]")),
    "index in 32 bits": _after(_READ, "        row = (row + 2**31) % 2**32 - 2**31"),
    "sentinel reads the first row": _after(_READ, "        row = max(row, 0)"),
    "index past the end reads the last row": _after(_READ, "        row = min(row, x.shape[axis] - 1)"),
    "gate and up exchanged": ("g, u = gate.split(x)", "u, g = gate.split(x)"),
    "halves for interleaved": ("gate.split(x)", 'gate._replace(layout="halves").split(x)'),
    "beta lost": ("(u + gate.beta)", "u"),
    "beta before the clamp": _before(_LIMIT, "    u, gate = u + gate.beta, gate._replace(beta=0)"),
    "alpha lost": ("act(g, gate.kind, gate.alpha)", "act(g, gate.kind, 1.0)"),
    "limit lost": (_LIMIT, "    if False:"),
    "gate clamped on both sides": ("g.clamp(max=gate.limit)", "g.clamp(-gate.limit, gate.limit)"),
    "up clamped on one side": ("u.clamp(-gate.limit, gate.limit)", "u.clamp(max=gate.limit)"),
    "clamp hides NaN": ("g.clamp(max=gate.limit)", "g.clamp(max=gate.limit).nan_to_num(nan=gate.limit)"),
    "clamp before bias": _before(_BIAS, "            x = x.clamp(max=getattr(fused.gate, 'limit', None) or 1e9)"),
    "silu for gelu": ('"gelu", "geglu")', '"gelu",)'),
    "preact after the limit": (
        "[where].copy_(x)",
        "[where].copy_(x.clamp(max=getattr(fused.gate, 'limit', None) or 1e9))",
    ),
    "preact rounded before the gate": _before(
        _ACT, "            x = x if fused.preact is None else x.bfloat16().double()"
    ),
    "row_scale of the neighbour": ("fused.row_scale[where]", "fused.row_scale.roll(1, -1)[where]"),
    "row_scale rounded": (".row_scale[where].double()", ".row_scale[where].bfloat16().double()"),
    "row_scale before the activation": _before(_ACT, "            x, scale = x * scale, 1.0"),
    "weight of the neighbour": ("weights[r, j]", "weights[r, j - 1]"),
    "weights rounded": ("weights[r, j].to", "weights[r, j].bfloat16().to"),
    "weight of 0 hides NaN": (_TERM, _TERM.replace("weight * rows[s]", "(weight * rows[s] if weight != 0 else 0)")),
    "sum in bfloat16": _after(_TERM, "            total = total.bfloat16().to(total.dtype)"),
    "sentinel adds the first row": _before(_ABSENT, "            s = s if s in rows or not rows else min(rows)"),
    "weight of an absent row is read": _before(
        _ABSENT, "            total = total + (0 if weights is None else 0 * weights[r, j])"
    ),
    "duplicates count once": _after(_ROW, "            s = -1 if s in index[r, :j].tolist() else s"),
    "rows behind the ends": _after(_KEPT, "                rows |= {where.stop: y[0] * torch.nan} if len(y) else {}"),
    "rows that go to one place overwrite each other": (
        "                total = total + rows[s]",
        "                total = rows[s]",
    ),
    "last row lost": ("for r in range(fused.rows or 0)", "for r in range((fused.rows or 0) - 1)"),
    "rows without contributions keep what they held": (
        "        out[r].copy_(",
        "        (out[r] if total.any() else total).copy_(",
    ),
    "beta of c lost in sums": ("total = total + ops.beta * cast", "total = total + cast"),
}
"""Faults of the model for fused problems; they fall to cases within FUSED_HUNTING."""

EQUIVALENT: dict[str, tuple[Edit, ...]] = {
    "no M mask on the load": (("rows[:, None] & inside[None, :])", "(rows | True)[:, None] & inside[None, :])"),),
    "no N mask on the load": (("inside[:, None] & cols[None, :])", "inside[:, None] & (cols | True)[None, :])"),),
}
"""Changes that no oracle may accuse: rows and columns past the group only reach results that are not stored, and here
no read can trap."""


def _with_edits(module: ModuleType, name: str, edits: Iterable[Edit]) -> dict[str, Any]:
    """The names of a module whose source is changed."""
    source = getsource(module)
    for before, after in sorted(edits, key=lambda edit: source.index(edit[0]), reverse=True):
        assert source.count(before) == 1, f"{name}: {module.__name__} has {source.count(before)} places like {before!r}"
        source = source.replace(before, after)
    namespace = dict(globals(), __name__=module.__name__)
    exec(compile(source, f"<{name}>", "exec"), namespace)
    return namespace


@cache
def planted(name: str) -> type[Kernel]:
    """The model kernel with a fault in it.

    Args:
        name: A key of MUTANTS, QUANTISED_MUTANTS or EQUIVALENT.

    Returns:
        The kernel of the changed source, for `ModelBackend(name, kernel)`.

    Raises:
        KeyError: No fault has this name.

    Example:
        >>> planted("alpha forgotten").__name__
        'Kernel'
    """
    edits = {**MUTANTS, **QUANTISED_MUTANTS, **EQUIVALENT}[name]
    found: type[Kernel] = _with_edits(kernel, name, edits)["Kernel"]
    return found


def mutant(name: str) -> Backend:
    """The backend with a fault in it: of the model kernel, or of the model for fused problems."""
    if name in FUSED_MUTANTS:
        return fused_kernel.FusedBackend(name, _with_edits(fused_kernel, name, [FUSED_MUTANTS[name]])["FusedKernel"])
    return ModelBackend(name, planted(name))


@dataclass(frozen=True, slots=True)
class Kill:
    """The outcome of a hunt: which oracle found the fault on which case. `oracle` is empty for a survivor."""

    name: str
    oracle: str
    tried: int
    seconds: float
    case: Case | None = None
    text: str = ""

    @property
    def killed(self) -> bool:
        return bool(self.oracle)


def examine(case: Case, subject: Subject, device: torch.device, *, deep: bool, seed: int = 0) -> Outcome:
    """Runs the oracles that need no GPU: values and guards always, the others if `deep`."""
    return examine_device_case(DeviceCase.from_case(case, device), subject, deep=deep, seed=seed)


def examine_device_case(device_case: DeviceCase, subject: Subject, *, deep: bool, seed: int = 0) -> Outcome:
    """`examine` for a case that is already in memory."""
    outcome = check(device_case, subject)
    if outcome.findings or not outcome.ran or not deep:
        return outcome
    run_oracles((other_contents, relations.relate, changed_sizes, lying_sizes), device_case, subject, outcome, seed)
    return outcome


MOST_PROBLEMS = 2000
"""Problems that a planted fault has to fall within; the rarest (a result between two 16-bit floats that rounding
through float32 moves) falls to the 567th. A number and no time, so that a busy machine judges as an idle one does."""


@lru_cache(maxsize=64)
def placed_case(number: int, limits: Limits) -> PlacedCase:
    """A case with its right answer, for all faults that meet it; each has memory of its own."""
    return PlacedCase.build(random_case(number, limits))


def hunt(backend: Backend, *, problems: int = MOST_PROBLEMS, limits: Limits = HUNTING, first: int = 0) -> Kill:
    """Draws up to so many cases, until an oracle finds a fault of the backend. The `first` ones are passed over."""
    subject, begin, tried = Subject(backend), time.monotonic(), first
    while tried < problems:
        placed = placed_case(tried, limits)
        device_case = DeviceCase.build(placed, torch.device("cpu"))
        outcome = examine_device_case(device_case, subject, deep=tried % 4 == 3, seed=tried)
        tried += 1
        if outcome.findings:
            found = outcome.findings[0]
            return Kill(subject.name, found.oracle, tried, time.monotonic() - begin, placed.case, found.text)
    return Kill(subject.name, "", tried, time.monotonic() - begin)
