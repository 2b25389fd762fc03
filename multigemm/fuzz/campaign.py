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
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from multigemm.fuzz import worker
from multigemm.fuzz.plan import Failure, Options, Summary, Tally
from multigemm.fuzz.shrink import shrink
from multigemm.testing import corpus
from multigemm.testing.case import Case

HANG_SECONDS = 240
SHRINK_ALONE_SECONDS = 60.0
_context = mp.get_context("spawn")


@dataclass(slots=True)
class Crew:
    """One worker process and what the parent knows of it.

    After an end whose cause is open, `first` runs again with one backend at a time from `alone_from`
    on; `suspect` is the failure to be recorded if none of them fails alone.
    """

    process: Any
    pipe: Any
    place: Any
    first: int
    alone_from: int = -1
    suspect: Failure | None = None
    done: bool = False


def _start(options: Options, first: int, deadline: float, alone_from: int = -1, suspect: Failure | None = None) -> Crew:
    parent, child = _context.Pipe(duplex=False)
    place = _context.Array("q", [first, -1, 0, int(time.time()), -1], lock=False)
    process = _context.Process(
        target=worker.main, args=(options.at(first), child, place, first, deadline, alone_from), daemon=True
    )
    process.start()
    child.close()
    return Crew(process, parent, place, first, alone_from, suspect)


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


def _crash(crew: Crew, options: Options, total: Tally, how: str) -> Failure:
    number, backend, config = (int(crew.place[i]) for i in range(3))
    oracle = "hang" if how == "hang" else "crash"
    text = f"no progress for {HANG_SECONDS} s" if how == "hang" else f"the process ended with exit code {how}"
    name = options.backends[backend] if backend >= 0 else "unknown"
    chosen = total.assigned.get((name, config), "")
    return Failure(name, oracle, text, worker.drawn(options, number).to_dict(), number, max(config, 0), chosen)


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
    """Settles a worker whose pipe is closed or that hangs; its replacement, and whether it was killed."""
    if hung:
        crew.process.kill()
    crew.process.join(30)
    number, together = int(crew.place[0]), int(crew.place[1]) < 0
    if crew.suspect is not None and (crew.done or number != crew.first):
        total.failures.append(crew.suspect)  # nobody failed alone
    if crew.done:
        return None, False
    failure = _crash(crew, options, total, "hang" if hung else str(crew.process.exitcode))
    if together and not (crew.alone_from >= 0 and number == crew.first):
        return _start(options, number, deadline, 0, failure), True
    if hung or crew.process.exitcode != worker.LOST_CONTEXT:
        total.failures.append(failure)  # a lost context has reported itself
    if together:  # it ended before any backend ran: the problem itself cannot be made
        return _start(options, number + options.jobs, deadline), True
    return _start(options, number, deadline, int(crew.place[4]) + 1), True


def fails_alone(case: Case, failure: Failure, device: str, seconds: float = 120.0) -> bool:
    """Whether a case ends a process of its own with anything but success."""
    process = _context.Process(
        target=worker.trial, args=(case.to_dict(), failure.backend, failure.repeat, device), daemon=True
    )
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return True
    return process.exitcode != 0


def _shrink_crashes(summary: Summary) -> None:
    """Makes the first few crashing cases small, each trial in a process of its own."""
    options = summary.options
    crashed = [f for f in summary.tally.failures if f.shrunk is None and f.oracle in ("crash", "hang", "exception")]
    for failure in [f for f in crashed if f.backend in options.backends][:2]:
        case = Case.from_dict(failure.case)
        device = options.at(failure.seed).device
        if failure.oracle == "hang" or not fails_alone(case, failure, device):
            summary.notes.append(
                f"problem {failure.seed} ({failure.backend}) was not made smaller: it did not fail again on its own"
            )
            continue
        limit = min(SHRINK_ALONE_SECONDS, 3 * options.shrink_seconds)
        small = shrink(case, lambda c, f=failure, d=device: fails_alone(c, f, d), limit)  # type: ignore[misc]
        failure.shrunk = small.to_dict()


def _store(summary: Summary, folder: Path) -> None:
    stored: set[tuple[str, str]] = set()
    for failure in summary.tally.failures:
        kind = (failure.backend, failure.oracle)
        if kind in stored and failure.shrunk is None:
            continue
        stored.add(kind)
        data = {
            "case": failure.shrunk or failure.case, "backend": failure.backend, "oracle": failure.oracle,
            "config": failure.repeat, "why": failure.text[:500], "source": f"campaign, problem {failure.seed}",
        }  # fmt: skip
        failure.file = str(corpus.save(folder, data))
