"""cuBLAS, torch's grouped_mm, the driver and our two kernels without a GPU: what is called is written down, and
computed on host memory.

`Fake` stands for all of them. It follows the library's rules: column-major operands, leading dimensions that cover a
column and are counted, addresses as numbers; a call touches no element that it does not name. Our kernels run as host
code (`host_kernels`), if `install` is given a folder for it. `HostCublas` is the whole backend on a fake. Only a GPU
shows the rest: torch's own kernel, what streams overlap, and the speed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from multigemm import torch_internals
from multigemm.backend import Availability, Launch, Recipe
from multigemm.backends.cublas import grouped_mm, host_sizes, launch, library, run, scaled_grouped_mm, support
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.library import Batch, Call
from multigemm.backends.cublas.products import Shape
from multigemm.cuda import driver, nvrtc
from multigemm.cuda.launch import Step
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from tests.support.host_kernels import host_kernel, need_compiler

CUDA = torch.device("cuda")
ARGUMENTS = {"finish": "Task", "clamp_offsets": "Bounds", "place_groups": "Groups"}
"""The type of the argument of each of our kernels."""
_NUMPY: dict[int, Any] = {0: np.float32, 1: np.float64, 2: np.float16, 3: np.int8, 10: np.int32, 14: ml_dtypes.bfloat16}
SINGLE = (0, 2, 14)
TORCHS, CURRENT, TORCHS_MODE, TORCHS_SPACE = 1, 7, 3, 9
"""torch's handle, and the stream, math mode and workspace that torch gives it."""

# --- what a call computes --------------------------------------------------------------------------


def _counts(distance: int, itemsize: int) -> bool:
    """How far every kernel of the library is known to count."""
    return distance < 2**30 and distance * itemsize < 2**31


def _matrix(address: int, kind: int, rows: int, cols: int, ld: int) -> npt.NDArray[Any]:
    """A column-major [rows, cols] view of memory."""
    dtype = np.dtype(_NUMPY[kind])
    assert ld >= max(1, rows), f"leading dimension {ld} is less than {rows} rows"
    assert cols <= 1 or _counts(ld, dtype.itemsize), f"leading dimension {ld} is not counted"
    assert address % dtype.itemsize == 0
    memory: Any = (ctypes.c_char * (((cols - 1) * ld + rows) * dtype.itemsize)).from_address(address)
    flat: npt.NDArray[Any] = np.frombuffer(memory, dtype=dtype)
    return np.lib.stride_tricks.as_strided(flat, (rows, cols), (dtype.itemsize, ld * dtype.itemsize))


def _multiply(one: Sequence[Any]) -> None:
    """One product, by the arguments of cublasGemmEx."""
    op_a, op_b, m, n, k, alpha, a, kind, lda, b, kind_b, ldb, beta, c, kind_c, ldc = one
    left = _matrix(a, kind, *((m, k) if op_a == 0 else (k, m)), ld=lda)
    right = _matrix(b, kind_b, *((k, n) if op_b == 0 else (n, k)), ld=ldb)
    out = _matrix(c, kind_c, m, n, ldc)
    wide = np.int64 if out.dtype == np.int32 else np.float64
    with np.errstate(all="ignore"):  # rows that no group owns may hold anything
        product = (left if op_a == 0 else left.T).astype(wide) @ (right if op_b == 0 else right.T).astype(wide)
    product = product.astype(np.float32) if kind in SINGLE else product
    old = beta * out.astype(product.dtype) if beta else 0
    out[...] = (product.dtype.type(alpha) * product + old).astype(out.dtype)


def products_of(name: str, args: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The arguments of a single product for each product of a call."""
    if name == "grouped":
        count, members = args[16].value, args[17]
        tables = [iter((ctypes.c_int64 * sum(members)).from_address(args[i].value)) for i in (6, 9, 13)]
        for g in range(count):
            one = [_value(x[g] if isinstance(x, ctypes.Array) else x) for x in args[:16]]
            for _ in range(members[g]):
                one[6], one[9], one[13] = (next(table) for table in tables)
                yield one
        return
    values = [_value(x) for x in args]
    if name == "gemm":
        yield values[:16]
    elif name == "strided":
        one, steps = [v for i, v in enumerate(values[:19]) if i not in (9, 13, 18)], [values[i] for i in (9, 13, 18)]
        sizes = [np.dtype(_NUMPY[values[i]]).itemsize for i in (7, 7, 16)]
        assert all(map(_counts, steps, sizes))
        for i in range(values[19]):
            at = [one[x] + i * step * size for x, step, size in zip((6, 9, 13), steps, sizes, strict=True)]
            yield [*one[:6], at[0], *one[7:9], at[1], *one[10:13], at[2], *one[14:]]
    else:
        tables = [list((ctypes.c_int64 * values[16]).from_address(values[i])) for i in (6, 9, 13)]
        for a, b, c in zip(*tables, strict=True):
            yield [*values[:6], a, *values[7:9], b, *values[10:13], c, *values[14:16]]


def _value(argument: Any) -> Any:
    inner = getattr(argument, "_obj", argument)
    return getattr(inner, "value", inner) or 0


# --- the library, torch's handle, and the driver ---------------------------------------------------


class Fake:
    """Writes down each call with the stream and math mode of the handle at that moment, each launch with its grid."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.kernels: dict[Any, Callable[..., None]] = {}
        self.log: list[tuple[Any, ...]] = []
        self.stream, self.mode, self.space = CURRENT, TORCHS_MODE, TORCHS_SPACE
        self.capture_of: dict[int, int] = {}
        self.computes = True
        self.events, self.streams, self.relaxed = 0, 100, False
        self.gemm, self.strided, self.pointers, self.grouped = (
            partial(self._call, name) for name in ("gemm", "strided", "pointers", "grouped")
        )

    def _call(self, name: str, blas: Any, *args: Any) -> int:
        self.log.append(("call", name, self.stream, self.mode))
        if self.computes:
            for one in products_of(name, args):
                _multiply(one)
        return 0

    def named(self, name: str, status: int = 0, also: Callable[[], object] = lambda: None) -> Call:
        """A call that only says its name, and returns that status."""

        def function(blas: Any) -> int:
            self.log.append(("call", name, self.stream, self.mode))
            also()
            return status

        return function, (), name

    def called(self) -> dict[str, int]:
        """The stream of each call."""
        return {entry[1]: entry[2] for entry in self.log if entry[0] == "call"}

    def make(self, batch: Batch) -> list[str]:
        """Makes the calls of a batch; returns their names."""
        for function, args, _ in batch.calls:
            function(ctypes.c_void_p(TORCHS), *args)
        return [name for _, _, name in batch.calls]

    def handle(self) -> ctypes.c_void_p:
        self.stream, self.mode, self.space = CURRENT, TORCHS_MODE, TORCHS_SPACE
        return ctypes.c_void_p(TORCHS)

    def get_math_mode(self, blas: Any, to: Any) -> int:
        to._obj.value = self.mode
        return 0

    def set_math_mode(self, blas: Any, mode: Any) -> int:
        self.mode = getattr(mode, "value", mode)
        return 0

    def set_stream(self, blas: Any, stream: Any) -> int:
        self.stream, self.space = stream.value, 0  # the library forgets the workspace
        return 0

    def set_workspace(self, blas: Any, pointer: Any, size: Any) -> int:
        self.space = pointer.value
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.relaxed = 2 * self.relaxed, mode._obj.value == 2
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, state: Any, number: Any, *rest: Any) -> int:
        number._obj.value = self.capture_of.get(stream.value, 0)
        state._obj.value = int(number._obj.value > 0)
        return 0

    def cuEventCreate(self, to: Any, flags: int) -> int:
        self.events += 1
        to._obj.value = self.events
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.log.append(("record", event.value, stream.value))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        self.log.append(("wait", event.value, stream.value))
        return 0

    def cuStreamCreate(self, to: Any, flags: int) -> int:
        assert self.relaxed, "elsewhere a capture may be going on"
        self.streams += 1
        to._obj.value = self.streams
        return 0

    def cuMemsetD8Async(self, at: Any, value: int, size: Any, stream: Any) -> int:
        ctypes.memset(at.value, value, size.value)
        return 0

    def cuMemsetD2D8Async(self, at: Any, pitch: Any, value: int, width: Any, lines: Any, stream: Any) -> int:
        for i in range(lines.value):
            ctypes.memset(at.value + i * pitch.value, value, width.value)
        return 0

    def loaded(self, source: str, name: str, defines: tuple[str, ...], device: int) -> Any:
        """A kernel as `nvrtc.loaded` gives it."""
        if self.folder is not None and (source, defines) not in self.kernels:
            self.kernels[source, defines] = host_kernel(source, name, ARGUMENTS[name], defines, self.folder)
        runs = self.kernels.get((source, defines))

        def bound(blocks: int, threads: int, values: Sequence[Any], keep: object, overlap: bool = False) -> Step:
            assert overlap == (name == "clamp_offsets"), "only a kernel that waits may begin early"

            def step(stream: int, _keep: object = keep) -> None:
                self.log.append(("kernel", name, stream, blocks, getattr(values[0], "after", 0)))
                if runs is not None:
                    runs(ctypes.byref(values[0]), min(blocks, 3), threads)

            return step

        return type("Kernel", (), {"step": staticmethod(bound)})

    def scaled_grouped_mm(
        self, keys: Any, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor, *rest: Any
    ) -> Tensor:
        """torch's operation on float8: its own checks, those of its kernel, and memory and rows as in `grouped_mm`."""
        self.log.append(("scaled_grouped_mm", rest[-1]))
        given = (a, b, scale_a, scale_b, ends)
        with _disable_current_modes():
            described: list[Any] = [_on_meta(x) for x in given]
            torch._scaled_grouped_mm(*described, *rest)
        cuts, jagged_m = [0, *ends.tolist()], b.dim() == 3
        assert a.shape[-1] % 16 == b.shape[-2] % 16 == b.shape[-1] % 16 == 0
        assert all(x.data_ptr() % 16 == 0 for x in given[:2])
        assert cuts == sorted(cuts)
        assert cuts[-1] <= a.shape[0 if jagged_m else 1]
        assert jagged_m or not any(cut % 16 for cut in cuts), "the kernel asserts on the device"
        shape = (a.shape[0], b.shape[2]) if jagged_m else (len(ends), a.shape[0], b.shape[1])
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        out = torch.empty_strided(shape, strides, dtype=torch.bfloat16)
        fresh = not torch_internals.dispatch_modes()
        with _disable_current_modes():
            if fresh:
                out.fill_(float("nan"))
            a, b, rows, columns = a.double(), b.double(), scale_a.double(), scale_b.double()
            for g, (start, end) in enumerate(pairwise(cuts)):
                if jagged_m:
                    product = (a[start:end] @ b[g]) * rows[start:end, None] * columns[g]
                    out[start:end] = product.to(out.dtype)
                else:
                    product = (a[:, start:end] @ b[start:end]) * rows.view(len(ends), -1, 1)[g]
                    out[g] = (product * columns.view(len(ends), -1)[g]).to(out.dtype)
        return out

    def public_grouped_mm(self, a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        """torch's public function, which would record a gradient."""
        assert not (torch.is_grad_enabled() and torch_internals.any_requires_grad(a, b))
        return self.grouped_mm(None, a, b, offs, None, None)

    def grouped_mm(self, keys: Any, a: Tensor, b: Tensor, ends: Tensor, bias: None, dtype: None) -> Tensor:
        """torch's operation: it asks for memory, trusts the ends, and leaves rows behind the last one as they are."""
        self.log.append(("grouped_mm", CURRENT))
        cuts, jagged_m = [0, *ends.tolist()], b.dim() == 3
        shape = (a.shape[0], b.shape[2]) if jagged_m else (len(ends), a.shape[0], b.shape[1])
        assert ends.dtype is torch.int32
        assert cuts == sorted(cuts)
        assert cuts[-1] <= a.shape[0 if jagged_m else 1]
        out = torch.empty_strided(shape, [math.prod(shape[i + 1 :]) for i in range(len(shape))], dtype=a.dtype)
        fresh = not torch_internals.dispatch_modes()
        with _disable_current_modes():
            if fresh:
                out.fill_(float("nan"))
            for g, (start, end) in enumerate(pairwise(cuts)):
                if jagged_m:
                    out[start:end] = (a[start:end].double() @ b[g].double()).to(out.dtype)
                else:
                    out[g] = (a[:, start:end].double() @ b[start:end].double()).to(out.dtype)
        return out


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def ints(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers, whose sums are exact."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path | None = None) -> Fake:
    """A fake in the places of the library, the driver, torch's handle and grouped_mm. Without a folder to compile them
    in, kernels do nothing."""
    if folder is not None:
        need_compiler()
    fake = Fake(folder)
    known = torch_internals.redispatched_grouped_mm
    assert known is not None
    monkeypatch.setattr(library, "cublas", lambda: fake)
    monkeypatch.setattr(library, "to_device", lambda array, device: torch.from_numpy(array.copy()))
    monkeypatch.setattr(library, "index_of", lambda device: 0)
    monkeypatch.setattr(library, "upload", lambda to, source, size, index: ctypes.memmove(to, source, size))
    monkeypatch.setattr(host_sizes, "index_of", lambda device: 0)
    monkeypatch.setattr(run, "handle", fake.handle)
    monkeypatch.setattr(run, "workspace", lambda device, stream=None: torch.empty(16, dtype=torch.uint8))
    monkeypatch.setattr(run, "_kits", {})
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "use_context", lambda device: None)
    monkeypatch.setattr(nvrtc, "loaded", fake.loaded)
    monkeypatch.setattr(grouped_mm, "redispatched_grouped_mm", (fake.grouped_mm, *known[1:]))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", fake.public_grouped_mm)
    monkeypatch.setattr(scaled_grouped_mm, "redispatched_scaled_grouped_mm", (fake.scaled_grouped_mm, *known[1:]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch_internals, "empty_cuda", _dirty)
    monkeypatch.setattr(torch_internals, "is_capturing", lambda: CURRENT in fake.capture_of)
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda device: CURRENT)
    monkeypatch.setattr(torch_internals, "current_device", lambda: 0)
    return fake


def _dirty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory in which nothing is zero yet."""
    return torch.empty_strided(shape, strides, dtype=dtype).fill_(3 if dtype is torch.int32 else float("nan"))


def streamed(fake: Fake, status: int = 0, size: int = 4096, count: int = 3) -> run.Streamed:
    """Four products on so many streams; `status` is what the last of them returns."""
    calls = [fake.named(name, status if name == "d" else 0) for name in "abcd"]
    shapes = [Shape(0, 0, size, 4096, k, 4096, 4096, 4096) for k in (4000, 3000, 2000, 1000)]
    library: Any = fake
    return run.Streamed(library, Batch(calls), shapes, count, torch.device("cpu"))


# --- the backend ----------------------------------------------------------------------------------


class HostCublas:
    """The backend's five members, with CPU operands let through."""

    name = "cublas"

    def __init__(self, variant: str) -> None:
        self._config = Config(variant, 3 if variant == "streams" else 0)  # type: ignore[arg-type]

    def availability(self) -> Availability:
        return Availability(True)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return support.not_supported_reasons(spec, CUDA)

    def configs(self, spec: ProblemSpec, device: torch.device) -> list[Any]:
        return [self._config]

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        def bind(ops: Operands) -> Launch:
            if spec.groups == 0 and spec.form == "per_group":
                return lambda: None
            live = ops.host_offsets is None and ops.host_valid_rows is None
            seen = replace(ops, spec=replace(spec, device_sizes=live))  # on a CPU, live sizes count as the host's
            if spec.quantised:
                return scaled_grouped_mm.plan(config).bind(seen)
            how = launch.method(seen.spec, config, CUDA)
            if how.syncs and (spec.jagged or spec.form == "masked"):
                return lambda: launch.bound(seen, how, *launch.fetched(seen))()
            return launch.bound(seen, how, ops.host_offsets, ops.host_valid_rows)

        anew = None if spec.quantised else launch.for_sizes(launch.method(spec, config, CUDA), bind)
        return Recipe(f"model.{config.variant}", config, bind, bind_sizes=anew)
