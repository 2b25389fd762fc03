"""Which reports of racecheck are none, and why: report by report, never a whole kernel.

racecheck does not follow one thread's arrival at an mbarrier on behalf of many that a named barrier has
gathered. Triton's specialised warps hand over in this way, so the tool reports them; it reports the same
of a kernel whose order is certain (multigemm.testing.control). Only while it does, a report is set aside
here, and only if each access that it names lies in one hand-over that is listed with its reason.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache

from multigemm.testing.source_sites import device_code

HEAD = re.compile(r"Race reported between (\w+) access at (\S+?)\+0x[0-9a-f]+ in (\S+?):(\d+)")
TAIL = re.compile(r"and (\w+) access at (\S+?)\+0x[0-9a-f]+ in (\S+?):(\d+)")
SHOWN = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


@dataclass(frozen=True, slots=True)
class HandOver:
    """An order that racecheck does not see: the kernel, the functions whose lines take part, and what orders them."""

    kernel: str
    functions: frozenset[tuple[str, str]]
    reason: str


WORDS = (
    "a tile's words: stores, bar.warp.sync, one arrival at `issued`, acquired by the readers' try_wait; their loads, "
    "bar.sync of their warps, one arrival of each partition at `taken`, acquired before the next stores"
)
START = (
    "Triton's own start and end of specialised warps: arguments and numbers of partitions in shared memory, between "
    "barrier.sync 1 of all warps of the block"
)
LINES = (
    "a block of unaligned weights: copies, an arrival of each copying thread at `w_full` once its copies are there, "
    "acquired by the readers' try_wait; their loads, bar.sync of their warps, one arrival of each partition at "
    "`w_empty`, acquired before the next copies"
)
COPIED = frozenset(
    {("hopper_shift_b.py", "copy16"), ("hopper_shift_b.py", "copy_some"), ("hopper_shift_b.py", "fragment")}
)
MAIL = frozenset({("hopper_tiles.py", "publish"), ("hopper_tiles.py", "take")})

HAND_OVERS: dict[str, tuple[HandOver, ...]] = {
    "triton": (
        *(
            HandOver(kernel, functions, reason)
            for kernel, file in (("hopper_kernel", "hopper.py"), ("shift_b_kernel", "hopper_shift_b.py"))
            for functions, reason in ((MAIL, WORDS), (frozenset({(file, kernel)}), START))
        ),
        HandOver("shift_b_kernel", COPIED, LINES),
        HandOver("list_kernel", frozenset({("lists.py", "list_kernel")}), START),
    ),
}
"""By backend."""


@dataclass(slots=True)
class Report:
    """One race: its accesses as (read or write, kernel, file, line), the first against each of the others."""

    accesses: list[tuple[str, str, str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        first, *rest = (f"{kind} {file}:{line}" for kind, _, file, line in self.accesses)
        return f"{self.accesses[0][1]}: {first} against {', '.join(dict.fromkeys(rest))}"


def reports(text: str) -> tuple[list[Report], bool]:
    """The races in a tool's output, and whether it shows as many as it counts."""
    found = list[Report]()
    for line in text.splitlines():
        for pattern in (HEAD, TAIL):
            if match := pattern.search(line):
                kind, kernel, file, number = match.groups()
                if pattern is HEAD:
                    found.append(Report())
                if found:
                    found[-1].accesses.append((kind, kernel, file, int(number)))
    counted = SHOWN.search(text)
    return found, counted is not None and int(counted.group(1)) == len(found)


@cache
def _functions(backend: str, file: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of the functions of a backend's file."""
    path = device_code(backend) / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return tuple((n.lineno, n.end_lineno or n.lineno, n.name) for n in tree.body if isinstance(n, ast.FunctionDef))


def function_at(backend: str, file: str, line: int) -> str:
    """The function of a backend's file that a line belongs to; empty if to none."""
    return next((name for first, last, name in _functions(backend, file) if first <= line <= last), "")


def order_of(backend: str, report: Report) -> HandOver | None:
    """The listed hand-over that all accesses of a report belong to."""
    places = {(file, function_at(backend, file, line)) for _, _, file, line in report.accesses}
    kernels = {kernel for _, kernel, _, _ in report.accesses}
    fits = (known for known in HAND_OVERS.get(backend, ()) if kernels == {known.kernel} and places <= known.functions)
    return next(fits, None)
