"""Entries of every fate on one tiny workload, and a run of them."""

from __future__ import annotations

from pathlib import Path

import torch

from multigemm.__main__ import main
from multigemm.bench import reports
from multigemm.bench.entries import Entry, Prepared, Refused, ceiling_entry
from multigemm.bench.operands import Tensors
from multigemm.bench.reports import Report, Row
from multigemm.bench.runner import Options, Runner, new_report
from multigemm.bench.workloads import DTYPES, Rates, Workload

CPU = torch.device("cpu")
RATES = dict.fromkeys(DTYPES, Rates(1.0, 0.02))
FAST = Options(reps=4, budget_ms=4.0, rates=RATES)
CASE = Workload("tiny", "own", groups=3, n=8, k=16, total=24, distribution="zipf")


def loop(tensors: Tensors, spoil: bool = False) -> Prepared:
    def call() -> None:
        for a, b, out in (products := tensors.products()):
            torch.mm(a, b, out=out)
        if spoil:
            products[-1][2][-1, -1] += 100

    return Prepared(call, tensors.out, "loop")


def refuses(tensors: Tensors) -> Prepared:
    raise Refused("K is 16, and this needs 17")


def breaks(tensors: Tensors) -> Prepared:
    raise RuntimeError("kernel exploded\nwith details")


def writes_nothing(tensors: Tensors) -> Prepared:
    return Prepared(lambda: None, tensors.out)


ENTRIES = [
    Entry("right", "backend", loop),
    Entry("wrong", "backend", lambda t: loop(t, spoil=True)),
    Entry("refuses", "peer", refuses),
    Entry("breaks", "peer", breaks),
    Entry("idle", "peer", writes_nothing),
    ceiling_entry(),
]


def run(cases: list[Workload], entries: list[Entry], path: Path | None = None, options: Options = FAST) -> Report:
    report = new_report(CPU, {case.dtype for case in cases}, options, {"quack": "not installed"})
    return Runner(lambda case: entries, CPU, options, report, path).run(cases)


def measured(folder: Path, words: str) -> Report:
    """The report of `multigemm bench WORDS`, measured on the CPU in no time."""
    quick = "--device cpu --floor 1,0.02 --budget-ms 4 --quiet --json-only"
    assert main(["bench", *words.split(), *quick.split(), "--out", str(folder)]) == 0
    return reports.read(folder)


def by_name(report: Report) -> dict[str, Row]:
    return {row.entry: row for row in report.rows}
