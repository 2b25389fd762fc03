"""The hunt for one planted fault on a GPU: in the mutant's own process.

The hunt is directed. Each compilation costs seconds and a problem costs milliseconds, so a few variants
that hold the changed line, and whose machine code it changes, are compiled one after the other, and each meets
many problems: sizes at the edges of its config's tiles, ordinary ones, and other forms and epilogues of the same
dtypes and layouts, which most kernels decide on at run time.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from multigemm.errors import BackendUnsupported, CompileError, InvalidSetting
from multigemm.testing.source_hunt import STILLBORN, SURVIVED, Hunt, also, verdict
from multigemm.testing.source_live import Variant, codes_of, compiler_key
from multigemm.testing.source_trace import PLAIN, UNLISTED

VARIANTS, TRIED = 6, 14
"""Variants whose machine code a mutant changes, that meet problems in turn; and how many are compiled to find them."""
SEARCH = 4.0
"""Times the seconds of a hunt that may pass before a first variant is found whose machine code changes."""
ENDLESS = 5.0
"""Seconds that a burst of small problems may keep a GPU busy, which others use as well."""
BURST = 8
"""Problems in a row of one variant."""
MULTITUDES = (2, 3, 4, 7, 10, 11, 14)
"""Bursts that begin with 66,000 groups, which take a second or two."""
SPAN = 96
"""Problems that are drawn for a burst: of those that need what is compiled already it takes the first."""


def _otherwise(case: Any, number: int, choose: Any, limits: Any) -> Any:
    """With what a kernel decides on at run time drawn anew: factors, form, epilogue."""
    from multigemm.testing.case import dtype_name
    from multigemm.testing.kinds import cousin
    from multigemm.testing.strategies import factors

    case = replace(case, alpha=choose.choice(factors(case)))
    if number % 2:
        case = cousin(case, choose, limits)
    if number % 4 == 1:
        return replace(case, beta=0, c_dtype="", alias=False, bias="", activation=None)
    if number % 4 == 2 and case.dtype != "int8":
        own, activation = dtype_name(case.result_dtype), choose.choice((None, "gelu", "gelu_tanh", "silu"))
        return replace(case, beta=0.5, c_dtype=own, alias=False, bias="n", bias_dtype=own, activation=activation)
    return case


def wait_for(place: Any) -> None:
    """Waits for the device, but not for ever: on its own clock, so that a busy host does not look like a hang."""
    import torch

    begin, stream = time.monotonic(), torch.cuda.current_stream(place) if place.type == "cuda" else None
    while stream is not None and not stream.query():
        if time.monotonic() - begin > ENDLESS:
            raise TimeoutError(f"a few small problems kept the device busy for {ENDLESS} s")
        time.sleep(0.001)


@contextmanager
def timed(spent: Counter[str], name: str) -> Iterator[None]:
    """Adds the seconds of a step."""
    begin = time.monotonic()
    try:
        yield
    finally:
        spent[name] += time.monotonic() - begin  # type: ignore[assignment]


def shuffled(first: int) -> list[int]:
    """The numbers of a burst: what a problem is like goes by its number, and the first ones that fit are taken."""
    rest = list(range(first + 1, first + SPAN))
    random.Random(first).shuffle(rest)
    return [first, *rest]


def unlisted(first: int) -> int:
    """Whether the host lists tiles in a burst: in half of them, which are others in each round through the variants."""
    burst = first // SPAN
    return UNLISTED if (burst + burst // VARIANTS) % 2 else PLAIN


class Run:
    """One variant under the changed sources."""

    def __init__(self, hunt: Hunt, variant: Variant, place: Any, spent: Counter[str]) -> None:
        from multigemm.testing.case import Case
        from multigemm.testing.choice import spec_of
        from multigemm.testing.subject import Subject

        self.case, self.place, self.backend = Case.from_dict(variant.case), place, hunt.backend
        self.spent = spent
        self.spec, self.subject = spec_of(self.case), Subject(hunt.backend)
        self.config = next(c for c in self.subject.shipped(self.spec, place) if str(c) == variant.config)
        self.subject.force(self.config)
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
            self.subject.recipe(self.spec, self.place)
        except Exception as error:  # whatever a compiler raises
            return "CUDA" in f"{type(error).__name__}: {error}" and not isinstance(error, CompileError)
        return True

    def takes(self, case: Any) -> bool:
        """Whether the config runs a case, by what is compiled already: each further compilation would cost as much
        as hundreds of problems. A module that only this case needs may not compile."""
        from multigemm.testing.choice import spec_of

        spec = spec_of(case)
        if self.subject.refusals(spec, self.place):
            return False
        try:
            if compiler_key(self.backend, spec, self.config) != self.key:
                return False
            self.subject.recipe(spec, self.place)
        except (InvalidSetting, BackendUnsupported, CompileError):
            return False
        return True

    def problem(self, number: int) -> Any:
        """At the edges of the tiles or ordinary; and, where a kernel decides on them at run time, of another form,
        with another epilogue or none, with other factors."""
        from multigemm.testing.case import dtype_name
        from multigemm.testing.edges import WORK, alike, at_edges, crowd, multitude
        from multigemm.testing.kinds import redrawn
        from multigemm.testing.strategies import Limits, RandomChooser

        choose, ordinary, case = RandomChooser(number), Limits(work=1 << 16), self.case
        if self.backend != "triton":
            case = _otherwise(case, number, choose, ordinary)
        case = self._elsewhere(case, number, choose)
        if number % 10 == 6 and case.form in ("jagged_m", "jagged_n"):
            case = replace(case, shared=not case.shared)
        if number % SPAN == 0 and number // SPAN in MULTITUDES and case.form in ("jagged_m", "jagged_n"):
            return multitude(replace(case, shared=True) if self.backend != "triton" else case, choose, ordinary)
        if number % 8 == 3 and (case.jagged or case.form == "masked"):
            case = crowd(case, self.config, choose)
        elif number % 5 == 4:
            return alike(case, redrawn(case, choose, ordinary))
        else:
            case = at_edges(case, self.config, choose, Limits(work=WORK), free=number % 3 == 1)
        if number % 3 == 0 and case.given and case.c_dtype == dtype_name(case.result_dtype):
            return replace(case, alias=True, c=case.out)  # where a tile that is done twice shows
        return case

    def _elsewhere(self, case: Any, number: int, choose: Any) -> Any:
        """The same, lying otherwise."""
        from multigemm.testing.case import Layout
        from multigemm.testing.strategies import draw_layout

        if number % 8 in (1, 4):  # a result without gaps
            case = replace(case, out=Layout())
        if number % 8 == 5:  # or two columns apart, or in lines of whole pieces, or by columns
            case = replace(case, given=True, out=Layout(step=2) if number % 16 == 5 else Layout(pad=-16))
        if number % 8 == 6:
            case = replace(case, given=True, out=Layout("col"))
        if number % 6 == 2:  # strides are known at run time only, where the compiler's key does not name them
            case = replace(case, a=draw_layout(choose), b=draw_layout(choose))
        if number % 6 == 4:
            case = replace(case, a=Layout(case.a.order), b=Layout(case.b.order))
        if number % 12 == 8:  # two elements apart, where the compiler takes that for rows
            a, b = (Layout(step=2) if side.order == "row" else side for side in (self.case.a, self.case.b))
            case = replace(case, a=a, b=b, aligned=False)
        return case

    def meet(self, first: int, say: Callable[[str], None]) -> tuple[int, dict[str, str] | None]:
        """A burst of problems; how many ran, and what the first finding says."""
        from multigemm.testing.oracles import check_many
        from multigemm.testing.source_trace import use
        from multigemm.testing.world import Stand, World

        use(self.backend, unlisted(first))
        with timed(self.spent, "draw"):
            drawn = ((number, self.problem(number)) for number in shuffled(first))
            chosen = list(islice(((number, case) for number, case in drawn if self.takes(case)), BURST))
        if not chosen:
            return 0, None
        with timed(self.spent, "build"):
            stands = Stand.build_all([World.build(case) for _, case in chosen], self.place)
        say("runs")
        try:
            with timed(self.spent, "run"):
                outcomes = check_many(stands, self.subject, partial(wait_for, self.place))
        except TimeoutError as error:
            return len(stands), {"state": "killed", "oracle": "hang", "text": str(error)}
        for (number, _), stand, outcome in zip(chosen, stands, outcomes, strict=True):
            say("runs")
            if outcome.ok and outcome.ran:
                with timed(self.spent, "deep"):
                    self.look_deeper(stand, outcome, number)
            if outcome.findings:
                return len(stands), verdict(outcome)
        say("compiles")
        return len(stands), None

    def look_deeper(self, stand: Any, outcome: Any, number: int) -> None:
        """The edge of memory for one problem in three, contents that change and sizes that lie for one in eight."""
        from multigemm.testing import concurrency
        from multigemm.testing.cliff import on_a_cliff

        seen = (stand, self.subject, outcome, number)
        if number % 8 == 2:
            changed = partial(concurrency.changed_sizes, *seen, captured=False)
            also(outcome, partial(concurrency.other_contents, *seen[:3]), changed, partial(concurrency.lies, *seen))
        elif number % 3 == 0:
            also(outcome, partial(on_a_cliff, *seen))


def hunt_on_gpu(hunt: Hunt, place: Any, variants: list[Variant], say: Callable[[str], None]) -> dict[str, Any]:
    """A few variants meet problems in turn, until the time is over."""
    chase = _Chase(hunt, place, say)
    found = chase.through(variants)
    return found | {"spent": {name: round(float(seconds), 2) for name, seconds in chase.spent.items()}}


class _Chase:
    """One mutant's hunt on a GPU. Its time begins when the device is open."""

    def __init__(self, hunt: Hunt, place: Any, say: Callable[[str], None]) -> None:
        self.hunt, self.place, self.say = hunt, place, say
        self.begin, self.spent = time.monotonic(), Counter[str]()
        self.runs, self.number, self.ran, self.same = list[Run](), 0, 0, 0

    def over(self, times: float = 1.0) -> bool:
        return time.monotonic() - self.begin > times * self.hunt.seconds

    def burst(self, run: Run) -> dict[str, str] | None:
        count, found = run.meet(self.number, self.say)
        self.number, self.ran = self.number + SPAN, self.ran + count
        return found

    def open_device(self) -> None:
        """Which may take longer than all else where many do it at once."""
        import torch

        torch.zeros(1, device=self.place)

    def through(self, variants: list[Variant]) -> dict[str, str]:
        """Variants whose machine code is another than that of the unchanged sources, each for as long as the next
        compilation may take; then all of them in turn."""
        for variant in variants:
            if found := self.first_look(variant):
                return found
            if len(self.runs) == VARIANTS or self.over(1.0 if self.runs else SEARCH):
                break
        while self.runs and not self.over():
            if found := self.burst(self.runs[self.number // SPAN % len(self.runs)]):
                return found
        if variants and self.same == len(variants):
            return SURVIVED | {"state": "same", "text": f"the machine code of {self.same} variants"}
        return SURVIVED | {"text": f"{self.ran} problems of {len(self.runs)} variants, {self.same} others are the same"}

    def first_look(self, variant: Variant) -> dict[str, str] | None:
        """Compiles for a variant and, where that gives other machine code, lets it meet problems."""
        started = time.monotonic()
        with timed(self.spent, "compile"):
            run = Run(self.hunt, variant, self.place, self.spent)
            codes = run.codes()
        if codes is None:
            return STILLBORN
        if codes == variant.codes:
            self.same += 1
            return None
        compiling = time.monotonic() - started
        if not self.runs:
            with timed(self.spent, "device"):
                self.open_device()
            self.begin = time.monotonic()
        with timed(self.spent, "compile"):
            if not run.compiles():
                return STILLBORN
        self.runs.append(run)
        compiled = time.monotonic()
        while True:
            if found := self.burst(run):
                return found
            if time.monotonic() - compiled > min(compiling, self.hunt.seconds / VARIANTS):
                return None
