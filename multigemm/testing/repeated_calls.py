"""Random series of calls of `multigemm.grouped_gemm`, as a program makes them, with a change between two calls.

A fuzzer of problems makes every problem anew. Here calls come back: with the same operands, with new contents, with new
memory, with memory that was freed and taken again under other strides, with other sizes, on another stream. So launches
that were kept from earlier calls serve later ones, and each result is judged. A series begins with a case as the fuzzer
draws it, of whole numbers, so that one wrong bit shows. All backends are called in turn on the same memory, so that the
answer is computed once and the device waited for once. With `--kinds`, all series and processes share so many
structures, each with one other layout and extents of one divisibility: a GPU then spends its time on calls and not on
compiling. Each process begins with another structure, and finds the others' kernels in the disk cache.

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
from torch import Tensor

from multigemm.api import grouped_gemm
from multigemm.errors import BackendUnsupported
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.problem.spec import Form
from multigemm.reference.verify import judge
from multigemm.testing.campaigns import parser_of, side_by_side
from multigemm.testing.case import INDICES, Case
from multigemm.testing.deep_oracles import regroup
from multigemm.testing.oracles import Finding, Outcome, inspect
from multigemm.testing.placed_case import DeviceCase, PlacedCase, arguments, bits
from multigemm.testing.strategies import Limits, draw_layout, keep_divisibility, random_case, redrawn, settled
from multigemm.testing.subject import compile_singly

FORMS: tuple[Form, ...] = ("jagged_m", "jagged_m", "jagged_m", "jagged_n", "jagged_k", "batched", "masked", "per_group")
LIMITS = Limits(work=1 << 15, groups=17, forms=FORMS, longest=133, modes=("int",), quantised=10, fused=10)


@dataclass
class Count:
    """The calls of each backend, those that the cache served and the others, and the series that it refused; the forms
    of the problems, wrong results, and processes that gave no answer."""

    calls: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    forms: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class _Series:
    """Calls of one kind by several backends in turn, with something changed in between. `free`: extents may be of any
    divisibility, so that other kernels are compiled."""

    def __init__(self, kind: int, chance: Random, backends: Sequence[str], device: torch.device, free: bool) -> None:
        self.kind, draw = random_case(kind, LIMITS), Random(kind)
        operand = draw.choice("ab")
        self.layouts = [{operand: getattr(self.kind, operand)}, {operand: draw_layout(draw)}]
        self.chance, self.backends, self.device, self.free = chance, list(backends), device, free
        self.first = [5]  # the other layout, so that whatever is to be compiled is compiled early
        self._place(self._redrawn(self.kind))

    def _redrawn(self, case: Case) -> Case:
        other = redrawn(case, self.chance, LIMITS)
        return other if self.free else keep_divisibility(self.kind, other)

    def _place(self, case: Case) -> None:
        """Moves the operands to new memory, often to that which they had before and which is free again."""
        self.device_case: Any = None
        self.given: Any = None
        self.device_case = DeviceCase.from_case(case, self.device)
        self.right: list[Tensor] = []
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
        self.right = []
        if case.where != "device" or any(getattr(case.fused, name).host for name in INDICES):
            self._tell()

    def change(self) -> None:
        """Changes something that a program changes between two calls; often nothing."""
        chance, case = self.chance, self.device_case.placed.case
        what, seed = self.first.pop() if self.first else chance.randrange(12), chance.randrange(1 << 30)
        if what < 3:
            self._fill(replace(case, seed=seed))
        elif what < 5:
            kept = self.device_case  # alive until the new memory is taken
            self._place(replace(case, seed=seed))
            del kept
        elif what == 5:
            self.layouts.reverse()
            self._place(settled(replace(case, **self.layouts[0]), LIMITS))
        elif what == 6:
            self._place(self._redrawn(case))
        elif what < 10 and (other := regroup(case, seed)) is not None:
            self._fill(other)
        elif what == 10:
            self._tell()

    def calls(self, count: Count, until: float) -> None:
        """Calls each backend, some twice, waits for the device once, judges results and counts. Who refuses is out."""
        device_case, made = self.device_case, []
        a, b, keywords = self.given
        inputs, pristine = (x.view(torch.int64) for x in (device_case.inputs, device_case.pristine))
        case, names, chance = device_case.placed.case, self.backends, self.chance
        twice = chance.choices(names, k=chance.randrange(len(names) + 1) // 2)
        for backend in chance.sample(names, len(names)) + twice:
            if time.monotonic() > until:  # compiling may take longer than all calls
                break
            served = LAUNCHES.served
            device_case.prefill(0)
            try:
                got = grouped_gemm(a, b, backend=backend, **keywords)
            except BackendUnsupported:
                count.refused[backend] += backend in self.backends
                self.backends = [name for name in self.backends if name != backend]
                continue
            (count.hits if LAUNCHES.served > served else count.misses)[backend] += 1
            count.calls[backend] += 1
            count.forms[case.form] += 1
            written = device_case.outputs if case.given else got
            tensors = [x.clone() if case.given else x for x in (written if isinstance(written, list) else [written])]
            made.append((backend, [*tensors, (inputs != pristine).any()]))
        for (backend, _), home in zip(made, _on_host([tensors for _, tensors in made]), strict=True):
            for finding in self._judge(*home):
                count.wrong.append(f"call {count.calls.total()}: {backend}: {case!r}: {finding}")

    def _judge(self, raw: Tensor, got: list[Tensor]) -> list[Finding]:
        """What is wrong in a result, which is given as bytes and as tensors, and a flag: whether inputs were written.

        One that equals a right result of the same case in every byte needs no second judgement.
        """
        if any(torch.equal(raw, known) for known in self.right):
            return []
        placed: PlacedCase = self.device_case.placed
        outcome, (*results, touched) = Outcome(""), got
        if placed.case.given:
            inspect(placed, results[0], placed.prefills[0], outcome, rho=False)
        else:
            listed = placed.case.form == "per_group"
            verdict = judge(placed.answer, results if listed else results[0], suspicion=False)
            outcome.findings += [] if verdict else [Finding("value", verdict.text)]
        if touched:
            outcome.findings.append(Finding("inputs", "the operands or their surroundings were written"))
        if outcome.ok:
            self.right.append(raw)
        return outcome.findings


def _on_host(lists: list[list[Tensor]]) -> list[tuple[Tensor, list[Tensor]]]:
    """Each list as the bytes of its tensors and as tensors on the host, after one copy of all of them."""
    raws = [torch.cat([bits(x).view(-1).view(torch.uint8) for x in tensors]) for tensors in lists]
    homes = torch.cat(raws).cpu().split_with_sizes([raw.numel() for raw in raws]) if raws else ()
    found = []
    for tensors, raw in zip(lists, homes, strict=True):
        parts = raw.split_with_sizes([x.nbytes for x in tensors])
        found.append((raw, [y.clone().view(x.dtype).view(x.shape) for x, y in zip(tensors, parts, strict=True)]))
    return found


def run(
    backends: Sequence[str], calls: int, seed: int, device: str, seconds: float = math.inf, kinds: Sequence[int] = ()
) -> Count:
    """Makes so many calls of `grouped_gemm` for each backend in the mean, in series of one kind each.

    `kinds` are seeds (default: any). Each has a series in their order before chance picks.
    """
    chance, count, until = Random(seed), Count(), time.monotonic() + seconds
    if device == "cuda":
        compile_singly()
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []  # type: ignore[no-untyped-call]
    lengths, first = (3, 20, 60) if device == "cpu" else (20, 60, 200), iter(kinds)
    wanted = calls * len(backends)
    while (made := count.calls.total()) < wanted and time.monotonic() < until:
        kind = next(first, None)
        if kind is None:
            kind = chance.choice(kinds) if kinds else chance.randrange(1 << 30)
        series, end = _Series(kind, chance, backends, torch.device(device), not kinds), made + chance.choice(lengths)
        while series.backends and count.calls.total() < min(end, wanted) and time.monotonic() < until:
            stream = chance.choice(streams) if streams and chance.random() < 0.15 else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                series.calls(count, until)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            series.change()
    return count


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns 1 if a result was wrong."""
    parser = parser_of(__doc__ or "", "cpu", math.inf)
    add, cuda = parser.add_argument, torch.cuda.is_available()
    add("--calls", type=int, default=2000, help="calls for each backend (default: 2000)")
    add("--kinds", type=int, default=16 * cuda, help="structures to draw from (default: 16 on a GPU, else 0: no limit)")
    options = parser.parse_args(arguments)
    kinds = [*range(options.seed, options.seed + options.kinds)]
    names, count = options.backends.split(","), Count()
    start, share = time.monotonic(), -(-options.calls // options.jobs)
    calls = []
    for job in range(options.jobs):
        calls.append((names, share, options.seed + 1000 * job, options.device, options.seconds, kinds))
        kinds = kinds[1:] + kinds[:1]  # the next process begins with another kind, whose kernels it leaves on disk
    count.failures = side_by_side(run, calls, count)
    for name in names:
        print(
            f"{name}: {count.calls[name]} calls, {count.hits[name]} served by the cache, {count.misses[name]} not, "
            f"{count.refused[name]} series refused"
        )
    print(f"{count.calls.total()} calls, {len(count.wrong)} wrong, {time.monotonic() - start:.0f} s")
    for line in [*count.wrong[:5], *count.failures[:2]]:
        print(f"  {line}")
    if options.json:
        options.json.write_text(json.dumps(vars(count), indent=1))
    return int(bool(count.wrong or count.failures))


if __name__ == "__main__":
    sys.exit(main())
