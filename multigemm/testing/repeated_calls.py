"""Random series of calls of `multigemm.grouped_gemm`, as a program makes them, with a change between two calls.

A fuzzer of problems makes every problem anew. Here calls come back: with the same operands, with new contents, with new
memory, with memory that was freed and taken again under other strides, with other sizes, on another stream. So launches
that were kept from earlier calls serve later ones, and each result is judged. A series begins with a case as the fuzzer
draws it, of whole numbers, so that one wrong bit shows. With `--kinds`, all series and processes share so many
structures, each with one other layout: a GPU then spends its time on calls and not on compiling.

    python -m multigemm.testing.repeated_calls --backends cupy,triton --calls 50000
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from multigemm.api import grouped_gemm
from multigemm.errors import BackendUnsupported
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.problem.spec import Form
from multigemm.reference.verify import judge
from multigemm.testing.campaigns import parser_of, side_by_side
from multigemm.testing.case import INDICES, Case
from multigemm.testing.deep_oracles import regroup
from multigemm.testing.oracles import Finding, Outcome, fetch, inspect
from multigemm.testing.placed_case import DeviceCase, PlacedCase, arguments
from multigemm.testing.strategies import Limits, draw_layout, random_case, redrawn, settled

FORMS: tuple[Form, ...] = ("jagged_m", "jagged_m", "jagged_m", "jagged_n", "jagged_k", "batched", "masked", "per_group")
LIMITS = Limits(work=1 << 15, groups=17, forms=FORMS, longest=133, modes=("int",), quantised=10, fused=10)


@dataclass
class Count:
    """How many calls were made, served by the cache, refused, and wrong; and processes that gave no answer."""

    backend: str
    calls: int = 0
    hits: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class _Series:
    """Calls of one kind, each with something changed."""

    def __init__(self, kind: int, chance: Random, backend: str, device: torch.device) -> None:
        case, draw = random_case(kind, LIMITS), Random(kind)
        operand = draw.choice("ab")
        self.layouts = [{operand: getattr(case, operand)}, {operand: draw_layout(draw)}]
        self.chance, self.backend, self.device = chance, backend, device
        self._place(redrawn(case, chance, LIMITS))

    def _place(self, case: Case) -> None:
        """Moves the operands to new memory, often to that which they had before and which is free again."""
        self.device_case: Any = None
        self.given: Any = None
        self.device_case = DeviceCase.from_case(case, self.device)
        self._tell()

    def _tell(self) -> None:
        """Replaces tensors, lists and arrays by new ones with the same contents."""
        placed = self.device_case.placed
        self.given = arguments(placed.case, placed.layout, self.device_case.inputs, self.device_case.outputs)

    def _fill(self, case: Case) -> None:
        """Writes other contents or sizes into the same memory; sizes on the host become new objects."""
        placed = PlacedCase.build(case)
        inputs, prefills = self.device_case.inputs, tuple(x.to(self.device) for x in placed.prefills)
        inputs.copy_(placed.inputs)
        self.device_case = replace(self.device_case, placed=placed, prefills=prefills, pristine=inputs.clone())
        if case.where != "device" or any(getattr(case.fused, name).host for name in INDICES):
            self._tell()

    def change(self) -> None:
        """Changes something that a program changes between two calls; often nothing."""
        chance, case = self.chance, self.device_case.placed.case
        what, seed = chance.randrange(12), chance.randrange(1 << 30)
        if what < 3:
            self._fill(replace(case, seed=seed))
        elif what < 5:
            kept = self.device_case  # alive until the new memory is taken
            self._place(replace(case, seed=seed))
            del kept
        elif what == 5:
            self._place(settled(replace(case, **chance.choice(self.layouts)), LIMITS))
        elif what == 6:
            self._place(redrawn(case, chance, LIMITS))
        elif what < 10 and (other := regroup(case, seed)) is not None:
            self._fill(other)
        elif what == 10:
            self._tell()

    def call(self) -> Outcome:
        """Makes one call and returns what is wrong in its result."""
        device_case, outcome = self.device_case, Outcome(self.backend)
        placed: PlacedCase = device_case.placed
        device_case.prefill(0)
        a, b, keywords = self.given
        got = grouped_gemm(a, b, backend=self.backend, **keywords)
        if placed.case.given:
            inspect(placed, fetch(device_case), placed.prefills[0], outcome, rho=False)
        elif not (verdict := judge(placed.answer, _on_host(got), suspicion=False)):
            outcome.findings.append(Finding("value", verdict.text))
        if not torch.equal(device_case.inputs, device_case.pristine):
            outcome.findings.append(Finding("inputs", "the operands or their surroundings were written"))
        return outcome


def _on_host(x: Any) -> Any:
    return [t.cpu() for t in x] if isinstance(x, list) else x.cpu()


def run(
    backend: str, calls: int, seed: int, device: str, seconds: float = math.inf, kinds: Sequence[int] = ()
) -> Count:
    """Makes so many calls of `grouped_gemm`, in series of one kind each; `kinds` are seeds (default: any)."""
    chance, count, until = Random(seed), Count(backend), time.monotonic() + seconds
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []  # type: ignore[no-untyped-call]
    while count.calls < calls and time.monotonic() < until:
        kind = chance.choice(kinds) if kinds else chance.randrange(1 << 30)
        series = _Series(kind, chance, backend, torch.device(device))
        for _ in range(chance.choice((3, 20, 60)) if device == "cpu" else chance.choice((20, 60, 200))):
            stream = chance.choice(streams) if streams and chance.random() < 0.15 else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                again = _one(series, count)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            if not again or count.calls >= calls or time.monotonic() > until:
                break
            series.change()
    return count


def _one(series: _Series, count: Count) -> bool:
    """Makes one call and judges its result; false where the backend refuses such problems."""
    case, served = series.device_case.placed.case, LAUNCHES.served
    try:
        outcome = series.call()
    except BackendUnsupported:
        count.refused += 1
        return False
    count.calls += 1
    count.hits += LAUNCHES.served - served
    count.forms[case.form] += 1
    count.wrong += [f"call {count.calls}: {case!r}: {finding}" for finding in outcome.findings]
    return True


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns 1 if a result was wrong."""
    parser = parser_of(__doc__ or "", "cpu", math.inf)
    add, cuda = parser.add_argument, torch.cuda.is_available()
    add("--calls", type=int, default=2000, help="calls for each backend (default: 2000)")
    add("--kinds", type=int, default=16 * cuda, help="structures to draw from (default: 16 on a GPU, else 0: no limit)")
    options = parser.parse_args(arguments)
    kinds = range(options.seed, options.seed + options.kinds)
    found = []
    for name in options.backends.split(","):
        start, count = time.monotonic(), Count(name)
        share = -(-options.calls // options.jobs)
        seeds = [options.seed + 1000 * job for job in range(options.jobs)]
        calls = [(name, share, seed, options.device, options.seconds, kinds) for seed in seeds]
        count.failures = side_by_side(run, calls, count)
        found.append(count)
        print(
            f"{name}: {count.calls} calls, {count.hits} served by the cache, {count.refused} cases refused, "
            f"{len(count.wrong)} wrong, {time.monotonic() - start:.0f} s"
        )
        for line in [*count.wrong[:5], *count.failures[:2]]:
            print(f"  {line}")
    if options.json:
        options.json.write_text(json.dumps([vars(x) for x in found], indent=1))
    return int(any(x.wrong or x.failures for x in found))


if __name__ == "__main__":
    sys.exit(main())
