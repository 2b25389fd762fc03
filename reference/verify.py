"""Judges a result against the definition, and describes what is wrong.

`answer(problem)` computes once what every right result must satisfy; `judge(answer, result)` is then
cheap, so that one answer serves many backends and many runs. `verify` is both in one call. Where `out`
is the user's own, ask for the answer before the problem runs: later, the old content is gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from multigemm.errors import InvalidProblem
from multigemm.problem.arrays import adopt
from multigemm.problem.overlap import meetings
from multigemm.problem.problem import GroupedGemmProblem, GroupView, checked
from multigemm.reference.dtypes import Array, numpy_dtype, round_once, to_numpy, ulp, unit
from multigemm.reference.error_bound import Enclosed, accumulator, enclosed, image, sum_error
from multigemm.reference.fused import Rows, finished, product
from multigemm.reference.numpy_reference import GroupSum, QuantisedSum, blank, compute_dtype, group_sum
from multigemm.torch_internals import no_dynamo

NO_GROUP, MANY_GROUPS = -1, -2
"""The owner of an element that no group owns, and of a sum of rows of several."""


@dataclass(slots=True)
class Block:
    """One output array: the expected values and, in float64 or int64, the ends of what is right.

    `typical` is sqrt(K) u |A||B|, the size of an ordinary rounding error (of float8 also 2^-13 sqrt(K / 4) times the
    root mean square of sums over 128 of K, which the tensor core keeps in 14 bits); `owner` is the group of each
    element, and `free` is True where nothing can be demanded.
    """

    expected: Array
    low: Array
    high: Array
    free: Array
    owner: Array
    typical: Array

    @property
    def owned(self) -> Array:
        """Whether a group owns each element."""
        return np.asarray(self.owner != NO_GROUP)


@dataclass(slots=True)
class Answer:
    """The condition that a right result must satisfy, computed once per problem."""

    problem: GroupedGemmProblem
    blocks: list[Block]
    preact: Answer | None = None
    """What must hold of `preact_out`, if the problem has one; judged like a result."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome. `worst` elements are told by group and by coordinate within the group's result.

    `coordinate` is the index in the whole output array (number `array` of a list problem). `rho` is
    the largest error in units of half an ulp plus sqrt(K) u |A||B|: a few for a healthy kernel.
    """

    ok: bool
    bad: int
    total: int
    text: str
    group: int | None = None
    array: int = 0
    coordinate: tuple[int, ...] | None = None
    within: tuple[int, ...] | None = None
    got: float | None = None
    wanted: float | None = None
    low: float | None = None
    high: float | None = None
    rho: float = 0.0
    rho_rms: float = 0.0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self.text


def _comparable(array: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a signalling NaN raises the flag
        return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)


def _empty_block(array: Array) -> Block:
    value = _comparable(array)
    shape = array.shape
    return Block(array, value, value.copy(), np.zeros(shape, bool), np.full(shape, NO_GROUP), np.zeros(shape))


@no_dynamo
def expected(problem: GroupedGemmProblem) -> Any:
    """The answer by NumPy, in the result's dtype.

    Elements that no group owns are 0, or what the user's `out` holds now. For `c is out` call this before the problem
    runs.

    Args:
        problem: what to compute; operands on a device are copied to the host.

    Returns:
        A NumPy array, or a list of them for a list problem.

    Example:
        >>> import torch, multigemm as mg
        >>> mg.expected(mg.GroupedGemmProblem(torch.ones(2, 4), torch.ones(1, 4, 3), sizes=[1]))
        array([[4., 4., 4.],
               [0., 0., 0.]], dtype=float32)
    """
    blocks = [block.expected for block in answer(checked(problem)).blocks]
    if problem.form == "per_group":
        return blocks
    return blocks[0][0] if problem.squeezed else blocks[0]


def _place(view: GroupView) -> tuple[int, Any]:
    """The number of the output array that holds a group, and the index of the group's elements in it."""
    return (view.index, ...) if isinstance(view.where, int) else (0, view.where)


def _is_finished_by_intervals(problem: GroupedGemmProblem) -> bool:
    """Whether more than the plain epilogue follows the products."""
    fused = problem.fused
    return fused is not None and any(
        x is not None for x in (fused.gate, fused.preact, fused.row_scale, fused.combine, fused.out_rows)
    )


@no_dynamo
def answer(problem: GroupedGemmProblem) -> Answer:
    """The exact answer and the interval of right values for every element."""
    if _is_finished_by_intervals(problem):
        return _fused_answer(problem)
    arrays = blank(problem)
    found = Answer(problem, [_empty_block(array) for array in arrays])
    places, sums = [], []
    for view in problem.groups():
        if view.m and view.n:
            places.append(view)
            sums.append((group_sum(problem, view), view.k))
    if sums:
        _fill(found, arrays, places, sums)
    return found


def _fused_answer(problem: GroupedGemmProblem) -> Answer:
    """`answer` for problems whose products are followed by activation, gate, row_scale or sums of rows."""
    fused = problem.fused
    assert fused is not None
    found = Answer(problem, [_empty_block(array) for array in blank(problem)])
    if fused.preact is not None:
        found.preact = Answer(problem, [_empty_block(np.zeros_like(to_numpy(x))) for x in fused.preacts()])
    rows = Rows(problem) if fused.scatters else None
    for view in problem.groups():
        number, index = _place(view)
        sums = product(problem, view)
        if found.preact is not None:
            _put(found.preact.blocks[number], index, sums, problem.out_dtype, view.index)
        if not (view.m and view.n):
            continue
        if rows is None:
            _put(found.blocks[number], index, finished(problem, view, sums), problem.out_dtype, view.index)
        else:
            rows.add(view, finished(problem, view, sums))
    if rows is not None:
        _put(found.blocks[0], ..., rows.summed(), problem.out_dtype, MANY_GROUPS)
    for block in [] if found.preact is None else found.preact.blocks:
        block.free |= ~block.owned  # they keep what they held
    return found


def _put(block: Block, index: Any, x: Enclosed, dtype: torch.dtype, group: int) -> None:
    """Writes rounded values and intervals of a group at an index of a block. A typical error is half of the widest
    interval."""
    low, high = round_once(x.low, dtype), round_once(x.high, dtype)
    block.expected[index] = round_once(x.value, dtype)
    block.low[index], block.high[index], block.free[index] = _comparable(low), _comparable(high), x.free
    with np.errstate(all="ignore"):
        half = (x.high - x.low).astype(np.float64) / 2
    block.owner[index], block.typical[index] = group, np.where(np.isfinite(half), half, 0)


def _fill(found: Answer, arrays: list[Array], places: list[GroupView], sums: list[tuple[GroupSum, int]]) -> None:
    """Fills all groups at once with element-wise results, because most problems have many small groups."""
    problem = found.problem
    compute = compute_dtype(problem)
    u = unit(accumulator(compute))
    ordinary = 2.0**-11 if compute == torch.float32 and problem.precision == "tf32" else u
    ordinary *= abs(float(problem.alpha))
    error = joined([sum_error(problem, total, k) for total, k in sums])
    root = joined([np.full(total.value.shape, math.sqrt(max(k, 1))) for total, k in sums])
    total = GroupSum(
        joined([each.value for each, _ in sums]), joined([each.products for each, _ in sums]),
        joined([each.addends for each, _ in sums]), quantised=_joined_quantised([each.quantised for each, _ in sums]),
    )  # fmt: skip
    typical = ordinary * root * total.products + u * total.addends
    if total.quantised is not None and problem.spec.quantised == "float8":  # of sums in 14 bits
        typical = typical + abs(float(problem.alpha)) * 2.0**-13 * (root / 2) * total.quantised.block
    with np.errstate(all="ignore"):
        right = image(enclosed(problem, total, error), problem.activation, accumulator(compute))
    value, low, high = (round_once(x, problem.out_dtype) for x in (right.value, right.low, right.high))
    results = value, _comparable(low), _comparable(high), right.free, typical
    at = 0
    for view in places:
        number, index = _place(view)
        block, size = found.blocks[number], view.m * view.n
        targets = (arrays[number], block.low, block.high, block.free, block.typical)
        for target, values in zip(targets, results, strict=True):
            target[index] = values[at : at + size].reshape(view.m, view.n)
        block.owner[index] = view.index
        at += size


def _joined_quantised(sums: list[QuantisedSum | None]) -> QuantisedSum | None:
    """Quantised sums of all groups joined, element by element."""
    some = [x for x in sums if x is not None]
    if not some:
        return None
    grown, raw, left, block, free = (
        joined([getattr(x, name) for x in some]) for name in ("grown", "raw", "left", "block", "free")
    )
    return QuantisedSum(grown, raw, left, block, free, exact=False, quantum=0.0)


def joined(arrays: list[Array]) -> Array:
    """The elements of all, one after the other."""
    return np.concatenate([array.ravel() for array in arrays])


def _good(block: Block, got: Array) -> Array:
    good = (got >= block.low) & (got <= block.high)
    if got.dtype.kind == "f":
        good |= np.isnan(got) & np.isnan(block.low)
    return good | block.free


def _rho(block: Block, got: Array, dtype: torch.dtype) -> Array:
    """Errors in units of an ordinary rounding error; 0 where that has no meaning."""
    if not dtype.is_floating_point:
        return np.zeros(got.shape)
    wanted = _comparable(block.expected)
    with np.errstate(all="ignore"):
        ratio = np.abs(got - wanted) / (ulp(wanted, dtype) / 2 + block.typical)
    return np.where(np.isfinite(ratio) & block.owned & ~block.free, ratio, 0.0)


def _shape_fault(found: Answer, results: list[Array]) -> str:
    wanted = numpy_dtype(found.problem.out_dtype)
    if len(results) != len(found.blocks):
        return f"{len(results)} output arrays, expected {len(found.blocks)}"
    for number, (block, got) in enumerate(zip(found.blocks, results, strict=True)):
        if got.shape != block.low.shape:
            return f"output {number} has shape {got.shape}, expected {block.low.shape}"
        if got.dtype != wanted:
            return f"output {number} has dtype {got.dtype}, expected {wanted}"
    return ""


def _owner(block: Block, at: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """The group that owns an element and the element's place within that group's result."""
    group = int(block.owner[at])
    if group < 0:
        return None, at
    first = np.argwhere(block.owner == group)[0]
    return group, tuple((np.array(at) - first)[-2:].tolist())


def _worst(found: Answer, results: list[Array], masks: list[Array]) -> tuple[int, tuple[int, ...]]:
    """The bad element farthest outside its interval; NaN, infinities and unowned elements come first."""
    best = -1.0
    chosen: tuple[int, tuple[int, ...]] = (0, ())
    for number, (block, got, bad) in enumerate(zip(found.blocks, results, masks, strict=True)):
        if not bad.any():
            continue
        with np.errstate(all="ignore"):
            outside = np.maximum(block.low - got, got - block.high).astype(np.float64)
        outside = np.where(bad, np.where(np.isfinite(outside), outside, np.inf), -1.0)
        at = int(outside.argmax())
        if float(outside.flat[at]) > best:
            best, chosen = float(outside.flat[at]), (number, tuple(map(int, np.unravel_index(at, got.shape))))
    return chosen


def _hint(found: Answer, number: int, at: tuple[int, ...], group: int | None, got: float) -> str:
    if found.problem.fused is not None and found.problem.fused.scatters:
        return "a sum of rows, each of which may have been rounded once"
    if group is None:
        rule = "must be zero" if found.problem.zero_unowned else "must stay as it was"
        return f"no group owns this element, which {rule}"
    if math.isnan(got):
        return "a NaN that no input makes: an unwritten element, a read outside the operands or a leak between groups"
    block = found.blocks[number]
    if block.low[at] == block.high[at]:
        return "this value is exact in every order of summation, so even one unit in the last place is an error"
    return "outside the interval that any order of summation and one rounding can reach"


def _describe(found: Answer, results: list[Array], masks: list[Array], bad: int, total: int) -> Verdict:
    number, at = _worst(found, results, masks)
    block, got = found.blocks[number], float(results[number][at])
    group, within = _owner(block, at)
    wanted, low, high = float(block.expected[at]), float(block.low[at]), float(block.high[at])
    where = f"group {group}, element {within}" if group is not None else "an element that no group owns"
    if found.problem.fused is not None and found.problem.fused.scatters:
        where = f"row {at[0]}, column {at[1]}"
    listed = f" of output {number}" if len(found.blocks) > 1 else ""
    text = (
        f"{bad} of {total} elements are wrong; the worst: {where}, at {at}{listed}: got {got!r}, expected {wanted!r}, "
        f"right is {low!r} to {high!r} ({_hint(found, number, at, group, got)})"
    )
    return Verdict(False, bad, total, text, group, number, at, within, got, wanted, low, high)


def _read(x: Any) -> Array:
    """A result as a host array. Raises InvalidProblem for anything that no backend returns."""
    if isinstance(x, np.ndarray) or (hasattr(x, "__dlpack__") and not isinstance(x, torch.Tensor)):
        return to_numpy(x)
    return to_numpy(adopt(x, "result").tensor)


@no_dynamo
def judge(found: Answer, result: Any, *, suspicion: bool = True) -> Verdict:
    """Compares one result (an array, or a list of them) with an answer; without `suspicion`, no rho."""
    given = list(result) if isinstance(result, list | tuple) else [result]
    raw = [_read(each) for each in given]
    if found.problem.squeezed and raw and raw[0].ndim == 2:
        raw = [raw[0][None]]
    fault = _shape_fault(found, raw)
    total = sum(block.low.size for block in found.blocks)
    if fault:
        return Verdict(False, total, total, fault)
    results = [_comparable(each) for each in raw]
    masks = [~_good(block, got) for block, got in zip(found.blocks, results, strict=True)]
    bad = sum(int(mask.sum()) for mask in masks)
    if bad:
        return _describe(found, results, masks, bad, total)
    if not suspicion:
        return Verdict(True, 0, total, f"all {total} elements are right")
    dtype = found.problem.out_dtype
    rho = [_rho(block, got, dtype) for block, got in zip(found.blocks, results, strict=True)]
    peak = max((float(r.max(initial=0.0)) for r in rho), default=0.0)
    mean = math.sqrt(sum(float((r * r).sum()) for r in rho) / max(total, 1))
    return Verdict(True, 0, total, f"all {total} elements are right (rho {peak:.2f})", rho=peak, rho_rms=mean)


@no_dynamo
def verify(problem: GroupedGemmProblem, result: Any) -> Verdict:
    """Whether `result` is a right answer to `problem`; if not, where and by how much.

    Args:
        problem: what was to be computed.
        result: what was computed, by whatever means: an array of any library, or a list of them.

    Returns:
        The verdict, which prints as a sentence and is true if every element is right.

    Raises:
        InvalidProblem: the result lies in the memory of c, so that what c held is gone.

    Example:
        >>> import torch, multigemm as mg
        >>> problem = mg.GroupedGemmProblem(torch.ones(6, 4), torch.ones(3, 4, 2), sizes=[1, 0, 5])
        >>> bool(mg.verify(problem, torch.full((6, 2), 4.0)))
        True
        >>> mg.verify(problem, torch.full((6, 2), 5.0)).bad
        12
    """
    _refuse_lost_c(checked(problem), result)
    return judge(answer(problem), result)


def _refuse_lost_c(problem: GroupedGemmProblem, result: Any) -> None:
    """Refuses a result in the memory of c, because c is part of the answer and was overwritten."""
    if problem.out is None or problem.c is None:
        return
    given = list(result) if isinstance(result, list | tuple) else [result]
    tensors = [adopt(x, "result").tensor for x in given]
    if any(meetings(tensors, problem.each("c"))):
        raise InvalidProblem(
            "c is the result's own memory, and what it held is gone: ask for reference.answer(problem) before it runs, "
            "and for reference.judge(answer, result) afterwards"
        )
