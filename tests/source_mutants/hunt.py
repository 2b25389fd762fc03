"""The hunt for one mutant: problems are drawn until an oracle objects, in a process of the mutant's own.

All processes are forked from a server that has imported everything but the backend, so that each can take the backend
from a changed copy. A mutant that hangs, or that ends its process, is killed by its parent.

In emulation, the problems that reach the changed line come first, then others like them and random ones, all of which
the changed kernels may take: fused problems for the kernel of fused products. On a GPU a
compilation costs seconds and a problem costs milliseconds: a few variants that hold the changed line, and whose machine
code the change alters, are compiled one after the other, and each meets many problems.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from threading import Semaphore
from typing import Any

import torch

import multigemm.backends
from multigemm.errors import BackendUnsupported, CompileError, InvalidSetting
from multigemm.testing.case import Case
from multigemm.testing.deep_oracles import changed_sizes, edge_of_memory, lying_sizes, other_contents, run_oracles
from multigemm.testing.oracles import Outcome, check_pairs, short_text
from multigemm.testing.placed_case import DeviceCase, PlacedCase, spec_of
from multigemm.testing.subject import Subject, compile_singly
from tests.model_mutants.faults import examine_device_case
from tests.source_mutants import emulated
from tests.source_mutants.compiled import Variant, codes_of, compile_once, compiler_key
from tests.source_mutants.equivalents import excuse
from tests.source_mutants.mutations import Mutation, kernels_of, plant
from tests.source_mutants.problems import SPAN, compiled_problem
from tests.support.subjects import Forced

DOES_NOT_COMPILE = ("CompilationError", "CompileError", "SyntaxError", "NameError", "TypingError", "CompileException",
          "IndentationError", "UnsupportedLanguageConstruct", "AttributeError", "LoweringError")  # fmt: skip
DEEP = 4
"""One problem in so many meets the expensive oracles in emulation, the others the edge of memory."""
DEEP_GROUPS = 100
"""Groups up to which the expensive oracles are bearable in emulation: 300 take them 37 s."""
COMPILE_LIMIT, RUN_LIMIT, EMULATED_RUN_LIMIT = 100.0, 15.0, 90.0
"""Seconds without a message after which a mutant counts as hanging: while it compiles, and while a problem runs on a
GPU, or in an emulator."""
LIBRARIES = {"triton": ("triton", "triton.language"), "cupy": ("cupy",), "numba": ("numba", "numba.cuda")}
VARIANTS, TRIED = 6, 14
"""Variants whose machine code a mutant changes, that meet problems in turn; and how many are compiled to find them."""
SEARCH_FACTOR = 4.0
"""Times the seconds of a hunt that may pass before a first variant is found whose machine code changes."""
BURST_LIMIT = 5.0
"""Seconds that a burst of small problems may keep a GPU busy, which others use as well."""
BURST = 8
"""Problems in a row of one variant."""
Report = Callable[[str], None]
"""Tells the parent that the mutant "compiles" or "runs"."""
_hang_retries = Semaphore(4)
"""Of the mutants that seem to hang, so many are tried again side by side."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """How mutants of a backend are hunted: where, and for how long each. `kernels` are those that the changed file is
    part of, once a mutant is chosen."""

    backend: str
    device: str = "cpu"
    seconds: float = 45.0
    kernels: tuple[str, ...] = ()

    @property
    def emulated(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: "killed", "stillborn" (does not compile), "survived", "equivalent" (it
    survived, and `text` says why no oracle could see it), "same" (no variant's machine code differs), or
    "failed" (its process could not hunt)."""

    state: str
    oracle: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The verdict on a mutant, and what it took."""

    mutation: Mutation
    verdict: Verdict
    seconds: float = 0.0

    @property
    def state(self) -> str:
        return self.verdict.state

    def __str__(self) -> str:
        oracle, text = self.verdict.oracle, self.verdict.text
        note = f"  [{text[:160]}]" if oracle == "exception" or self.state == "survived" else ""
        return f"{self.state:10} {self.seconds:5.1f} s  {oracle:12} {self.mutation}{note}"


def prepare_processes(hunt: Hunt) -> None:
    """Sets the process from which all others are forked: all that is slow to import, no GPU yet, and no disk
    cache, which is no place for mutants."""
    os.environ |= {"MULTIGEMM_CACHE": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    libraries = () if hunt.emulated else LIBRARIES[hunt.backend]
    mp.get_context("forkserver").set_forkserver_preload(["tests.source_mutants.variants", *libraries])


def run_one(mutation: Mutation, hunt: Hunt, root: Path, variants: Sequence[Variant] = ()) -> Result:
    """Plants one mutant and hunts it in a process of its own, on a GPU in these variants."""
    begin, hunt = time.monotonic(), replace(hunt, kernels=kernels_of(mutation, hunt.backend))
    with tempfile.TemporaryDirectory() as name:
        plant(mutation, Path(name), root)
        verdict = _attempt(hunt, name, variants)
        if verdict.oracle == "hang":
            with _hang_retries:  # with few others that may hang: they share a device, or cores
                verdict = _attempt(hunt, name, variants)
    if verdict.state in ("survived", "same") and (reason := excuse(mutation, emulated=hunt.emulated)):
        verdict = Verdict("equivalent", "", reason)
    return Result(mutation, verdict, time.monotonic() - begin)


def _attempt(hunt: Hunt, folder: str, variants: Sequence[Variant]) -> Verdict:
    """What one process finds, or what its end says of the mutant."""
    context = mp.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_hunt_in_process, args=(hunt, folder, list(variants), sender), daemon=True)
    process.start()
    sender.close()
    verdict, hangs = _answer(receiver, hunt)
    if not hangs:
        process.join(5)
    process.kill()
    process.join()
    if verdict is not None:
        return verdict
    if hangs:
        return Verdict("killed", "hang")
    if process.exitcode == 1:  # an exception outside the hunt: nothing was learnt
        return Verdict("failed")
    return Verdict("killed", "crash", f"exit code {process.exitcode}")


def _answer(pipe: Any, hunt: Hunt) -> tuple[Verdict | None, bool]:
    """What a mutant's process finds, and whether it hangs. On the way it says whether it compiles or runs."""
    run_limit = EMULATED_RUN_LIMIT if hunt.emulated else RUN_LIMIT
    said: Any = ""
    try:
        while pipe.poll(run_limit if said == "runs" else COMPILE_LIMIT):
            said = pipe.recv()
            if isinstance(said, Verdict):
                return said, False
    except (EOFError, OSError):
        return None, False
    return None, True


def take_backend(hunt: Hunt, folder: str) -> None:
    """Makes this process import the backend from a copy. For a GPU, only what is asked for is compiled, and once."""
    torch.set_num_threads(1)
    package = f"multigemm.backends.{hunt.backend}"
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
    multigemm.backends.__path__ = [folder, *multigemm.backends.__path__]
    if not hunt.emulated:
        compile_once(hunt.backend)
    if hunt.backend == "cupy":
        compile_singly()


def _hunt_in_process(hunt: Hunt, folder: str, variants: list[Variant], pipe: Any) -> None:
    """The mutant's own process: takes the backend from the changed copy, hunts, and sends what it found."""
    take_backend(hunt, folder)
    device = torch.device(hunt.device)
    try:
        if hunt.emulated:
            found = hunt_emulated(hunt, device, variants, pipe.send)
        else:
            found = GpuHunt(hunt, device, pipe.send).search(variants)
    except Exception as error:  # a lost device shows wherever the host waits for it next; all else is our own fault
        text = short_text(error)
        found = Verdict("killed" if "CUDA" in text else "failed", "exception", text[:300])
    pipe.send(found)
    pipe.close()
    os._exit(0)  # a mutant may have left a context in which an ordinary end waits for ever


def verdict_of(outcome: Outcome) -> Verdict:
    """What the first finding of an outcome says about the mutant."""
    found = outcome.findings[0]
    no_code = found.oracle == "exception" and any(word in found.text for word in DOES_NOT_COMPILE)
    return Verdict("stillborn" if no_code else "killed", found.oracle, found.text[:200])


def hunt_emulated(hunt: Hunt, device: torch.device, variants: list[Variant], report: Report) -> Verdict:
    """Problems that reach the changed line, then others like them and random ones, until something is seen. For half
    of the time, those that reach it meet the oracles of values and of foreign memory alone, which are quick."""
    begin, subjects = time.monotonic(), emulated.subjects_of(hunt.backend)
    order = chain(((number, False) for number in range(len(variants))), ((number, True) for number in count()))
    met = 0
    for number, further in order:
        spent = time.monotonic() - begin
        if spent > hunt.seconds:
            break
        if not further and spent > hunt.seconds / 2:
            continue
        case, chosen = emulated.problem(hunt.backend, hunt.kernels, variants, number)
        subject = subjects[chosen]
        emulated.choose_listing(hunt.backend, chosen)
        deep = further and number % DEEP == DEEP - 1 and case.groups <= DEEP_GROUPS
        report("runs")
        device_case = DeviceCase.from_case(case, device)
        outcome = examine_device_case(device_case, subject, deep=deep, seed=number)
        if outcome.ok and outcome.ran and further:
            _look_further(device_case, subject, outcome, chosen, None if deep else number)
        if outcome.findings:
            return verdict_of(outcome)
        met += 1
    return Verdict("survived", text=f"{met} problems, {len(variants)} of which reach the line")


def _look_further(device_case: DeviceCase, subject: Subject, outcome: Outcome, chosen: int, number: int | None) -> None:
    """Counts that are left wrong, which show in what is old; and the edge of memory."""
    if chosen == emulated.SHARED:
        run_oracles([other_contents], device_case, subject, outcome)
    if outcome.ok and number is not None:
        run_oracles([edge_of_memory], device_case, subject, outcome, number)


def wait_for(device: torch.device) -> None:
    """Waits for the device, but not for ever: on its own clock, so that a busy host does not look like a hang."""
    begin, stream = time.monotonic(), torch.cuda.current_stream(device) if device.type == "cuda" else None
    while stream is not None and not stream.query():
        if time.monotonic() - begin > BURST_LIMIT:
            raise TimeoutError(f"a few small problems kept the device busy for {BURST_LIMIT} s")
        time.sleep(0.001)


def shuffled(first: int) -> list[int]:
    """The numbers of a burst: what a problem is like goes by its number, and the first ones that fit are taken."""
    rest = list(range(first + 1, first + SPAN))
    random.Random(first).shuffle(rest)
    return [first, *rest]


def listing_of(first: int) -> int:
    """Whether the host lists tiles in a burst: in half of the bursts, other ones in each round through the variants."""
    burst = first // SPAN
    return emulated.UNLISTED if (burst + burst // VARIANTS) % 2 else emulated.PLAIN


class CompiledVariant:
    """One variant under the changed sources."""

    def __init__(self, hunt: Hunt, variant: Variant, device: torch.device) -> None:
        self.case, self.device, self.backend = Case.from_dict(variant.case), device, hunt.backend
        self.spec = spec_of(self.case)
        self.config = next(c for c in Subject(hunt.backend).shipped(self.spec, device) if str(c) == variant.config)
        self.subject = Forced(hunt.backend, self.config)
        self.key = compiler_key(self.backend, self.spec, self.config)

    def codes(self) -> list[str] | None:
        """What the changed source is compiled to; nothing if it is not."""
        try:
            return codes_of(self.backend, self.spec, self.config)
        except Exception:  # whatever a compiler raises
            return None

    def compiles(self) -> bool:
        """Whether it can be made into a plan; one that the device refuses shows in the run."""
        try:
            self.subject.recipe(self.spec, self.device)
        except Exception as error:  # whatever a compiler raises
            return "CUDA" in f"{type(error).__name__}: {error}" and not isinstance(error, CompileError)
        return True

    def takes(self, case: Case) -> bool:
        """Whether the config runs a case, by what is compiled already: each further compilation would cost as much
        as hundreds of problems. A module that only this case needs may not compile."""
        spec = spec_of(case)
        if self.subject.refusals(spec, self.device):
            return False
        try:
            if compiler_key(self.backend, spec, self.config) != self.key:
                return False
            self.subject.recipe(spec, self.device)
        except (InvalidSetting, BackendUnsupported, CompileError):
            return False
        return True

    def problem(self, number: int) -> Case:
        return compiled_problem(self.backend, self.case, self.config, number)

    def run_burst(self, first: int, report: Report) -> tuple[int, Verdict | None]:
        """A burst of problems; how many ran, and what the first finding says."""
        emulated.choose_listing(self.backend, listing_of(first))
        drawn = ((number, self.problem(number)) for number in shuffled(first))
        chosen = list(islice(((number, case) for number, case in drawn if self.takes(case)), BURST))
        if not chosen:
            return 0, None
        device_cases = DeviceCase.build_all([PlacedCase.build(case) for _, case in chosen], self.device)
        pairs = [(device_case, self.subject) for device_case in device_cases]
        report("runs")
        try:
            outcomes = check_pairs(pairs, wait=partial(wait_for, self.device))
        except TimeoutError as error:
            return len(device_cases), Verdict("killed", "hang", str(error))
        for (number, _), device_case, outcome in zip(chosen, device_cases, outcomes, strict=True):
            report("runs")
            if outcome.ok and outcome.ran:
                self.look_deeper(device_case, outcome, number)
            if outcome.findings:
                return len(device_cases), verdict_of(outcome)
        report("compiles")
        return len(device_cases), None

    def look_deeper(self, device_case: DeviceCase, outcome: Outcome, number: int) -> None:
        """The edge of memory for one problem in three, contents that change and sizes that lie for one in eight."""
        if number % 8 == 2:
            run_oracles((other_contents, changed_sizes, lying_sizes), device_case, self.subject, outcome, number)
        elif number % 3 == 0:
            run_oracles([edge_of_memory], device_case, self.subject, outcome, number)


class GpuHunt:
    """One mutant's hunt on a GPU: a few variants meet problems in turn. Its time begins when the device is open."""

    def __init__(self, hunt: Hunt, device: torch.device, report: Report) -> None:
        self.hunt, self.device, self.report = hunt, device, report
        self.begin = time.monotonic()
        self.runs, self.number, self.ran, self.same = list[CompiledVariant](), 0, 0, 0

    def is_over(self, times: float = 1.0) -> bool:
        return time.monotonic() - self.begin > times * self.hunt.seconds

    def burst_of(self, run: CompiledVariant) -> Verdict | None:
        count, found = run.run_burst(self.number, self.report)
        self.number, self.ran = self.number + SPAN, self.ran + count
        return found

    def open_device(self) -> None:
        """Opens the device, which may take longer than all else where many do it at once."""
        torch.zeros(1, device=self.device)

    def search(self, variants: list[Variant]) -> Verdict:
        """Variants whose machine code is another than that of the unchanged sources, each for as long as the next
        compilation may take; then all of them in turn."""
        for variant in variants:
            if found := self.first_look(variant):
                return found
            if len(self.runs) == VARIANTS or self.is_over(1.0 if self.runs else SEARCH_FACTOR):
                break
        while self.runs and not self.is_over():
            if found := self.burst_of(self.runs[self.number // SPAN % len(self.runs)]):
                return found
        if variants and self.same == len(variants):
            return Verdict("same", text=f"the machine code of {self.same} variants")
        met = f"{self.ran} problems of {len(self.runs)} variants, {self.same} others are the same"
        return Verdict("survived", text=met)

    def first_look(self, variant: Variant) -> Verdict | None:
        """Compiles for a variant and, where that gives other machine code, lets it meet problems."""
        started = time.monotonic()
        run = CompiledVariant(self.hunt, variant, self.device)
        codes = run.codes()
        if codes is None:
            return Verdict("stillborn")
        if codes == variant.codes:
            self.same += 1
            return None
        compiling = time.monotonic() - started
        if not self.runs:
            self.open_device()
            self.begin = time.monotonic()
        if not run.compiles():
            return Verdict("stillborn")
        self.runs.append(run)
        compiled = time.monotonic()
        while True:
            if found := self.burst_of(run):
                return found
            if time.monotonic() - compiled > min(compiling, self.hunt.seconds / VARIANTS):
                return None
