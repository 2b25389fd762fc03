"""A campaign: worker processes, their ends, and the sum of what they say.

Each worker has a pipe and a piece of shared memory of its own, so one that dies, however it dies,
takes nothing with it: the parent reads from the shared memory which problem it was at, records the
crash, and starts a new worker behind that problem. One that stands still for too long is ended. The
campaign is over when its problems, or its time, are: a worker that then still compiles is ended as
well, and the summary says what it had not begun.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from multigemm.fuzz import worker
from multigemm.fuzz.dealer import Batch, Dealer
from multigemm.fuzz.plan import Failure, Options, Summary, Tally
from multigemm.fuzz.shrink import shrink
from multigemm.testing import corpus
from multigemm.testing.case import Case

HANG_SECONDS = 240
STUCK_SECONDS = 8
"""After which others may run what is left of a worker's batch."""
GRACE_SECONDS = 10
"""For the problems that are on their way when the time is over."""
SHRINK_ALONE_SECONDS = 60.0
_context = mp.get_context("spawn")


@dataclass(slots=True)
class Crew:
    """One worker process and what the parent knows of it.

    After an end whose cause is open, the batch's first problem runs again with one backend at a time;
    `suspect` is the failure to be recorded if none of them fails alone. `waits`: it has asked for a
    batch and got none; `done`: it has been told that there is none; `relieved`: others run as many
    problems as it has left; `loaded`: slots whose kernels its process holds.
    """

    name: int
    process: Any
    pipe: Any
    place: Any
    batch: Batch
    first: int
    suspect: Failure | None = None
    waits: bool = False
    done: bool = False
    relieved: bool = False
    loaded: set[int] = field(default_factory=set)

    @property
    def number(self) -> int:
        return int(self.place[0])

    @property
    def quiet(self) -> float:
        """Seconds since it began the problem that it is at."""
        return 0.0 if self.waits or self.done else time.monotonic() - int(self.place[3])


class Campaign:
    """The parent's side: hands out batches, adds up, replaces workers that die."""

    def __init__(self, options: Options) -> None:
        self.options, self.total, self.crashes = options, Tally(), 0
        self.begin = time.monotonic()
        self.deadline = self.begin + options.seconds if options.seconds else self.begin + 1e9
        self.dealer, self.notes, self.crews = Dealer(options), list[str](), list[Crew]()

    def start(self, name: int, batch: Batch, suspect: Failure | None = None) -> None:
        """Starts a worker on a batch."""
        parent, child = _context.Pipe()
        place = _context.Array("q", [batch.first, -1, 0, int(time.monotonic()), -1], lock=False)
        process = _context.Process(
            target=worker.main, args=(self.options.at(name), child, place, batch, self.deadline), daemon=True
        )
        process.start()
        child.close()
        self.crews.append(Crew(name, process, parent, place, batch, batch.first, suspect))

    def run(self, progress: Callable[[Tally, float], None] | None) -> None:
        """Until all problems are done, or the time is over."""
        for name in range(self.options.jobs):
            if batch := self.dealer.deal():
                self.start(name, batch)
        while self.crews and not self.over():
            self.step()
            if progress is not None:
                progress(self.total, time.monotonic() - self.begin)
        self.finish()

    def over(self) -> bool:
        """Whether nothing is left to wait for but workers that are stuck, whose problems others have run."""
        if time.monotonic() > self.deadline + GRACE_SECONDS:
            return True
        if self.dealer.left > 0 or self.total.problems < self.options.examples:
            return False
        return all(crew.waits or crew.done or (crew.relieved and crew.quiet > STUCK_SECONDS) for crew in self.crews)

    def step(self) -> None:
        """Hears the workers, once."""
        ready = wait([crew.pipe for crew in self.crews], timeout=0.5)
        for crew in list(self.crews):
            open_pipe = self.hear(crew) if crew.pipe in ready else True
            hung = crew.quiet > HANG_SECONDS
            if open_pipe and not hung:
                continue
            self.crews.remove(crew)
            self.settle(crew, hung)
        self.relieve()
        for crew in [crew for crew in self.crews if crew.waits]:
            self.give(crew)

    def hear(self, crew: Crew) -> bool:
        """Takes one message; False once the worker's end of the pipe is closed."""
        try:
            message = crew.pipe.recv()
        except (EOFError, OSError):
            return False
        if message is None:
            crew.waits = True
        else:
            self.total.add(message)
            if self.dealer.seen(crew.number):
                spent = time.monotonic() - self.begin
                self.notes.append(f"each of the {self.dealer.slots} kinds and configs had run after {spent:.0f} s")
        return True

    def give(self, crew: Crew) -> None:
        """Another batch, or the end where no more will come."""
        compiling = sum(self.dealer.is_cold(other.batch.first) for other in self.crews if other is not crew)
        fresh = self.options.jobs == 1 or compiling < self.options.jobs - 1  # one at least runs what there is
        crew.loaded.add(self.options.slot_of(crew.batch.first))
        batch = self.dealer.deal(fresh=fresh, loaded=crew.loaded) if time.monotonic() < self.deadline else None
        if batch is None and self.busy() and time.monotonic() < self.deadline:
            return  # it may be needed yet
        crew.waits, crew.done, crew.relieved = False, batch is None, False
        if batch is not None:
            crew.batch, crew.place[0], crew.place[3] = batch, batch.first, int(time.monotonic())
        crew.pipe.send(batch)

    def busy(self) -> bool:
        return any(not crew.waits and not crew.done for crew in self.crews)

    def relieve(self) -> None:
        """Where workers wait, what is left of the batches of those that are stuck goes to them."""
        if self.dealer.left > 0 or not any(crew.waits for crew in self.crews):
            return
        for crew in self.crews:
            if crew.quiet > STUCK_SECONDS and not crew.relieved:
                crew.relieved = True
                self.dealer.more(crew.batch.stop - crew.number)

    def settle(self, crew: Crew, hung: bool) -> None:
        """A worker whose pipe is closed or that hangs: blames, and starts another one behind the problem."""
        if hung:
            crew.process.kill()
        crew.process.join(30)
        number, together = crew.number, int(crew.place[1]) < 0
        if crew.suspect is not None and (crew.done or number != crew.first):
            self.total.failures.append(crew.suspect)  # nobody failed alone
        if crew.done or crew.waits:
            return
        self.crashes += 1
        failure = self.blame(crew, "hang" if hung else str(crew.process.exitcode))
        rest = replace(crew.batch, first=number, alone_from=-1)
        again = number == crew.first and crew.suspect is not None
        if together and not again:
            self.start(crew.name, replace(rest, alone_from=0), failure)
            return
        if hung or crew.process.exitcode != worker.LOST_CONTEXT:
            self.total.failures.append(failure)  # a lost context has reported itself
        if not together:
            self.start(crew.name, replace(rest, alone_from=int(crew.place[4]) + 1))
        elif batch := (replace(rest, first=number + 1) if number + 1 < rest.stop else self.dealer.deal()):
            self.start(crew.name, batch)  # it ended before any backend ran: the problem itself cannot be made

    def blame(self, crew: Crew, how: str) -> Failure:
        number, backend, config = (int(crew.place[i]) for i in range(3))
        oracle = "hang" if how == "hang" else "crash"
        text = f"no progress for {HANG_SECONDS} s" if how == "hang" else f"the process ended with exit code {how}"
        name = self.options.backends[backend] if backend >= 0 else "unknown"
        chosen = self.total.assigned.get((name, config), "")
        return Failure(name, oracle, text, worker.drawn(self.options, number).to_dict(), number, max(config, 0), chosen)

    def finish(self) -> None:
        """Ends the workers, and says what was not begun."""
        for crew in self.crews:
            if crew.suspect is not None:
                self.total.failures.append(crew.suspect)
            if crew.quiet > STUCK_SECONDS:
                self.notes.append(
                    f"problem {crew.number} was not finished: its worker had been compiling or running for "
                    f"{crew.quiet:.0f} s when the campaign was over"
                )
            crew.process.kill()
            crew.process.join()
        if cold := self.dealer.cold():
            self.notes.append(f"{len(cold)} of {self.dealer.slots} kinds and configs were not begun: {cold}")


def run(options: Options, progress: Callable[[Tally, float], None] | None = None) -> Summary:
    """Runs a campaign to its end."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # for the workers: one core each
    options = worker.with_carriers(options)
    campaign = Campaign(options)
    campaign.run(progress)
    summary = Summary(options, campaign.total, time.monotonic() - campaign.begin, campaign.crashes, campaign.notes)
    _shrink_crashes(summary)
    if options.corpus:
        _store(summary, Path(options.corpus))
    return summary


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
        device = options.at(0).device
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
