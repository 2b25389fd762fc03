"""A campaign: worker processes, their ends, and the sum of what they say.

Each worker has a pipe and a piece of shared memory of its own, so one that dies, however it dies,
takes nothing with it: the parent reads from the shared memory which problem it was at, records the
crash, and starts a new worker behind that problem. One that stands still for too long is ended.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from multigemm.fuzz import worker
from multigemm.fuzz.plan import Failure, Options, Tally
from multigemm.fuzz.shrink import shrink
from multigemm.testing import corpus
from multigemm.testing.case import Case

HANG_SECONDS = 240
SHRINK_ALONE_SECONDS = 60.0
_context = mp.get_context("spawn")


@dataclass(slots=True)
class Crew:
    """One worker process and what the parent knows of it."""

    process: Any
    pipe: Any
    place: Any
    first: int
    done: bool = False


@dataclass(slots=True)
class Summary:
    """The end of a campaign."""

    options: Options
    tally: Tally
    seconds: float
    crashes: int = 0
    notes: list[str] = field(default_factory=list)


def _start(options: Options, first: int, deadline: float) -> Crew:
    parent, child = _context.Pipe(duplex=False)
    place = _context.Array("q", [first, 0, 0, int(time.time())], lock=False)
    process = _context.Process(target=worker.main, args=(options, child, place, first, deadline), daemon=True)
    process.start()
    child.close()
    return Crew(process, parent, place, first)


def _drain(crew: Crew, total: Tally) -> bool:
    """Takes one message; False once the worker's end of the pipe is closed."""
    try:
        message = crew.pipe.recv()
    except (EOFError, OSError):
        return False
    if message is None:
        crew.done = True
    else:
        total.add(message)
    return True


def _crash(crew: Crew, options: Options, how: str) -> Failure:
    number, backend, config = (int(crew.place[i]) for i in range(3))
    case = worker.drawn(options, number)
    oracle = "hang" if how == "hang" else "crash"
    text = f"no progress for {HANG_SECONDS} s" if how == "hang" else f"the process ended with exit code {how}"
    name = options.backends[backend] if backend >= 0 else ""
    return Failure(name, oracle, text, case.to_dict(), number, max(config, 0))


def run(options: Options, progress: Callable[[Tally, float], None] | None = None) -> Summary:
    """Runs a campaign to its end."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # for the workers: one core each
    begin = time.time()
    deadline = begin + options.seconds if options.seconds else begin + 1e9
    total, crashes = Tally(), 0
    crews = [_start(options, i, deadline) for i in range(options.jobs)]
    while crews:
        ready = wait([c.pipe for c in crews], timeout=0.5)
        for crew in list(crews):
            open_pipe = _drain(crew, total) if crew.pipe in ready else True
            hung = not crew.done and time.time() - crew.place[3] > HANG_SECONDS
            if open_pipe and not hung:
                continue
            crews.remove(crew)
            replacement, crashed = _end(crew, options, total, hung, deadline)
            crashes += crashed
            if replacement is not None:
                crews.append(replacement)
        if progress is not None:
            progress(total, time.time() - begin)
    summary = Summary(options, total, time.time() - begin, crashes)
    _shrink_crashes(summary)
    if options.corpus:
        _store(summary, Path(options.corpus))
    return summary


def _end(crew: Crew, options: Options, total: Tally, hung: bool, deadline: float) -> tuple[Crew | None, bool]:
    """Settles a worker whose pipe is closed or that hangs; the replacement, and whether it crashed."""
    if hung:
        crew.process.kill()
    crew.process.join(30)
    if crew.done:
        return None, False
    code = crew.process.exitcode
    if hung or code != worker.LOST_CONTEXT:
        total.failures.append(_crash(crew, options, "hang" if hung else str(code)))
    following = int(crew.place[0]) + options.jobs
    over = time.time() >= deadline or (options.examples and following >= options.examples)
    return (None if over else _start(options, following, deadline)), True


def fails_alone(case: Case, failure: Failure, device: str, seconds: float = 120.0) -> bool:
    """Whether a case ends a process of its own with anything but success."""
    process = _context.Process(
        target=worker.trial, args=(case.to_dict(), failure.backend, failure.config, device), daemon=True
    )
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return True
    return process.exitcode != 0


def _attribute(failure: Failure, options: Options) -> bool:
    """Runs the case of a crash alone on each backend that it may have been; True once one fails."""
    case = Case.from_dict(failure.case)
    for name in [failure.backend] if failure.backend else options.backends:
        failure.backend = name
        if fails_alone(case, failure, options.device):
            return True
    failure.backend = failure.backend if len(options.backends) == 1 else "unknown"
    return False


def _shrink_crashes(summary: Summary) -> None:
    """Finds out whose the first few crashes are, and makes them small, each trial in a process of its own."""
    options = summary.options
    crashed = [f for f in summary.tally.failures if f.shrunk is None and f.oracle in ("crash", "hang", "exception")]
    for failure in crashed[:3]:
        case = Case.from_dict(failure.case)
        if not _attribute(failure, options):
            summary.notes.append(f"problem {failure.seed} ({failure.backend}) did not fail again on its own")
            continue
        limit = min(SHRINK_ALONE_SECONDS, 3 * options.shrink_seconds)
        small = shrink(case, lambda c, f=failure: fails_alone(c, f, options.device), limit)  # type: ignore[misc]
        failure.shrunk = small.to_dict()
    for failure in crashed[3:]:
        failure.backend = failure.backend or "unknown"


def _store(summary: Summary, folder: Path) -> None:
    stored: set[tuple[str, str]] = set()
    for failure in summary.tally.failures:
        kind = (failure.backend, failure.oracle)
        if kind in stored and failure.shrunk is None:
            continue
        stored.add(kind)
        data = {
            "case": failure.shrunk or failure.case, "backend": failure.backend, "oracle": failure.oracle,
            "config": failure.config, "why": failure.text[:500], "source": f"campaign, problem {failure.seed}",
        }  # fmt: skip
        failure.file = str(corpus.save(folder, data))
