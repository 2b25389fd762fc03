"""One worker process of a campaign: draws, runs, judges and shrinks problems, and reports to its parent.

The worker writes its position to shared memory before each step, so that a kernel that ends the process leaves behind
which problem did it. After a CUDA error the context is lost: the worker reports what it found and exits, and the parent
starts another one after the problem.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any, NoReturn

import numpy as np
import torch

from multigemm.fuzz.plan import GATE_FROM, Batch, Failure, Options, Tally
from multigemm.fuzz.shrink import shrink
from multigemm.planning.staging import staged_spec
from multigemm.problem.arrays import dtype_name
from multigemm.testing.case import Case, classes
from multigemm.testing.deep_oracles import GPU_ORACLES, ORACLES, THREAD_ORACLES, run_oracles
from multigemm.testing.oracles import Outcome, check, check_case, check_pairs
from multigemm.testing.placed_case import DeviceCase
from multigemm.testing.strategies import (
    covering,
    keep_divisibility,
    kinds,
    random_case,
    redrawn,
)
from multigemm.testing.subject import Subject, assigned, compile_singly, kinds_for_rare_configs, offered

LOST_CONTEXT = 3
"""Exit code of a worker whose CUDA context is gone."""
MARKS = ("illegal memory access", "misaligned address", "an illegal instruction", "unspecified launch failure",
         "device-side assert", "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED",
         "CUDA_ERROR_MISALIGNED")  # fmt: skip


@lru_cache(maxsize=2)
def _kinds(options: Options) -> list[Case]:
    return [*kinds(options.limits, options.kinds - len(options.carriers), options.seed), *options.carriers]


def with_required(options: Options) -> Options:
    """The options with problems for every required class and, if each kind has a config of its own, with kinds for
    every config that a backend ships."""
    if not options.kinds and options.is_whole and not 0 < options.examples < GATE_FROM:
        return replace(options, begin_with=covering(options.limits, options.seed))
    if options.configs != "pinned" or not options.kinds:
        return options
    device = torch.device(options.at(0).device)
    more = kinds_for_rare_configs(_kinds(options), options.backends, device, options.limits, options.turns)
    return replace(options, kinds=options.kinds + len(more), carriers=tuple(more))


def drawn(options: Options, number: int) -> Case:
    """The case of a problem number; with `kinds`, a case that the kernels compiled for its kind can run."""
    if number < len(options.begin_with):
        return options.begin_with[number]
    if not options.kinds:
        return random_case(options.seed + number, options.limits_of(number))
    kind = _kinds(options)[options.kind_of(number)]
    case = redrawn(kind, Random((options.seed << 24) + number), options.limits_of(number))
    return keep_divisibility(kind, case)


@lru_cache(maxsize=16)
def _assigned(options: Options, name: str) -> list[list[Any]]:
    return assigned(_kinds(options), Subject(name), torch.device(options.device), options.turns)


def subject_of(options: Options, name: str, config: int) -> Subject:
    """The backend under the config of a position, or of a slot in a campaign with pinned configs."""
    if options.configs != "pinned" or not options.kinds:
        return Subject(name, config)
    subject, configs = Subject(name), _assigned(options, name)[config // options.turns]
    if configs:
        subject.pin(configs[config % options.turns % len(configs)])
    return subject


def deep_checks(device_case: DeviceCase, subject: Subject, outcome: Outcome, number: int, tally: Tally) -> None:
    """The oracles that cost more than a run: one of them for each number."""
    on_gpu = device_case.device.type == "cuda"
    oracles = {**ORACLES, **GPU_ORACLES} if on_gpu else ORACLES
    if number % 48 == 5 and not subject.backend.availability().emulated:
        oracles = THREAD_ORACLES
    names = list(oracles)
    name = names[number % len(names)]
    if name == "relations" and on_gpu and number // len(names) % 6:
        name = "lying sizes"  # relations are problems of other kinds: each may have to be compiled
    if run_oracles([oracles[name]], device_case, subject, outcome, number):
        tally.deep[name] += 1


def _positions(subject: Subject, device_case: DeviceCase, options: Options, slot: int) -> list[int]:
    """Which configs to run: the first, all, or the one assigned to the kind."""
    if options.configs == "pinned":
        return [slot]
    if options.configs != "all":
        return [0]
    spec = staged_spec(device_case.problem)
    if subject.refusals(spec, device_case.device):
        return [0]
    return list(range(max(1, len(subject.configs(spec, device_case.device)))))


def is_lost(outcome: Outcome) -> bool:
    """Whether a finding says that the CUDA context is lost."""
    return any(mark in finding.text for finding in outcome.findings for mark in MARKS)


class Position(ctypes.Structure):
    """A worker's position, in memory that it shares with its parent."""

    _fields_ = (
        ("number", ctypes.c_int64), ("alone", ctypes.c_int64), ("config", ctypes.c_int64), ("index", ctypes.c_int64),
        ("heartbeat", ctypes.c_int64),
    )  # fmt: skip
    number: int
    """The number of the problem."""
    alone: int
    """The position in `Options.backends` of the backend that runs alone; -1 if all run."""
    config: int
    """The config to which the backend that runs alone is pinned, as `Options.config_of` counts."""
    index: int
    """The position of the backend and config that run alone among those on which the problem runs."""
    heartbeat: int
    """The time on the monotonic clock, in seconds, at which the current step began."""


class Worker:
    """The loop of one worker."""

    def __init__(self, options: Options, pipe: Any, position: Position) -> None:
        self.options, self.pipe, self.position = options, pipe, position
        self.device = torch.device(options.device)
        self.subjects: dict[tuple[str, int], Subject] = {}
        self.tally, self.shrunk = Tally(), 0

    def subject(self, name: str, config: int) -> Subject:
        key = (name, config)
        if key not in self.subjects:
            self.subjects[key] = subject_of(self.options, name, config)
        return self.subjects[key]

    def announce(self) -> None:
        """Reports which configs are assigned to the kinds, so that one that never runs is noticed."""
        if self.options.configs != "pinned" or not self.options.kinds:
            return
        for name in self.options.backends:
            for shipped in offered(_kinds(self.options), Subject(name), self.device):
                self.tally.configs.update({(name, str(config)): 0 for config in shipped})
            for kind, configs in enumerate(_assigned(self.options, name)):
                for turn in range(self.options.turns if configs else 0):
                    text = str(configs[turn % len(configs)])
                    self.tally.assigned[name, kind * self.options.turns + turn] = text

    def run(self, batch: Batch, deadline: float) -> None:
        """The problems of a batch, until the time is used up.

        With `alone_from` >= 0 the first problem has ended a process before: its backends run one by one,
        from that position on, so that the next end names its cause.
        """
        alone_from = batch.alone_from
        for number in range(batch.first, batch.stop):
            if time.monotonic() >= deadline and alone_from < 0:
                return
            self.position.number, self.position.alone, self.position.heartbeat = number, -1, int(time.monotonic())
            self.problem(number, alone_from)
            self.send()
            alone_from = -1

    def send(self) -> None:
        """Sends results after every problem, so that the end of this process loses none."""
        self.pipe.send(self.tally)
        self.tally = Tally()

    def problem(self, number: int, alone_from: int = -1) -> None:
        """Runs one problem on every backend."""
        begin = time.perf_counter()
        case = drawn(self.options, number)
        device_case = DeviceCase.from_case(case, self.device)
        self.tally.problems += alone_from <= 0
        self.tally.classes.update(classes(case) if alone_from <= 0 else ())
        built, slot = time.perf_counter(), self.options.config_of(number)
        chosen = [
            (name, config)
            for name in self.options.backends
            for config in _positions(self.subject(name, 0), device_case, self.options, slot)
        ]
        if alone_from >= 0:
            self.send()  # the problem counts, whatever its first backend does to this process
            self.one_by_one(case, device_case, chosen, number, alone_from)
            return
        outcomes = self.together(device_case, chosen, number)
        checked = time.perf_counter()
        for (name, config), outcome in zip(chosen, outcomes, strict=True):
            self.one(case, device_case, name, config, number, outcome)
        ended = time.perf_counter()
        self.tally.spent.update({"build": built - begin, "check": checked - built, "deep": ended - checked})

    def together(self, device_case: DeviceCase, chosen: list[tuple[str, int]], number: int) -> list[Outcome]:
        """All subjects at once, then one wait for the device. A lost device ends the process: whose fault
        it was comes out when the problem runs again, one backend at a time."""
        try:
            pairs = [(device_case, self.subject(name, config)) for name, config in chosen]
            outcomes = check_pairs(pairs, rho=number % 8 == 0, spent=self.tally.spent)
        except Exception:  # an asynchronous CUDA error cannot be traced to one of them here
            self.leave()
        if any(is_lost(outcome) for outcome in outcomes):
            self.leave()
        return outcomes

    def one_by_one(
        self, case: Case, device_case: DeviceCase, chosen: list[tuple[str, int]], number: int, alone_from: int
    ) -> None:
        """The backends from a position on, each on its own, each result sent before the next begins."""
        for index, (name, config) in enumerate(chosen):
            if index < alone_from:
                continue
            self.position.alone, self.position.config = self.options.backends.index(name), config
            self.position.index, self.position.heartbeat = index, int(time.monotonic())
            self.one(case, device_case, name, config, number, check(device_case, self.subject(name, config)))
            self.send()

    def leave(self) -> NoReturn:
        """Ends this process, whose CUDA context is lost."""
        self.pipe.close()
        os._exit(LOST_CONTEXT)  # an ordinary end of the process would wait for the lost device

    def one(self, case: Case, device_case: DeviceCase, name: str, config: int, number: int, outcome: Outcome) -> None:
        """Counts one outcome, and runs the expensive oracles if it is their turn."""
        if not outcome.ran:
            for reason in outcome.refusals:
                self.tally.refusals[name, reason] += 1
            return
        subject = self.subject(name, config)
        if outcome.ok and number % self.options.deep == 0:
            deep_checks(device_case, subject, outcome, number // self.options.deep, self.tally)
        self.tally.checks[name] += 1
        self.tally.quantised_checks[name] += case.quantised
        self.tally.fused_checks[name] += case.is_fused
        self.tally.kernels[name, outcome.kernel] += 1
        self.tally.configs[name, str(outcome.config)] += 1
        if outcome.rho:
            self.tally.note_rho(name, dtype_name(case.compute), outcome.rho, outcome.rho_rms)
        if outcome.findings:
            shipped = map(str, subject.shipped(staged_spec(device_case.problem), self.device))
            chosen = str(outcome.config)
            self.report(case, name, config, number, outcome, chosen if chosen in shipped else "")

    def report(self, case: Case, name: str, config: int, number: int, outcome: Outcome, chosen: str) -> None:
        found = outcome.findings[0]
        failure = Failure(name, found.oracle, found.text, case.to_dict(), number, config, chosen)
        lost = is_lost(outcome)
        if not lost and self.shrunk < 8 and self.fails(case, name, config):  # else only a costlier oracle sees it
            self.shrunk += 1
            small = shrink(case, lambda c: self.fails(c, name, config), self.options.shrink_seconds)
            failure.shrunk = small.to_dict()
        self.tally.failures.append(failure)
        if lost:
            self.send()
            self.leave()

    def fails(self, case: Case, name: str, config: int) -> bool:
        """Whether a simpler case still fails. A case that cannot be built does not."""
        self.position.heartbeat = int(time.monotonic())
        try:
            device_case = DeviceCase.from_case(case, self.device)
        except (ValueError, IndexError, RuntimeError):
            return False
        return bool(check(device_case, self.subject(name, config)).findings)


def main(options: Options, pipe: Any, position: Position, batch: Batch, deadline: float) -> None:
    """The entry point of a worker process. Sends a tally after each problem, None to ask for another batch."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # problems hold NaN and infinities on purpose
    compile_singly()
    worker = Worker(options, pipe, position)
    given: Batch | None = batch
    worker.announce()
    while given is not None:
        worker.run(given, deadline)
        pipe.send(None)
        given = pipe.recv()
    pipe.close()


def trial(case: dict[str, Any], name: str, config: int | str, device: str) -> None:
    """Runs one case in a process of its own, which exits with 0 only if all is right."""
    torch.set_num_threads(1)
    sys.exit(1 if check_case(Case.from_dict(case), name, device, config).findings else 0)
