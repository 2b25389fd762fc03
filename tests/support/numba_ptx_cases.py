"""One small kernel for each instruction of the Numba PTX layer, its inputs, and what NumPy says of them.

`CASES` serves two tests: without a GPU each kernel has to compile to the instruction it is named
after; with one it has to produce NumPy's values. All arrays are flat; 16-bit floats travel as uint16.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

from multigemm.backends.numba.kernels.runtime import cuda, numpy_names, synchronising, types

with numpy_names():
    from multigemm.backends.numba.kernels import ptx
    from multigemm.backends.numba.kernels.ptx import make_zeros, shared_address

from multigemm.backends.numba.config import FAR
from multigemm.cuda.operand_maps import EDGE

Arrays = list[np.ndarray[Any, Any]]
int32 = types.int32
HALF = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
FLOAT8 = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}


@dataclass
class Case:
    """`arrays` go to the kernel in order, the last is its output.

    With `by_address` the first goes as an int64 that holds its address; with `tensor_map` as the
    address of a map of it (for a store: of the last).
    """

    kernel: Callable[..., None]
    arrays: Arrays
    expected: np.ndarray[Any, Any]
    opcode: str
    threads: int = 32
    hopper: bool = False
    by_address: bool = False
    tensor_map: dict[str, Any] = field(default_factory=dict)


def integers(shape: tuple[int, ...], low: int = -4, high: int = 5) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(low, high, shape).astype(np.float32)


def bits(values: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """A float array as the words that the hardware sees."""
    if kind == "tf32":
        return values.astype(np.float32).view(np.uint32)
    if kind in ("i8", "f64"):
        return values.astype({"i8": np.int8, "f64": np.float64}[kind])
    return values.astype(HALF[kind]).view(np.uint16)


def make_mma(kind: str) -> Any:
    """mma(acc[4], a, b) -> acc: one step on one warp, of 32 bytes of k."""
    shape, a_words, b_words = ptx.MMA[kind]
    total, part = types.UniTuple(ptx.SUMS[kind], 4), types.float64 if kind == "f64" else types.int32
    a, b = types.UniTuple(part, a_words), types.UniTuple(part, b_words)
    text = (
        f"mma.sync.aligned.{shape} {{{ptx.registers(0, 4)}}}, {{{ptx.registers(8, a_words)}}}, "
        f"{{{ptx.registers(8 + a_words, b_words)}}}, {{{ptx.registers(4, 4)}}};"
    )
    return ptx.instruction(text, total, total, a, b, effects=False)


def mma_case(kind: str) -> Case:
    """Rows of 8 words each: 16 halves of k, 8 tf32 or 32 bytes; or of 4 float64."""
    mma, zeros = make_mma(kind), make_zeros(4, ptx.SUMS[kind])
    k = {"tf32": 8, "i8": 32, "f64": 4}.get(kind, 16)

    def kernel(a: Any, b: Any, out: Any) -> None:
        lane = cuda.threadIdx.x
        row, quad = lane // 4, lane % 4
        at, below = row * 8 + quad, (row + 8) * 8 + quad
        acc = mma(zeros(), (a[at], a[below], a[at + 4], a[below + 4]), (b[at], b[at + 4]))
        out[row * 8 + quad * 2], out[row * 8 + quad * 2 + 1] = acc[0], acc[1]
        out[(row + 8) * 8 + quad * 2], out[(row + 8) * 8 + quad * 2 + 1] = acc[2], acc[3]

    def kernel_of_doubles(a: Any, b: Any, out: Any) -> None:
        lane = cuda.threadIdx.x
        row, quad = lane // 4, lane % 4
        acc = mma(zeros(), (a[lane], a[lane + 32]), (b[lane],))
        out[row * 8 + quad * 2], out[row * 8 + quad * 2 + 1] = acc[0], acc[1]
        out[(row + 8) * 8 + quad * 2], out[(row + 8) * 8 + quad * 2 + 1] = acc[2], acc[3]

    a, b = integers((16, k)), integers((8, k))
    words = [bits(x, kind).reshape(-1) for x in (a, b)]
    out = np.zeros(128, {"i8": np.int32, "f64": np.float64}.get(kind, np.float32))
    expected, opcode = (a @ b.T).reshape(-1), f"mma.sync.aligned.m16n8k{k}"
    if kind == "f64":
        return Case(kernel_of_doubles, [*words, out], expected, opcode, hopper=True)
    return Case(kernel, [*(x.view(np.int32) for x in words), out], expected, opcode)


def matrix_words(matrix: np.ndarray[Any, Any], transposed: bool) -> np.ndarray[Any, Any]:
    """[lane] words of an 8 x 8 matrix of 16-bit elements, as ldmatrix hands them out."""
    m = (matrix.T if transposed else matrix).astype(np.uint32)
    return np.array([m[lane // 4, lane % 4 * 2] | m[lane // 4, lane % 4 * 2 + 1] << 16 for lane in range(32)])


def ldmatrix_case(transposed: bool) -> Case:
    load = ptx.make_ldmatrix(4, transposed)

    def kernel(source: Any, out: Any) -> None:
        tile = cuda.shared.array(256, np.uint16)
        lane = cuda.threadIdx.x
        for i in range(lane, 256, 32):
            tile[i] = source[i]
        cuda.syncwarp()
        words = load(shared_address(tile) + lane * 16)
        for i in range(4):
            out[i * 32 + lane] = words[i]

    source = np.arange(256, dtype=np.uint16)
    expected = np.concatenate([matrix_words(m, transposed) for m in source.reshape(4, 8, 8)])
    out = np.zeros(128, np.int32)
    return Case(kernel, [source, out], expected.astype(np.int32), "ldmatrix.sync.aligned.m8n8.x4")


def cp_async_case() -> Case:
    wait = ptx.make_cp_async_wait(0)

    def kernel(address: Any, out: Any) -> None:
        tile = cuda.shared.array(128, np.uint32)
        lane = cuda.threadIdx.x
        ptx.cp_async_16(shared_address(tile) + lane * 16, address[0] + lane * 16, min(lane, 16))
        ptx.cp_async_commit()
        wait()
        cuda.syncwarp()
        for i in range(4):
            out[lane * 4 + i] = tile[lane * 4 + i]

    raw = np.random.default_rng(1).integers(1, 255, 512).astype(np.uint8)
    keep = np.arange(512) % 16 < np.minimum(np.arange(512) // 16, 16)
    expected = np.where(keep, raw, 0).astype(np.uint8).view(np.uint32)
    return Case(kernel, [raw, np.zeros(128, np.uint32)], expected, "cp.async.cg.shared.global", by_address=True)


def pack_case(kind: str) -> Case:
    pack = ptx.make_pack(kind)

    def kernel(source: Any, out: Any) -> None:
        lane = cuda.threadIdx.x
        out[lane] = pack(source[2 * lane], source[2 * lane + 1])

    source = np.random.default_rng(2).normal(size=64).astype(np.float32)
    return Case(kernel, [source, np.zeros(32, np.int32)], bits(source, kind).view(np.int32), f"cvt.rn.{kind}x2.f32")


def swizzled(row: Any, byte: Any) -> Any:
    """Where byte `byte` of a 128-byte row goes under the 128-byte swizzle."""
    return row * 128 + ((byte // 16) ^ (row % 8)) * 16 + byte % 16


def swizzle(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of 128 bytes in the order in which TMA lays them down."""
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 128)
    row, byte = np.indices(raw.shape)
    out = np.empty(raw.size, np.uint8)
    out[swizzled(row, byte)] = raw
    return out


def operand(values: np.ndarray[Any, Any], kind: str, transposed: bool) -> np.ndarray[Any, Any]:
    """[own, k] as shared memory holds it: along k, or boxes of 64 elements x k."""
    words = bits(values, kind)
    if not transposed:
        return swizzle(words)
    boxes = [words[first : first + 64].T for first in range(0, len(words), 64)]
    padded = [np.pad(box, ((0, 0), (0, 64 - box.shape[1]))) for box in boxes]
    return np.concatenate([swizzle(box) for box in padded])


B_AT = 8192
"""Bytes from the first operand of wgmma to the second one in shared memory."""


@synchronising
def lay_down(a: Any, b: Any) -> Any:
    """Copies both operands of wgmma into shared memory by 128 threads, and returns where the first one begins."""
    dynamic = cuda.shared.array(0, np.uint8)
    start = shared_address(dynamic)
    base = (start + 1023) & ~1023
    for i in range(cuda.threadIdx.x, a.size, 128):
        dynamic[base - start + i] = a[i]
    for i in range(cuda.threadIdx.x, b.size, 128):
        dynamic[base - start + B_AT + i] = b[i]
    ptx.fence_async()
    cuda.syncthreads()
    return base


def wgmma_case(kind: str, n: int, a_transposed: bool = False, b_transposed: bool = False) -> Case:
    k = 32 if kind == "tf32" else 64
    wgmma, zeros = ptx.make_wgmma(kind, n, a_transposed, b_transposed), make_zeros(n // 2)
    result = ptx.make_wgmma_result(n)
    a_descriptor, b_descriptor = ptx.make_descriptor(8192, 1024), ptx.make_descriptor(8192, 1024)
    a_step, b_step = (128 if a_transposed else 2), (128 if b_transposed else 2)

    def kernel(a: Any, b: Any, out: Any) -> None:
        base, thread = lay_down(a, b), cuda.threadIdx.x
        left, right = a_descriptor(base), b_descriptor(base + B_AT)
        acc = zeros()
        ptx.wgmma_fence()
        acc = wgmma(acc, left, right)
        acc = wgmma(acc, left + a_step, right + b_step)
        acc = wgmma(acc, left + 2 * a_step, right + 2 * b_step)
        acc = wgmma(acc, left + 3 * a_step, right + 3 * b_step)
        ptx.wgmma_commit()
        acc = result(acc)
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i in range(n // 8):
            for j in range(4):
                out[(row + j // 2 * 8) * n + i * 8 + column + j % 2] = acc[i * 4 + j]

    a, b = integers((64, k)), integers((n, k))
    arrays = [operand(a, kind, a_transposed), operand(b, kind, b_transposed), np.zeros(64 * n, np.float32)]
    return Case(kernel, arrays, (a @ b.T).reshape(-1), f"wgmma.mma_async.sync.aligned.m64n{n}k", 128, True)


def wgmma_of_bytes_case(a_kind: str, b_kind: str, n: int) -> Case:
    """Whole numbers; what the registers held before is left out of a sum that starts from zero."""
    first, *others = (ptx.make_wgmma_of_bytes(a_kind, b_kind, n, k, k == 0) for k in (0, 2, 4, 6))
    second, third, fourth = others
    result, zeros = ptx.make_wgmma_result(n), make_zeros(n // 2)

    def kernel(a: Any, b: Any, out: Any) -> None:
        base, thread = lay_down(a, b), int32(ptx.thread_again())
        left, right, acc = ptx.descriptor_half(base), ptx.descriptor_half(base + B_AT), zeros()
        for _ in range(2):
            ptx.wgmma_fence()
            acc = first(acc, left, right, thread)
            acc = second(acc, left, right, thread)
            acc = third(acc, left, right, thread)
            acc = fourth(acc, left, right, thread)
            ptx.wgmma_commit()
            acc = result(acc)
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        for i in range(n // 8):
            for j in range(4):
                out[(row + j // 2 * 8) * n + i * 8 + column + j % 2] = acc[i * 4 + j]

    a, b = integers((64, 128)), integers((n, 128))
    words = [swizzle(x.astype(FLOAT8[kind]).view(np.uint8)) for x, kind in ((a, a_kind), (b, b_kind))]
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{a_kind}.{b_kind}"
    return Case(kernel, [*words, np.zeros(64 * n, np.float32)], (a @ b.T).reshape(-1), opcode, 128, True)


def tma_load_case() -> Case:
    load = ptx.make_tma_load(3)

    def kernel(address: Any, out: Any) -> None:
        dynamic = cuda.shared.array(0, np.uint8)
        start = shared_address(dynamic)
        base = (start + 1023) & ~1023
        lane = cuda.threadIdx.x
        barrier = base + 8192
        if lane == 0:
            ptx.fence_tensormap(address[0])
            ptx.mbarrier_init(barrier, 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_expect_tx(barrier, 8192)
            load(base, address[0], barrier, (int32(8), int32(20), int32(1)), ptx.EVICT_FIRST)
        cuda.syncwarp()
        ptx.mbarrier_wait(barrier, 0)
        for i in range(lane, 8192, 32):
            out[i] = dynamic[base - start + i]

    source = bits(integers((2, 50, 96), -100, 100), "bf16")
    box = np.zeros((64, 64), np.uint16)
    box[:30] = source[1, 20:50, 8:72]
    described = {
        "dtype": torch.bfloat16, "extents": (96, 50, 2), "strides": (192, 9600), "boxes": ((64, 64, 1),),
    }  # fmt: skip
    return Case(
        kernel, [source.reshape(-1), np.zeros(8192, np.uint8)], swizzle(box), "cp.async.bulk.tensor.3d.shared",
        hopper=True, tensor_map=described,
    )  # fmt: skip


def tma_store_case() -> Case:
    """Rows counted back from an end: of a box of 64 the first 7 lie before it, and the last columns do not exist."""

    def kernel(address: Any, source: Any, out: Any) -> None:
        dynamic = cuda.shared.array(0, np.uint8)
        start = shared_address(dynamic)
        base = (start + 1023) & ~1023
        lane = cuda.threadIdx.x
        for i in range(lane, 8192, 32):
            dynamic[base - start + i] = source[i]
        ptx.fence_async()
        cuda.syncwarp()
        chosen = ptx.elected()
        if chosen:
            ptx.fence_tensormap(address[0])
        where = (int32(64), int32(FAR - 7), int32(30), int32(FAR), int32(1))
        ptx.tma_store(int32(chosen), base, address[0], where)
        ptx.tma_store_read(int32(chosen))
        ptx.tma_store_wait()

    source, out = bits(integers((64, 64), -100, 100), "bf16"), np.zeros((2, 50, 96), np.uint16)
    expected = out.copy()
    expected[1, 23:30, 64:96] = source[:7, :32]
    described = {
        "dtype": torch.bfloat16, "extents": (96, FAR, EDGE, EDGE, 2), "strides": (192, 192, 2**35 - 192, 9600),
        "boxes": ((64, 64, 1, 1, 1),),
    }  # fmt: skip
    arrays = [np.zeros(0, np.int64), swizzle(source), out.reshape(-1)]
    return Case(
        kernel, arrays, expected.reshape(-1), "cp.async.bulk.tensor.5d.global", hopper=True, tensor_map=described
    )


def barrier_case() -> Case:
    less, more = ptx.make_setmaxnreg(24, False), ptx.make_setmaxnreg(104, True)

    def kernel(out: Any) -> None:
        tile = cuda.shared.array(4, np.int64)
        barrier = shared_address(tile)
        thread = cuda.threadIdx.x
        if thread == 0:
            ptx.mbarrier_init(barrier, 128)
            tile[1] = 0
        cuda.syncthreads()
        if thread < 128:
            less()
            if thread == 5:
                tile[1] = 42
            ptx.named_barrier(1, 128)
            ptx.mbarrier_arrive(barrier)
        else:
            more()
            ptx.mbarrier_wait(barrier, 0)
            out[thread - 128] = tile[1]

    return Case(kernel, [np.zeros(128, np.int64)], np.full(128, 42), "setmaxnreg.inc", 256, True)


def cases() -> dict[str, Case]:
    """Every instruction family by name."""
    found = {f"mma {kind}": mma_case(kind) for kind in ptx.MMA}
    for turned in (False, True):
        found[f"ldmatrix trans={turned}"] = ldmatrix_case(turned)
    found |= {"cp.async": cp_async_case(), "barriers, setmaxnreg": barrier_case()}
    found |= {f"pack {kind}": pack_case(kind) for kind in HALF}
    found |= {"TMA load": tma_load_case(), "TMA store": tma_store_case()}
    pairs = (("e4m3", "e4m3", 128), ("e5m2", "e4m3", 64))
    found |= {f"wgmma {a} x {b} n={n}": wgmma_of_bytes_case(a, b, n) for a, b, n in pairs}
    found |= {f"wgmma bf16 n={n}": wgmma_case("bf16", n) for n in (8, 64, 96, 256)}
    found |= {"wgmma tf32": wgmma_case("tf32", 32), "wgmma f16 a turned": wgmma_case("f16", 64, True, False)}
    found |= {"wgmma bf16 both turned": wgmma_case("bf16", 192, True, True)}
    return found
