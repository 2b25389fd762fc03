"""What the cupy backend chooses today, held to the times in the kept reports: no choice is slower than a measured one.

A report names the class of each workload and the config that was chosen then. Where today's choice is another one
that some report measured on the same workload, the times of both are known; where none measured it, the report is too
old to judge, and there may be few of those.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.choice import heuristic
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.support import words_of
from multigemm.bench.workloads import geomean
from multigemm.problem.spec import OperandSpec, ProblemSpec, bucket

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
REPORTS = sorted(RESULTS.glob("*/report.json"))
CLASS = re.compile(r"(\w+) g\d+ m(\S+) n(\S+) k(\S+) t(\d+) (\w+)/(\w+) (\w+)/(\w+) (\w+)/(\w+) (\w+) [a-z]+-sizes")
RENAMED = {"wave": "small_list", "portable": "generic"}
"""Kernels that had other names when a report was made."""
DEFAULTS = asdict(Config())
"""Of fields that a config had not yet when a report was made."""
REGRET = 1.03
"""How many times slower than the fastest config a choice may be."""
UNJUDGED = 0.11
"""The part of the workloads that may have a choice that no report measured."""
Fields = frozenset[tuple[str, str]]


def operand(dtype: str, order: str, line: int | None) -> Any:
    """An operand whose lines of so many elements lie end to end."""
    kind: torch.dtype = getattr(torch, dtype)
    reach = (line or 16) * kind.itemsize
    return OperandSpec(kind, order, align=min(16, reach & -reach))  # type: ignore[arg-type]


def spec_of(row: dict[str, Any]) -> ProblemSpec | None:
    """The spec of a row's workload; None for classes with more to them, and for tf32, int8 and float64, which ran on
    the generic kernel when the reports were made."""
    found = CLASS.fullmatch(row["spec"])
    if found is None:
        return None
    form, *extents, total, a, a_order, b, b_order, out, out_order, precision = found.groups()
    m, n, k = (None if extent == "*" else int(extent) for extent in extents)
    left = operand(a, a_order, k if a_order == "row" else m)
    right = operand(b, b_order, n if b_order == "row" else k)
    result = operand(out, out_order, n if out_order == "row" else m)
    more: dict[str, Any] = {"compute": left.dtype, "precision": precision}
    spec = ProblemSpec(form, row["groups"], m, n, k, int(total), 0, left, right, result, **more)  # type: ignore[arg-type]
    return None if words_of(spec) or spec.compute is torch.float64 else spec


def identity(fields: dict[str, Any]) -> Fields:
    return frozenset((name, str(value)) for name, value in fields.items())


def measured() -> dict[str, tuple[ProblemSpec, dict[Fields, float]]]:
    """By workload: its spec, and the least time of each config that a report measured on it."""
    specs, times = dict[str, ProblemSpec](), defaultdict[str, dict[Fields, float]](dict)
    for path in REPORTS:
        for row in json.loads(path.read_text())["rows"]:
            if row["entry"] != "cupy" or row["status"] != "ok" or (spec := spec_of(row)) is None:
                continue
            fields = DEFAULTS | row["fields"] | {"kernel": RENAMED.get(row["kernel"], row["kernel"])}
            specs[row["case"]], known, config = spec, times[row["case"]], identity(fields)
            known[config] = min(row["us"], known.get(config, row["us"]))
    return {case: (spec, times[case]) for case, spec in specs.items()}


def test_no_choice_is_slower_than_what_a_report_has_measured() -> None:
    regrets, unjudged, known = dict[str, float](), list[str](), measured()
    for case, (spec, times) in known.items():
        chosen = identity(asdict(heuristic(spec, (9, 0))))
        if chosen in times:
            regrets[case] = times[chosen] / min(times.values())
        else:
            unjudged.append(case)
    assert len(known) > 260
    assert {case: regret for case, regret in regrets.items() if regret > REGRET} == {}
    assert len(unjudged) <= UNJUDGED * len(known), unjudged


def test_weight_gradients_have_the_config_that_takes_least() -> None:
    """The worst is 8 groups of 128 k, whose clusters share rows with profit: two other problems of so little k lose."""
    regrets, names = dict[str, float](), {getattr(configs, name): name for name in ("WIDE", "TURNS", "ALONE")}
    for row in json.loads((RESULTS / "h200" / "weight-gradients.json").read_text())["rows"]:
        left, right = operand("bfloat16", "col", row["m"]), operand("bfloat16", "row", row["n"])
        extents = (row["groups"], row["m"], row["n"], None, bucket(row["total"]))
        spec = ProblemSpec("jagged_k", *extents, 0, left, right, right, compute=torch.bfloat16)
        key = " ".join(str(row[name]) for name in ("groups", "total", "m", "n", "sizes"))
        regrets[key] = row["cupy"][names[heuristic(spec, (9, 0))]] / min(row["cupy"].values())
    assert len(regrets) == 59
    assert geomean(regrets.values()) < 1.003
    assert [key for key, regret in regrets.items() if regret > REGRET] == ["8 1024 4096 14336 multinomial"]
    assert max(regrets.values()) < 1.06
