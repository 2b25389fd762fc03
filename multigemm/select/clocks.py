"""What turns a call into samples: the clock of a GPU and that of a CPU.

`timing.measure` decides what is sampled and when; here is how one sample is taken and read.
"""

from __future__ import annotations

import ctypes
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal

import torch

from multigemm.cuda.nvrtc import Kernel, kernel
from multigemm.errors import CompileError
from multigemm.torch_internals import current_raw_stream

Mode = Literal["cold", "graph", "hot", "sustained", "host", "do_bench"]
Call = Callable[[], object]
cuda: Any = torch.cuda  # parts of torch.cuda carry no types

FLUSH_BYTES, CODE_BYTES = 256 << 20, 128 << 10
INSTRUCTION_BYTES, CODE_ROW = 16, 128
"""Of machine code, from Volta on; and how many the source writes into one statement."""
BLOCKS_EACH, THREADS = 2, 128
"""Blocks of long code for each processor, and their threads: enough to run on all parts of each."""
HOT_CALLS = 20
HOST_CALLS = 20
WARMUP_MS = 25.0


def _warm_calls(mode: Mode, cost_us: float) -> int:
    """do_bench warms up for a time, the other modes for a few calls."""
    return int(WARMUP_MS * 1e3 / max(cost_us, 1.0)) if mode == "do_bench" else 0


def free_bytes(device: torch.device) -> float:
    """Bytes that can be allocated now; of a CPU nobody asks."""
    if device.type != "cuda":
        return math.inf
    free = float(cuda.mem_get_info(device)[0])
    try:
        stats = cuda.memory_stats(device)
    except RuntimeError:  # an allocator that a user plugged in does not tell
        return free
    cached, used, pieces = (
        stats.get(f"{name}_bytes.all.current", 0) for name in ("reserved", "allocated", "inactive_split")
    )
    return free + float(cached - used - pieces)


def rough_time_us(call: Call, device: torch.device) -> float:
    """Microseconds of one call behind a first one, roughly."""
    call()
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    return (time.perf_counter() - begin) * 1e6


def _wait(device: torch.device) -> None:
    """For the current stream; a device as a whole may be captured on by another thread."""
    if device.type == "cuda":
        cuda.current_stream(device).synchronize()


class Clock(ABC):
    """What differs between a GPU and a CPU: how a call becomes a sample, and how a sample is read.

    `batch` samples are taken before they are read.
    """

    batch = 64

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @abstractmethod
    def prepare(self, call: Call, mode: Mode, known_us: float = 0.0) -> tuple[Callable[[], Any], float]:
        """Warms up; returns the sampler and the rough cost of one sample in microseconds.

        In mode "sustained" a call that takes `known_us` is not run here: neither to warm up nor to learn its cost.
        """

    @abstractmethod
    def read(self, sample: Any, mode: Mode) -> float:
        """What the sampler returned, in microseconds."""


class CpuClock(Clock):
    """perf_counter. There is no flush: a CPU's caches are large, shared and not ours to empty."""

    batch = 1

    def prepare(self, call: Call, mode: Mode, known_us: float = 0.0) -> tuple[Callable[[], Any], float]:
        if mode == "graph":
            raise RuntimeError("CUDA graphs need a CUDA device")
        known = known_us if mode == "sustained" else 0.0
        if not known:
            call()
        repeat = HOT_CALLS if mode == "hot" else 1

        def sample() -> float:
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            return (time.perf_counter() - start) * 1e6 / repeat

        # the smaller: one may have waited for another process
        cost = known or min(sample() for _ in range(2)) * repeat
        for _ in range(_warm_calls(mode, cost)):
            call()
        return sample, cost

    def read(self, sample: Any, mode: Mode) -> float:
        return float(sample)


def long_code(size: int) -> str:
    """A kernel of so many bytes, of which the compiler can leave nothing out."""
    row = " ".join(["fma.rn.f32 %0, %0, %1, %2;"] * CODE_ROW)
    step = f'    asm volatile("{row}" : "+f"(x) : "f"(a), "f"(b));\n'
    steps = step * (size // INSTRUCTION_BYTES // CODE_ROW)
    head, end = 'extern "C" __global__ void long_code(float a, float b, float* out) {', "    if (x == b) *out = x;"
    return f"{head}\n    float x = a;\n{steps}{end}\n}}\n"


@cache
def other_code(index: int) -> Kernel | None:
    """What empties a device's processors of the code that they ran; None where no NVRTC compiles it."""
    try:
        return kernel(long_code(CODE_BYTES), "long_code", (), index)
    except (OSError, CompileError):
        return None


class Caches:
    """What a GPU's caches are emptied by: of data, by writing several times what the L2 holds; of `code`, by running
    other code that is as long as the processors' caches are large."""

    def __init__(self, device: torch.device, code: bool) -> None:
        self._index, self._run = device.index, None
        self._data = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        other = other_code(device.index) if code else None
        if other is not None:
            blocks = BLOCKS_EACH * torch.cuda.get_device_properties(device).multi_processor_count
            values = ctypes.c_float(0.5), ctypes.c_float(0.25), ctypes.c_void_p(self._data.data_ptr())  # writes nothing
            self._run = other.bound(blocks, THREADS, values, self._data)

    def empty(self) -> None:
        """Nothing that ran before lies in them."""
        if self._run is not None:
            self._run(current_raw_stream(self._index))
        self._data.zero_()


class CudaClock(Clock):
    """CUDA events on the current stream of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._caches: Caches | None = None

    def scope(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def prepare(self, call: Call, mode: Mode, known_us: float = 0.0) -> tuple[Callable[[], Any], float]:
        known = known_us if mode == "sustained" else 0.0
        for _ in range(0 if known else 2):
            call()
        _wait(self.device)
        if mode == "host":
            return lambda: self._host(call), HOST_CALLS * self._host(call)
        repeat = HOT_CALLS if mode == "hot" else 1
        run = capture(call, self.device, repeat).replay if mode in ("graph", "hot") else call
        empty = self._emptier(mode)

        def sample() -> tuple[torch.cuda.Event, torch.cuda.Event]:
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            empty()
            start.record()
            run()
            end.record()
            return start, end

        def cost_of_one() -> float:
            begin = time.perf_counter()
            sample()[1].synchronize()
            return (time.perf_counter() - begin) * 1e6

        # the least: a call that met a busy host says nothing of the rest
        cost = known or min(cost_of_one() for _ in range(3))
        for _ in range(_warm_calls(mode, cost)):
            call()
        return sample, cost

    def _emptier(self, mode: Mode) -> Callable[[], None]:
        """What empties the caches before a sample; do_bench leaves code where it is, as Triton's does."""
        if mode in ("hot", "sustained"):
            return lambda: None
        if self._caches is None:
            self._caches = Caches(self.device, code=mode != "do_bench")
        return self._caches.empty

    def _host(self, call: Call) -> float:
        """The device is idle at the start and its queue is far from full, so only the host is seen."""
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        spent = (time.perf_counter() - begin) * 1e6 / HOST_CALLS
        torch.cuda.synchronize(self.device)
        return spent

    def read(self, sample: Any, mode: Mode) -> float:
        if mode == "host":
            return float(sample)
        start, end = sample
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / (HOT_CALLS if mode == "hot" else 1)


def capture(call: Call, device: torch.device | str, repeat: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeat` calls, after the warm-up on a side stream that capture demands."""
    stream = cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            call()
    graph.replay()
    torch.cuda.synchronize(device)
    return graph
