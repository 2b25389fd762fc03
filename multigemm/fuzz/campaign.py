"""A campaign: starts worker processes, replaces those that die, and adds up their results.

Each worker has a pipe and shared memory of its own, so that its death loses nothing: the parent reads from the shared
memory which problem the worker was at, records the crash, and starts a new worker after that problem. A worker without
progress for too long is killed. The campaign ends with its problems or its time; workers that then still compile are
killed too, and the summary lists what they had not begun.

On many GPUs and hosts each rank runs other problems, and rank 0 adds up. Within a process, workers take the devices in
turn. Ranks draw from seeds that are far apart, so that no problem runs twice. A failure holds its problem, so it can be
repeated anywhere.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from multigemm import fleet, interrupts
from multigemm.fuzz.plan import Batch, Failure, Options, Summary, Tally, WorkQueue
from multigemm.fuzz.shrink import shrink
from multigemm.fuzz.worker import LOST_CONTEXT, Position, drawn, trial, with_required
from multigemm.fuzz.worker import main as worker_main
from multigemm.testing import corpus
from multigemm.testing.case import Case

HANG_SECONDS = 240
STUCK_SECONDS = 8
"""Seconds without progress after which other workers may run the rest of a worker's batch."""
GRACE_SECONDS = 10
"""Seconds granted to problems that are running when the time is over."""
ALONE_SECONDS = 120.0
"""Seconds for one problem in a process of its own; after that it counts as hanging."""
SHRINK_ALONE_SECONDS = 60.0
Progress = Callable[[Tally, float], None]
"""Told the counts so far and the seconds since the start."""
_context = mp.get_context("forkserver")
"""Workers are forked from a process that has imported what they need, and never opened a device."""


@dataclass(slots=True)
class WorkerProcess:
    """One worker process as the parent knows it.

    After an end whose cause is open, the batch's first problem runs again with one backend at a time;
    `suspect` is the failure to be recorded if none of them fails alone. `waits`: it has asked for a
    batch and got none; `done`: it has been told that there is none; `relieved`: others run as many
    problems as it has left; `loaded`: slots whose kernels its process holds.
    """

    name: int
    process: Any
    pipe: Any
    position: Position
    batch: Batch
    first: int
    suspect: Failure | None = None
    waits: bool = False
    done: bool = False
    relieved: bool = False
    loaded: set[int] = field(default_factory=set)

    @property
    def number(self) -> int:
        return self.position.number

    @property
    def quiet(self) -> float:
        """The seconds since it began its current problem."""
        return 0.0 if self.waits or self.done else time.monotonic() - self.position.heartbeat


class Campaign:
    """The parent: hands out batches, adds up, replaces workers that die."""

    def __init__(self, options: Options) -> None:
        self.options, self.total, self.crashes = options, Tally(), 0
        self.begin = time.monotonic()
        self.deadline = self.begin + options.seconds if options.seconds else self.begin + 1e9
        self.queue, self.notes, self.workers = WorkQueue(options), list[str](), list[WorkerProcess]()

    def start(self, name: int, batch: Batch, suspect: Failure | None = None) -> None:
        """Starts a worker on a batch."""
        parent, child = _context.Pipe()
        position = RawValue(Position, batch.first, -1, 0, -1, int(time.monotonic()))
        resource_tracker.ensure_running()  # by the first start, which would let Ctrl-C through again
        process = _context.Process(
            target=worker_main, args=(self.options.at(name), child, position, batch, self.deadline), daemon=True
        )
        with interrupts.left_to_this_process():
            process.start()
        child.close()
        self.workers.append(WorkerProcess(name, process, parent, position, batch, batch.first, suspect))

    def run(self, progress: Progress | None) -> None:
        """Runs until all problems are done or the time is over."""
        for name in range(self.options.jobs):
            if batch := self.queue.next_batch():
                self.start(name, batch)
        try:
            while self.workers and not self.over():
                self.step()
                if progress is not None:
                    progress(self.total, time.monotonic() - self.begin)
        finally:
            with interrupts.held():
                self.finish()

    def over(self) -> bool:
        """Whether only stuck workers remain, whose problems others have run."""
        if time.monotonic() > self.deadline + GRACE_SECONDS:
            return True
        if self.queue.left > 0 or self.total.problems < self.options.examples:
            return False
        return all(
            worker.waits or worker.done or (worker.relieved and worker.quiet > STUCK_SECONDS) for worker in self.workers
        )

    def step(self) -> None:
        """Reads the workers' messages once."""
        ready = wait([each.pipe for each in self.workers], timeout=0.5)
        for worker in list(self.workers):
            with interrupts.held():  # a message that is half read would be lost
                open_pipe = self.hear(worker) if worker.pipe in ready else True
            hung = worker.quiet > HANG_SECONDS
            if open_pipe and not hung:
                continue
            self.workers.remove(worker)
            self.replace_ended(worker, hung)
        self.relieve()
        for worker in [worker for worker in self.workers if worker.waits]:
            self.give_batch(worker)

    def hear(self, worker: WorkerProcess) -> bool:
        """Reads one message. False once the worker's end of the pipe is closed."""
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            return False
        if message is None:
            worker.waits = True
        else:
            self.total.add(message)
            if self.queue.note_done(worker.number):
                spent = time.monotonic() - self.begin
                self.notes.append(f"each of the {self.queue.slots} kinds and configs had run after {spent:.0f} s")
        return True

    def give_batch(self, worker: WorkerProcess) -> None:
        """Gives a worker another batch, or the end if there is none."""
        compiling = sum(self.queue.must_compile(other.batch.first) for other in self.workers if other is not worker)
        fresh = self.options.jobs == 1 or compiling < self.options.jobs - 1  # one at least runs what there is
        worker.loaded.add(self.options.slot_of(worker.batch.first))
        batch = self.queue.next_batch(fresh=fresh, loaded=worker.loaded) if time.monotonic() < self.deadline else None
        if batch is None and self.busy() and time.monotonic() < self.deadline:
            return  # it may be needed yet
        worker.waits, worker.done, worker.relieved = False, batch is None, False
        if batch is not None:
            worker.batch = batch
            worker.position.number, worker.position.heartbeat = batch.first, int(time.monotonic())
        worker.pipe.send(batch)

    def busy(self) -> bool:
        return any(not worker.waits and not worker.done for worker in self.workers)

    def relieve(self) -> None:
        """If workers wait, gives them the rest of the batches of stuck workers."""
        if self.queue.left > 0 or not any(worker.waits for worker in self.workers):
            return
        for worker in self.workers:
            if worker.quiet > STUCK_SECONDS and not worker.relieved:
                worker.relieved = True
                self.queue.add(worker.batch.stop - worker.number)

    def replace_ended(self, worker: WorkerProcess, hung: bool) -> None:
        """Records the failure of workers that died or hang, and starts new ones after the problem."""
        if hung:
            worker.process.kill()
        worker.process.join(30)
        number, together = worker.number, worker.position.alone < 0
        if worker.suspect is not None and (worker.done or number != worker.first):
            self.total.failures.append(worker.suspect)  # nobody failed alone
        if worker.done or worker.waits:
            return
        self.crashes += 1
        failure = self.blame(worker, "hang" if hung else str(worker.process.exitcode))
        rest = replace(worker.batch, first=number, alone_from=-1)
        again = number == worker.first and worker.suspect is not None
        if together and not again:
            self.start(worker.name, replace(rest, alone_from=0), failure)
            return
        if hung or worker.process.exitcode != LOST_CONTEXT:
            self.total.failures.append(failure)  # a lost context has reported itself
        if not together:
            self.start(worker.name, replace(rest, alone_from=worker.position.index + 1))
        elif batch := (replace(rest, first=number + 1) if number + 1 < rest.stop else self.queue.next_batch()):
            self.start(worker.name, batch)  # it ended before any backend ran: the problem itself cannot be made

    def blame(self, worker: WorkerProcess, how: str) -> Failure:
        number, backend, config = worker.number, worker.position.alone, worker.position.config
        oracle = "hang" if how == "hang" else "crash"
        text = f"no progress for {HANG_SECONDS} s" if how == "hang" else f"the process ended with exit code {how}"
        name = self.options.backends[backend] if backend >= 0 else "unknown"
        chosen = self.total.assigned.get((name, config), "")
        return Failure(name, oracle, text, drawn(self.options, number).to_dict(), number, max(config, 0), chosen)

    def finish(self) -> None:
        """Reads the workers' last messages, ends them, and lists what was not begun."""
        for worker in self.workers:
            while worker.pipe.poll() and self.hear(worker):
                pass
            if worker.suspect is not None:
                self.total.failures.append(worker.suspect)
            if worker.quiet > STUCK_SECONDS:
                self.notes.append(
                    f"problem {worker.number} was not finished: its worker had been compiling or running for "
                    f"{worker.quiet:.0f} s when the campaign was over"
                )
            worker.process.kill()
            worker.process.join()
        if unbegun := self.queue.unbegun():
            self.notes.append(f"{len(unbegun)} of {self.queue.slots} kinds and configs were not begun: {unbegun}")


def run(options: Options, progress: Progress | None = None) -> Summary:
    """Runs a campaign to its end, or to Ctrl-C: the summary of what was checked until then says so."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # for the workers: one core each
    _context.set_forkserver_preload(["multigemm.fuzz.worker"])
    summary = Summary(options, Tally(), 0.0, next_seed=options.seed)
    try:
        summary.options = options = with_required(options)
        campaign = Campaign(options)
        summary.tally, summary.notes = campaign.total, campaign.notes
        try:
            campaign.run(progress)
        finally:
            summary.seconds, summary.crashes = time.monotonic() - campaign.begin, campaign.crashes
            summary.next_seed = options.seed + campaign.queue.handed_out
        _shrink_crashes(summary)
    except KeyboardInterrupt:
        summary.interrupted = True
    with interrupts.held():
        if options.corpus:
            _store(summary, Path(options.corpus))
    return summary


def fails_alone(case: Case, failure: Failure, device: str) -> bool:
    """Whether a case ends a process of its own with an exit code other than 0."""
    process = _context.Process(
        target=trial, args=(case.to_dict(), failure.backend, failure.repeat, device), daemon=True
    )
    with interrupts.left_to_this_process():
        process.start()
    process.join(ALONE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return True
    return process.exitcode != 0


def _shrink_crashes(summary: Summary) -> None:
    """Makes the first few crashing cases small, with a process for each trial."""
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


SEEDS_PER_RANK = 1 << 32


def of_rank(options: Options, place: fleet.Place) -> Options:
    """This rank's part of a campaign."""
    devices = options.devices or place.devices(options.device)
    share = [len(range(options.examples)[place.rank :: place.ranks])] if options.examples else [0]
    return replace(
        options, devices=devices, device=devices[0], jobs=max(options.jobs, len(devices)), examples=share[0],
        seed=options.seed + place.rank * SEEDS_PER_RANK,
    )  # fmt: skip


def merge(options: Options, parts: Sequence[Summary]) -> Summary:
    """Adds up the ranks' summaries."""
    total = Tally()
    for part in parts:
        total.add(part.tally)
    notes = [f"rank {rank}: {note}" for rank, part in enumerate(parts) for note in part.notes]
    if len(parts) > 1:
        notes += [f"rank {rank} ran {p.tally.problems} problems from seed {p.options.seed} on "
                  f"{', '.join(p.options.devices)}" for rank, p in enumerate(parts)]  # fmt: skip
    devices = tuple(dict.fromkeys(device for part in parts for device in part.options.devices))
    whole = replace(options, devices=devices, jobs=sum(p.options.jobs for p in parts))
    stopped = any(part.interrupted for part in parts)
    next_seed = max(part.next_seed - rank * SEEDS_PER_RANK for rank, part in enumerate(parts))
    crashes = sum(part.crashes for part in parts)
    return Summary(whole, total, max(p.seconds for p in parts), crashes, notes, stopped, next_seed)


def run_on_ranks(options: Options, place: fleet.Place, progress: Progress | None = None) -> Summary | None:
    """Runs this rank's part. Returns the whole campaign's summary on rank 0, None on the others."""
    with fleet.joined(place):
        parts = fleet.gather(place, run(of_rank(options, place), progress))
    if place.rank:
        return None
    return parts[0] if len(parts) == 1 else merge(options, parts)
