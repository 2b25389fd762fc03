"""cuBLASLt, which alone adds a bias and applies relu before a result is rounded: calls that need no epilogue kernel.

Which kernel runs is asked of the library's own heuristic, a tenth of a millisecond for each new shape; so the
answers are kept, for rows in steps. Whatever could round twice is forbidden there: sums over split K stay in
the accumulator's type. Each call has the workspace that its kernel needs, so calls may run beside each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from multigemm.backends.cublas.calls import LARGEST_BATCH, Batch, Types
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import NO_LOAD, REAL_TYPES, Call, Cublas, Status, check, handle, soname
from multigemm.backends.cublas.products import Product, even_steps, merged

FIRST_TRANSPOSED, SECOND_TRANSPOSED, EPILOGUE, BIAS, BIAS_STEP, BIAS_TYPE = 3, 4, 7, 8, 10, 26
BATCH, BATCH_STEP = 5, 6
MOST_WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)
"""Attributes of a product's description, of a matrix, and of what the heuristic may answer."""
IN_COMPUTE_TYPE = 2
"""The only way to add up split sums that does not round them to 16 bits in between."""
NOTHING, RELU, ADD_BIAS = 0, 2, 4
DEFAULT_EPILOGUE = 1
NOT_SUPPORTED = 15
ALIGNMENT = 16
KEPT = 4096
"""Descriptions, and answers of the heuristic; whoever solves ever new sizes must not collect them all."""
WORKSPACE = 4 << 20
FEW, ROWS = 64, (8, 64)
"""The heuristic is asked for rows rounded up to a multiple of 8, above 64 of them to a multiple of 64."""


class Distances(NamedTuple):
    """How far equal products lie from each other, operand by operand."""

    first: int
    second: int
    out: int
    bias: int


NOWHERE = Distances(0, 0, 0, 0)


class _Answer(ctypes.Structure):
    """One algorithm, as the heuristic returns it."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def library() -> Any:
    """The cuBLASLt that torch has loaded."""
    return ctypes.CDLL(soname("cublasLt") or "", mode=NO_LOAD)


class _Made:
    """Something that the library made in the host's memory, and unmakes when nobody holds it."""

    __slots__ = ("_destroy", "_set", "raw")

    def __init__(self, kind: str, *arguments: Any) -> None:
        functions = library()
        self.raw, self._destroy = ctypes.c_void_p(), getattr(functions, f"cublasLt{kind}Destroy")
        self._set = getattr(functions, f"cublasLt{kind}SetAttribute")
        check(getattr(functions, f"cublasLt{kind}Create")(ctypes.byref(self.raw), *arguments), f"cublasLt{kind}Create")

    def __del__(self) -> None:
        if self.raw:
            self._destroy(self.raw)

    def put(self, attribute: int, value: Any) -> None:
        """Sets an attribute to a ctypes value."""
        status = self._set(self.raw, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))
        check(status, f"cublasLt attribute {attribute}")


@cache
def _preference() -> _Made:
    made = _Made("MatmulPreference")
    made.put(MOST_WORKSPACE, ctypes.c_uint64(WORKSPACE))
    made.put(REDUCTIONS, ctypes.c_uint32(IN_COMPUTE_TYPE))
    for operand in ALIGNMENTS:
        made.put(operand, ctypes.c_uint32(ALIGNMENT))
    return made


@lru_cache(maxsize=KEPT)
def _matrix(kind: int, extents: tuple[int, int], ld: int, count: int, step: int) -> _Made:
    rows, cols = (ctypes.c_uint64(extent) for extent in extents)
    made = _Made("MatrixLayout", ctypes.c_int(kind), rows, cols, ctypes.c_int64(ld))
    if count > 1:
        made.put(BATCH, ctypes.c_int32(count))
        made.put(BATCH_STEP, ctypes.c_int64(step))
    return made


def _matrices(s: Shape, t: Types, count: int, steps: Distances) -> list[_Made]:
    first = (s.k, s.m) if s.op_first else (s.m, s.k)
    second = (s.n, s.k) if s.op_second else (s.k, s.n)
    return [
        _matrix(t.operand, first, s.ld_first, count, steps.first),
        _matrix(t.operand, second, s.ld_second, count, steps.second),
        _matrix(t.out, (s.m, s.n), s.ld_out, count, steps.out),
    ]


def _described(s: Shape, t: Types, epilogue: int, bias: int, bias_step: int) -> _Made:
    made = _Made("MatmulDesc", ctypes.c_int(t.compute), ctypes.c_int(REAL_TYPES[torch.float32]))
    for attribute, value in ((FIRST_TRANSPOSED, s.op_first), (SECOND_TRANSPOSED, s.op_second), (EPILOGUE, epilogue)):
        made.put(attribute, ctypes.c_int32(value))
    if epilogue & ADD_BIAS:
        made.put(BIAS, ctypes.c_uint64(bias))
        made.put(BIAS_TYPE, ctypes.c_int32(t.out))
        made.put(BIAS_STEP, ctypes.c_int64(bias_step))
    return made


def _rounded(s: Shape) -> Shape:
    step = ROWS[s.n > FEW]
    n = -(-s.n // step) * step
    if n == s.n:
        return s
    return s._replace(n=n, ld_second=max(s.ld_second, n)) if s.op_second else s._replace(n=n)


def _asked(described: _Made, laid: Sequence[_Made]) -> _Answer:
    answer, count = _Answer(), ctypes.c_int()
    operands = (*(matrix.raw for matrix in laid), laid[-1].raw)
    status = library().cublasLtMatmulAlgoGetHeuristic(
        handle(), described.raw, *operands, _preference().raw, 1, ctypes.byref(answer), ctypes.byref(count)
    )
    check(status or answer.state or (0 if count.value else NOT_SUPPORTED), "cublasLtMatmulAlgoGetHeuristic")
    return answer


def _runs(answer: _Answer, described: _Made, laid: Sequence[_Made]) -> bool:
    """Whether an algorithm that was found for another number of rows can run this product; sets its workspace."""
    checked, operands = _Answer(), (*(matrix.raw for matrix in laid), laid[-1].raw)
    status = library().cublasLtMatmulAlgoCheck(
        handle(), described.raw, *operands, ctypes.byref(answer.algorithm), ctypes.byref(checked)
    )
    answer.workspace = checked.workspace
    return not status and int(checked.workspace) <= WORKSPACE


_known: dict[Any, bytes] = {}
"""Answers of the heuristic. Nothing of one problem is in them, so all threads may share them."""


def _algorithm(
    s: Shape, t: Types, count: int, steps: Distances, described: _Made, laid: Sequence[_Made], more: tuple[int, int]
) -> _Answer:
    about = _rounded(s) if count == 1 else s
    key = *more, t.operand, t.compute, t.out, about, count, steps
    kept = _known.get(key)
    if kept is None:
        kept = bytes(_asked(described, laid if count > 1 else _matrices(about, t, 1, steps)))
        if len(_known) >= KEPT:
            _known.clear()
        _known[key] = kept
    answer = _Answer.from_buffer_copy(kept)
    return answer if _runs(answer, described, laid) else _asked(described, laid)


def _multiply(blas: ctypes.c_void_p, get_stream: Status, *args: Any) -> int:
    """cublasLtMatmul on the stream that the handle is turned to."""
    stream = ctypes.c_void_p()
    check(get_stream(blas, ctypes.byref(stream)), "cublasGetStream")
    status: int = library().cublasLtMatmul(blas, *args, stream)
    return status


def _call(
    blas: Cublas, same: Sequence[Product], t: Types, steps: Distances, epilogue: int, device: torch.device, into: Batch
) -> None:
    """One call for one product, or for equal ones at equal distances, in elements."""
    first, s, count = same[0], same[0].shape, len(same)
    described = _described(s, t, epilogue, first.bias, steps.bias)
    laid = _matrices(s, t, count, steps)
    answer = _algorithm(s, t, count, steps, described, laid, (device.index or 0, epilogue))
    space = torch.empty(answer.workspace, dtype=torch.uint8, device=device) if answer.workspace else None
    at, where = ctypes.c_void_p, None if space is None else space.data_ptr()
    args = (
        blas.get_stream, described.raw, ctypes.byref(t.alpha), at(first.first), laid[0].raw,
        at(first.second), laid[1].raw, ctypes.byref(t.beta), at(first.out), laid[2].raw, at(first.out), laid[2].raw,
        ctypes.byref(answer.algorithm), at(where), ctypes.c_size_t(answer.workspace),
    )  # fmt: skip
    into.keep += [described, laid, answer, space, t]
    into.calls.append(Call(_multiply, args, "cublasLtMatmul"))


def fused(
    blas: Cublas, products: list[Product], t: Types, size: int, relu: bool, device: torch.device
) -> tuple[Batch, list[Shape]]:
    """The calls, and how much work each of them is: as a shape."""
    batch, work = Batch(), []
    epilogue = (RELU if relu else NOTHING) | (ADD_BIAS if products[0].bias else NOTHING) or DEFAULT_EPILOGUE
    for shape, given in merged(products):
        for part in _parts(sorted(given, key=lambda product: product.out)):
            steps = NOWHERE if len(part) == 1 else Distances(*(step // size for step in _steps(part) or NOWHERE))
            _call(blas, part, t, steps, epilogue, device, batch)
            work.append(shape._replace(n=shape.n * len(part)))
    return batch, work


def _steps(same: list[Product]) -> Distances | None:
    """The constant distances between successive operands, results and biases, in bytes; None if they vary."""
    steps, biases = even_steps(same), {after.bias - before.bias for before, after in pairwise(same)} or {0}
    if steps is None or len(biases) > 1 or min(biases) < 0:
        return None
    return Distances(*steps, biases.pop())


def _parts(same: list[Product]) -> list[list[Product]]:
    """Equal products as far as one call takes them."""
    if len(same) == 1:
        return [same]
    if _steps(same) is None:
        return [[product] for product in same]
    return [same[first : first + LARGEST_BATCH] for first in range(0, len(same), LARGEST_BATCH)]
