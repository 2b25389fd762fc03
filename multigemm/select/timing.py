"""The only clock. Every number that multigemm prints, tunes by or plots comes out of `measure`.

Why one place: times of GPU kernels are easy to get wrong, and two clocks never agree. The rules:

* variants are interleaved, and the order is drawn anew in each round, so that drifting clocks and
  power limits meet all of them alike, and none always runs behind the same other;
* "cold" and "graph" write a buffer of several times the L2 before each call, because in a model the operands do not
  lie in the cache either, and run long code before that, because in a model the processors hold other kernels' code;
* what moves a whole round (the clock, another process) is taken out of it, so that two medians never
  compare a fast half of the rounds with a slow one;
* medians and quantiles, never the mean; the raw samples are kept;
* under load without a pause a large GPU meets its power limit and lowers its clock; `rest` asks for pauses, after
  each of which one call wakes clock and caches and is not counted;
* what an empty kernel costs between two events is reported (`overhead`), never subtracted.
"""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, get_args

import numpy as np
import torch

from multigemm.cuda.launch import Kernel
from multigemm.cuda.nvrtc import loaded
from multigemm.errors import CompileError
from multigemm.torch_internals import current_raw_stream

Mode = Literal["cold", "graph", "hot", "sustained", "host", "do_bench"]
Call = Callable[[], object]
cuda: Any = torch.cuda  # parts of torch.cuda carry no types

MODES: tuple[Mode, ...] = get_args(Mode)
SPREAD_BLOCKS = 3
LATE = 2.0
COMPANY = 4
"""Fewer variants do not tell what moved a round from what moved one of them."""
PASSES = 4
JUST_RAN = 2
"""The smallest number of calls of each variant that ran right before sustained ones, to warm up or to learn their
time."""
BURST_MS = 25.0
"""Milliseconds of work between pauses, if pauses are requested. A power limit acts after a longer time; in shorter
bursts the clock has not settled."""
FLUSH_BYTES, CODE_BYTES = 256 << 20, 128 << 10
INSTRUCTION_BYTES, CODE_ROW = 16, 128
"""Of machine code, from Volta on; and how many the source writes into one statement."""
BLOCKS_EACH, THREADS = 2, 128
"""Blocks of long code for each processor, and their threads: enough to run on all parts of each."""
HOT_CALLS = 20
HOST_CALLS = 20
WARMUP_MS = 25.0


@dataclass(frozen=True, slots=True)
class Timing:
    """The samples of one variant in microseconds, or the reason why there are none.

    `steady` are the samples after removing what affected whole rounds, where that can be estimated. Every statistic
    uses these.
    """

    name: str
    mode: Mode
    samples: tuple[float, ...] = field(default=(), repr=False)
    error: str = ""
    steady: tuple[float, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        return bool(self.samples)

    @property
    def _counted(self) -> tuple[float, ...]:
        return self.steady or self.samples

    @property
    def median(self) -> float:
        return statistics.median(self._counted) if self.samples else math.nan

    @property
    def best(self) -> float:
        return min(self._counted, default=math.nan)

    def quantile(self, q: float) -> float:
        """Linear interpolation between the order statistics, as NumPy and do_bench do it."""
        return quantile(self._counted, q)

    @property
    def spread(self) -> float:
        """How far repeats disagree: the range of the medians of consecutive blocks, over the median."""
        size = len(self.samples) // SPREAD_BLOCKS
        if size == 0:
            return math.nan
        blocks = [statistics.median(self._counted[i * size : (i + 1) * size]) for i in range(SPREAD_BLOCKS)]
        return (max(blocks) - min(blocks)) / self.median

    @property
    def unrest(self) -> float:
        """How far samples disagree: the wider of the range of block medians and of the middle 60 per cent."""
        middle = (self.quantile(0.8) - self.quantile(0.2)) / self.median
        return max(middle, self.spread if math.isfinite(self.spread) else 0.0)


def quantile(samples: Iterable[float], q: float) -> float:
    """The q-th quantile by linear interpolation; NaN for no samples."""
    taken = list(samples)
    return float(np.quantile(taken, q)) if taken else math.nan


def measure(
    variants: Mapping[str, Call],
    device: torch.device | str,
    mode: Mode = "cold",
    *,
    reps: int = 100,
    min_reps: int = 10,
    budget_ms: float = 200.0,
    rest: float = 0.0,
    known_us: Mapping[str, float] | None = None,
    watch: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Times each variant; `reps` rounds at most, `min_reps` at least, about `budget_ms` of work for all together.

    cold      one eager call behind other code and an L2 flush, between two events (perf_counter on a CPU, no flush)
    graph     the same, but the call is a replay of a captured CUDA graph
    hot       20 calls back to back in one graph without a flush; the time of one
    sustained one eager call right behind another one, without a flush, once all have run in turn for 25 ms: a GPU under
              load lowers its clock
    host      what the caller's thread spends per call while the device works on its own
    do_bench  as triton.testing.do_bench measures: each variant alone, an L2 flush and one call per sample
    A variant that raises, or cannot be captured, yields a Timing with the error and no samples.
    `rest` is the part of the time in which the device shall idle, in pauses between bursts of some 25 ms: 0 none, 0.8
    gives pauses of 100 ms. `known_us`: what each variant takes, roughly, where all have just run twice ("sustained").
    `watch` is told the name of each variant before it runs for the first time, and "" afterwards.
    """
    where = torch.device(device)
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; known: {', '.join(MODES)}")
    if not 0.0 <= rest < 1.0:
        raise ValueError(f"rest={rest}: a part of the time, from 0 to below 1")
    clock = CudaClock(where) if where.type == "cuda" else CpuClock()
    results, prepared, cost_us = dict[str, Timing](), dict[str, Callable[[], Any]](), dict[str, float]()
    with clock.scope():
        for name, call in variants.items():
            watch(name)
            try:
                prepared[name], cost_us[name] = clock.prepare(call, mode, (known_us or {}).get(name, 0.0))
            except Exception as error:
                results[name] = Timing(name, mode, error=describe(error))
        watch("")
        for group in [[name] for name in prepared] if mode == "do_bench" else [list(prepared)]:
            round_ms = sum(cost_us[name] for name in group) / 1e3
            rounds = max(min_reps, min(reps, int(budget_ms / max(round_ms, 1e-3))))
            samplers = {name: prepared[name] for name in group}
            if mode == "sustained":
                _warm_up(clock, samplers, mode, int(WARMUP_MS / max(round_ms, 1e-3)) - JUST_RAN)
            pauses = _Pauses(cost_us, rest / (1.0 - rest))
            results.update(_rounds(clock, samplers, mode, rounds, min_reps, LATE * budget_ms / 1e3, pauses))
    return {name: results[name] for name in variants}


def overhead(device: torch.device | str) -> dict[str, float]:
    """The clock's own cost in microseconds: nothing, and an empty kernel, between two events. What cannot be measured
    now (a full device) is left out."""
    where = torch.device(device)
    empty: dict[str, Call] = {"nothing": lambda: None}
    if where.type == "cuda":
        empty["empty_kernel"] = lambda: cuda._sleep(0)
    return {name: timing.median for name, timing in measure(empty, where, "cold", reps=50).items() if timing.ok}


def _warm_up(clock: Clock, samplers: Mapping[str, Callable[[], Any]], mode: Mode, rounds: int) -> None:
    """Runs all variants in turn without waiting, so that the samples begin under load. A failure here fails again in
    the samples."""
    taken = _Taken(clock, mode, samplers)
    for _ in range(rounds):
        for name, sampler in samplers.items():
            taken.take(name, sampler)


@dataclass
class _Pauses:
    """When to pause and for how long: `share` of the time since the last pause. The cost of a call is known by name."""

    cost_us: Mapping[str, float]
    share: float
    worked_ms: float = 0.0
    slept_s: float = 0.0
    waking: bool = False

    def due(self, name: str) -> bool:
        """Whether a pause is due after a call of `name`."""
        self.worked_ms += self.cost_us[name] / 1e3
        return self.share > 0 and self.worked_ms >= BURST_MS

    def sleep(self) -> None:
        pause = self.share * self.worked_ms / 1e3
        time.sleep(pause)
        self.slept_s += pause
        self.worked_ms, self.waking = 0.0, True

    def take(self, sampler: Callable[[], Any]) -> Any:
        """Takes a sample. After a pause it runs two calls and counts the second."""
        if self.waking:
            sampler()
            self.waking = False
        return sampler()


class _Taken:
    """Samples by variant, read in batches: waiting after each call would leave the GPU idle."""

    def __init__(self, clock: Clock, mode: Mode, names: Iterable[str]) -> None:
        self._clock, self._mode = clock, mode
        self.samples: dict[str, list[float]] = {name: [] for name in names}
        self.errors: dict[str, str] = {}
        self.pending: list[tuple[str, Any]] = []

    def take(self, name: str, call: Callable[[], Any]) -> None:
        try:
            self.pending.append((name, call()))
        except Exception as error:
            self.errors[name] = describe(error)

    def read(self) -> None:
        """Waits for the device and reads the batch."""
        for name, sample in self.pending:
            self.samples[name].append(self._clock.read(sample, self._mode))
        self.pending.clear()

    def timings(self) -> dict[str, Timing]:
        """The timings of all variants; a failed one has no samples."""
        samples = {name: [] if name in self.errors else taken for name, taken in self.samples.items()}
        calm = steadied({name: taken for name, taken in samples.items() if taken})
        return {
            name: Timing(name, self._mode, tuple(taken), self.errors.get(name, ""), calm.get(name, ()))
            for name, taken in samples.items()
        }


def _rounds(
    clock: Clock,
    samplers: dict[str, Callable[[], Any]],
    mode: Mode,
    rounds: int,
    least: int,
    late_s: float,
    pauses: _Pauses,
) -> dict[str, Timing]:
    """Runs the interleaved rounds.

    On a machine that has slowed down since the cost was estimated, it stops after `late_s` seconds of work, with the
    minimum of rounds.
    """
    began, taken, draw = time.perf_counter(), _Taken(clock, mode, samplers), random.Random(0)
    for index in range(rounds):
        names = [name for name in samplers if name not in taken.errors]
        for name in draw.sample(names, len(names)):
            taken.take(name, partial(pauses.take, samplers[name]))
            if pauses.due(name):
                taken.read()  # waits for the device, so that the pause is one
                pauses.sleep()
        if len(taken.pending) >= clock.batch or index == rounds - 1:
            taken.read()
        if index + 1 >= least and not taken.pending and time.perf_counter() - began - pauses.slept_s > late_s:
            break
    return taken.timings()


def steadied(rounds: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Samples of interleaved variants without the deviation of their rounds; empty if there are too few to estimate
    it.

    A median polish of the logarithms: a variant's level is its median over rounds, a round's the median over variants.
    Where a clock falls by a tenth half-way, medians of raw samples lie before or after the fall by chance.
    """
    if len(rounds) < COMPANY or any(us <= 0 for taken in rounds.values() for us in taken):
        return {}
    logs = np.log(np.array(list(rounds.values())))
    left = logs - np.median(logs, axis=0)
    for _ in range(PASSES):
        left -= np.median(left - np.median(left, axis=1, keepdims=True), axis=0)
    moved = (logs - left)[0]
    steady = np.exp(left + np.median(moved))
    return {name: tuple(row) for name, row in zip(rounds, steady.tolist(), strict=True)}


def describe(error: BaseException) -> str:
    """An error as one line for a table: its type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


# --- from a call to a sample -------------------------------------------------------------------------


def _warm_calls(mode: Mode, cost_us: float) -> int:
    """do_bench warms up for a time, the other modes for a few calls."""
    return int(WARMUP_MS * 1e3 / max(cost_us, 1.0)) if mode == "do_bench" else 0


def free_bytes(device: torch.device) -> float:
    """The bytes that can be allocated on a GPU now. Not used for CPUs."""
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
    """A rough time of one call in microseconds, after a first call."""
    call()
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    return (time.perf_counter() - begin) * 1e6


def _wait(device: torch.device) -> None:
    """Waits for the current stream only: another thread may capture on the same device."""
    if device.type == "cuda":
        cuda.current_stream(device).synchronize()


class Clock(ABC):
    """The differences between a GPU's and a CPU's clock: how a call becomes a sample, and how a sample is read.

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
    """Uses perf_counter. There is no flush: a CPU's caches are large and shared with other processes."""

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
    """The source of a kernel with this many bytes of code, of which the compiler can remove nothing."""
    row = " ".join(["fma.rn.f32 %0, %0, %1, %2;"] * CODE_ROW)
    step = f'    asm volatile("{row}" : "+f"(x) : "f"(a), "f"(b));\n'
    steps = step * (size // INSTRUCTION_BYTES // CODE_ROW)
    head, end = 'extern "C" __global__ void long_code(float a, float b, float* out) {', "    if (x == b) *out = x;"
    return f"{head}\n    float x = a;\n{steps}{end}\n}}\n"


@cache
def other_code(index: int) -> Kernel | None:
    """A kernel that evicts other kernels' code from the instruction caches of a device; None if no NVRTC compiles
    it."""
    try:
        return loaded(long_code(CODE_BYTES), "long_code", (), index)
    except (OSError, CompileError):
        return None


class Caches:
    """Evicts a GPU's caches: data by writing several times the L2's size; with `code`, instructions by running other
    code as long as the instruction caches are large."""

    def __init__(self, device: torch.device, code: bool) -> None:
        self._index, self._run = device.index, None
        self._data = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        other = other_code(device.index) if code else None
        if other is not None:
            blocks = BLOCKS_EACH * torch.cuda.get_device_properties(device).multi_processor_count
            values = ctypes.c_float(0.5), ctypes.c_float(0.25), ctypes.c_void_p(self._data.data_ptr())  # writes nothing
            self._run = other.step(blocks, THREADS, values, self._data)

    def empty(self) -> None:
        """Evicts what ran before."""
        if self._run is not None:
            self._run(current_raw_stream(self._index))
        self._data.zero_()


class CudaClock(Clock):
    """Uses CUDA events on the current stream of one device."""

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
        """What evicts the caches before a sample. do_bench leaves the code in place, as Triton's function does."""
        if mode in ("hot", "sustained"):
            return lambda: None
        if self._caches is None:
            self._caches = Caches(self.device, code=mode != "do_bench")
        return self._caches.empty

    def _host(self, call: Call) -> float:
        """Times the host alone: the device is idle at the start and its queue is far from full."""
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
    """Captures `repeat` calls into a CUDA graph, after the warm-up on a side stream that capture requires."""
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
