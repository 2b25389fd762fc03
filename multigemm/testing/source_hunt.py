"""The hunt for one planted fault in a real kernel: what all hunts share, and the one in emulation.

In emulation kernels run as Python: the problems that reach the changed line come first
(multigemm.testing.source_trace), others like them and random ones after. On a GPU see
multigemm.testing.source_chase.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any

from multigemm.testing.source_live import Variant

BROKEN = ("CompilationError", "CompileError", "SyntaxError", "NameError", "TypingError", "CompileException",
          "IndentationError", "UnsupportedLanguageConstruct", "AttributeError", "LoweringError")  # fmt: skip
SURVIVED = {"state": "survived", "oracle": "", "text": ""}
STILLBORN = SURVIVED | {"state": "stillborn"}
DEEP = 4
"""One problem in so many meets the expensive oracles in emulation, the others the edge of memory."""
FEW = 100
"""Groups up to which the expensive oracles are bearable in emulation: 300 take them 37 s."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """How mutants of a backend are hunted: where, and for how long each."""

    backend: str
    device: str = "cpu"
    seconds: float = 45.0

    @property
    def emulated(self) -> bool:
        return self.device == "cpu"


def verdict(outcome: Any) -> dict[str, str]:
    """What the first finding of an outcome says about the mutant."""
    found = outcome.findings[0]
    broken = found.oracle == "exception" and any(word in found.text for word in BROKEN)
    return {"state": "stillborn" if broken else "killed", "oracle": found.oracle, "text": found.text[:200]}


def also(outcome: Any, *steps: Callable[[], object]) -> None:
    """Further oracles on a right outcome; a launch that fails under one is that oracle's finding."""
    from multigemm.testing.oracles import Finding, short_text

    try:
        for step in steps:
            step()
    except Exception as error:  # whatever a backend raises
        outcome.findings.append(Finding("exception", short_text(error)))


def hunt_emulated(hunt: Hunt, place: Any, variants: list[Variant], say: Callable[[str], None]) -> dict[str, str]:
    """Problems that reach the changed line, then others like them and random ones, until something is seen. For half
    of the time, those that reach it meet the oracles of values and of foreign memory alone, which are quick."""
    from multigemm.testing.mutants import examine_stand
    from multigemm.testing.source_trace import problem, subjects_of, use
    from multigemm.testing.world import Stand, World

    begin, subjects = time.monotonic(), subjects_of(hunt.backend)
    order = chain(((number, False) for number in range(len(variants))), ((number, True) for number in count()))
    met = 0
    for number, further in order:
        spent = time.monotonic() - begin
        if spent > hunt.seconds:
            break
        if not further and spent > hunt.seconds / 2:
            continue
        case, chosen = problem(hunt.backend, variants, number)
        subject = subjects[chosen]
        use(hunt.backend, chosen)
        deep = further and number % DEEP == DEEP - 1 and case.groups <= FEW
        say("runs")
        stand = Stand.build(World.build(case), place)
        outcome = examine_stand(stand, subject, deep=deep, seed=number)
        if outcome.ok and outcome.ran and further:
            _look_further(stand, subject, outcome, chosen, None if deep else number)
        if outcome.findings:
            return verdict(outcome)
        met += 1
    return SURVIVED | {"text": f"{met} problems, {len(variants)} of which reach the line"}


def _look_further(stand: Any, subject: Any, outcome: Any, chosen: int, number: int | None) -> None:
    """Counts that are left wrong, which show in what is old; and the edge of memory."""
    from multigemm.testing.cliff import on_a_cliff
    from multigemm.testing.concurrency import other_contents
    from multigemm.testing.source_trace import SHARED

    if chosen == SHARED:
        also(outcome, partial(other_contents, stand, subject, outcome))
    if outcome.ok and number is not None:
        also(outcome, partial(on_a_cliff, stand, subject, outcome, number))
