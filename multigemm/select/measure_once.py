"""Measuring once: the candidate backends are compiled side by side and timed on the problem at hand.

Results go to scratch memory. The call waits for its stream: after compiling, for about 50 ms of work, or for four calls
of each backend if these take longer. Backends are timed in the state in which programs run them: long calls under load,
because a GPU then lowers its clock and backends differ in energy per product; short calls after other work, with caches
that hold other data and other code.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from typing import Any

import torch

from multigemm.cuda.device import index_of
from multigemm.cuda.driver import beside_captures, use_context
from multigemm.planning import binding
from multigemm.planning.binding import Bound, Choice
from multigemm.planning.launch_cache import relaunches
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.problem_class import Query
from multigemm.select.table import Entry, Measured, device_name, plan
from multigemm.select.timing import FLUSH_BYTES, Mode, describe, free_bytes, measure, rough_time_us
from multigemm.settings import report, settings

LONG_US = 150.0
"""Calls from this many microseconds on keep a GPU busy without the host, up to its power limit."""
ROUNDS, LONG_ROUNDS = (3, 15), (2, 10)
"""Samples at least and at most. Long calls, which follow a warm-up, differ little from one to the next."""
BUDGET_MS = 25.0
HOPELESS, SLOW_US = 3.0, 500.0
"""Times slower than the fastest at two rough looks, and so slow that it is not the host: not worth samples."""
WORTH = 1.03
"""The first of the static order stays unless another one is faster by more than this. The ranking moves within a class
with how uneven the groups are: what leads by less on even ones is up to 15 % behind on others."""
HOST_CALLS = 3
FRONT_DOOR_US = 8.0
"""The host's time of a warm eager call besides its launch, in microseconds: the key and the result's memory (H200,
November 2026)."""
LEAST_WORK = 0.1
"""The fraction of the expected operations below which nothing is measured: a dry run tells nothing about its class."""


def forbidden() -> str:
    """Why this process neither measures nor uses earlier measurements; "" if it may do both."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and (ranks := group.get_world_size()) > 1:
        return f"the {ranks} ranks of a process group have to choose alike"
    return "" if settings().measure else "MULTIGEMM_MEASURE=0 forbids it"


def measure_once(query: Query, names: Sequence[str]) -> Entry:
    """Times the backends `names`, the expected one first.

    If fewer than two could be timed, the entry holds the reason and no choice. A backend that fails is left out with a
    warning, because the call itself can still run.
    """
    problem, key = query.problem, str(query.problem_class)
    device, on_gpu = device_name(problem.device), problem.device.type == "cuda"
    took, failed, obstacle = dict[str, Measured](), dict[str, str](), ""
    began = time.perf_counter()
    try:
        with binding.callers_stream(problem), beside_captures() if on_gpu else nullcontext():
            obstacle = _obstacle(problem)
            choices = {} if obstacle else _planned(query, names, failed)
            took = _timed(choices, problem, failed) if len(choices) > 1 else {}
    except Exception as error:  # the call itself may well succeed; if not, it says so
        took, obstacle = {}, f"it failed: {describe(error)}"
        warnings.warn(f"multigemm: auto could not measure: {describe(error)}", RuntimeWarning, stacklevel=2)
    for name, reason in failed.items():
        warnings.warn(f"multigemm: auto could not measure backend {name!r}: {reason}", RuntimeWarning, stacklevel=2)
    if len(took) < 2:
        return Entry(device, key, {}, failed=dict.fromkeys(names, obstacle or "fewer than two backends could be timed"))
    chosen = fastest({n: m.us for n, m in took.items()}, names)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    times = ", ".join(f"{name} {m.us:.1f} us" for name, m in took.items())
    spent = f"{time.perf_counter() - began:.2f} s with compiling"
    report(f"measured {key}: {times}; {chosen} from now on ({spent})")
    untimed = {name: failed.get(name, "its plan waits for the sizes") for name in names if name not in took}
    return Entry(device, key, took, chosen, date, untimed)


def fastest(took: Mapping[str, float], names: Sequence[str]) -> str:
    """The fastest backend. The first of `names` that was timed wins unless another is clearly faster."""
    best, first = min(took, key=lambda name: took[name]), next(name for name in names if name in took)
    return first if took[first] <= WORTH * took[best] else best


def _obstacle(problem: GroupedGemmProblem) -> str:
    """Why this problem is not measured; "" if it may be. Reads the sizes, unless a graph is being captured."""
    if binding.captured(problem):
        return "a CUDA graph is being captured"
    if problem.device.type == "cuda" and torch.cuda.get_sync_debug_mode() != 0:
        return "torch's sync debug mode forbids to wait for the GPU"
    work, expected = problem.flops, 0.0
    if problem.extents is not None and problem.form != "masked":  # where rows are masked, most may well be
        extents = problem.extents
        expected = 2.0 * extents.m * extents.n * extents.k * (1 if problem.spec.jagged else problem.spec.groups)
    if not work or work < LEAST_WORK * expected:
        return "there is hardly any work"
    spans, size = binding.scratch_bytes(problem)
    if spans > 2 * size:
        return "`out` spans far more memory than the result has"
    needed = FLUSH_BYTES + 2 * spans  # one more result, and what empties the cache
    free = free_bytes(problem.device)
    return "" if free >= needed else f"{free / 2**20:.0f} MiB are free, and {needed / 2**20:.0f} MiB are needed"


def _planned(query: Query, names: Sequence[str], failed: dict[str, str]) -> dict[str, Choice]:
    """Compiles the backends side by side: NVRTC and the compilers of Triton and Numba release or share Python's lock.
    Leaves out backends that read sizes back, because "auto" would not take them."""
    device = query.problem.device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def compiled(name: str) -> Choice:
        with ExitStack() as stack:
            if stream is not None:  # a new thread has no context, no stream and a capture mode of its own
                use_context(index_of(device))
                stack.enter_context(beside_captures())
                stack.enter_context(torch.cuda.stream(stream))
            return plan(query, name)

    with ThreadPoolExecutor(len(names)) as pool:
        done = {name: pool.submit(compiled, name) for name in names}
    failed.update((name, describe(error)) for name, x in done.items() if (error := x.exception()) is not None)
    choices = {name: x.result() for name, x in done.items() if name not in failed}
    return {name: choice for name, choice in choices.items() if not choice.recipe.syncs}


def _timed(choices: Mapping[str, Choice], problem: GroupedGemmProblem, failed: dict[str, str]) -> dict[str, Measured]:
    """The time of each backend. All of them write into one scratch result."""
    scratch, bounds, rough = binding.scratch(problem), dict[str, Bound](), dict[str, float]()
    for name, choice in choices.items():
        try:
            bounds[name] = binding.bind(choice, problem, scratch)
            rough[name] = rough_time_us(bounds[name].launch, problem.device)
        except Exception as error:
            failed[name] = describe(error)
    least = min(rough.values(), default=math.inf)
    slow = max(SLOW_US, HOPELESS * least)
    for name in [name for name, us in rough.items() if us > slow]:  # one look may meet a busy host
        rough[name] = min(rough[name], rough_time_us(bounds[name].launch, problem.device))
    worth = {name: bounds[name].launch for name, us in rough.items() if us <= slow}
    long = least >= LONG_US and problem.device.type == "cuda"
    mode: Mode = "sustained" if long else "cold"
    fewest, most = LONG_ROUNDS if long else ROUNDS
    taken = measure(worth, problem.device, mode, reps=most, min_reps=fewest, budget_ms=BUDGET_MS, known_us=rough)
    failed.update((name, timing.error) for name, timing in taken.items() if not timing.ok)
    took = {name: taken[name].median if name in taken else us for name, us in rough.items() if name not in failed}
    host = {} if long else {n: _host_time_us(choices[n], problem, scratch, bounds[n]) for n in worth if n in took}
    return {name: Measured(max(round(us, 2), 0.01), host_us=round(host.get(name, 0), 2)) for name, us in took.items()}


def _host_time_us(choice: Choice, problem: GroupedGemmProblem, out: Any, bound: Bound) -> float:
    """The host's microseconds for a warm call: a launch if the launch cache would serve it, else bind and launch."""
    best = math.inf
    for _ in range(HOST_CALLS):
        began = time.perf_counter()
        if not relaunches(bound):
            bound = binding.bind(choice, problem, out)
        bound.launch()
        best = min(best, time.perf_counter() - began)
    return 1e6 * best + FRONT_DOOR_US
