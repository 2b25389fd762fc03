"""What our backends choose today, held to the times in the kept reports: no choice is slower than a measured one.

A report names the class of each workload and the config that was chosen then. Where today's choice is another one
that some report measured on the same workload, the times of both are known; where none measured it, the report is too
old to judge, and there may be few of those.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.backends.cupy import choice as cupy_choice
from multigemm.backends.cupy import config as cupy
from multigemm.backends.cupy.support import words_of
from multigemm.backends.numba import choice as numba_choice
from multigemm.backends.numba import config as numba
from multigemm.backends.numba import support as numba_support
from multigemm.backends.triton import Config
from multigemm.backends.triton.choice import candidates_of
from multigemm.backends.triton.hopper_choice import hopper_candidates
from multigemm.bench.workloads import geomean
from multigemm.problem.spec import OperandSpec, ProblemSpec, bucket

GPU = torch.device("cuda", 0)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REPORTS = sorted(RESULTS.glob("*/report.json"))
CLASS = re.compile(r"(\w+) g\d+ m(\S+) n(\S+) k(\S+) t(\d+) (\w+)/(\w+) (\w+)/(\w+) (\w+)/(\w+) (\w+) [a-z]+-sizes")
RENAMED = {"wave": "small_list", "portable": "generic", "direct": "generic", "carry": "shift_b"}
"""Kernels and fields that had other names when a report was made."""
DEFAULTS = {
    ("cupy", ""): asdict(cupy.Config()), ("triton", ""): asdict(Config()),
    **{("numba", config.kernel): asdict(config) for config in (numba.GENERIC, numba.MMA, numba.HOPPER)},
}  # fmt: skip
"""Of fields that a config had not yet when a report was made, by backend and kernel."""
CHOOSE: dict[str, Callable[[ProblemSpec], Any]] = {
    "cupy": lambda spec: cupy_choice.heuristic(spec, (9, 0)),
    "triton": lambda spec: candidates_of(spec, (9, 0))[0],
    "numba": lambda spec: numba_choice.candidates(spec, GPU)[0],
}
REGRET = 1.04
"""How many times slower than the fastest config a choice may be."""
UNJUDGED = {"cupy": 0.13, "triton": 0.25, "numba": 0.13}
"""The part of the workloads that may have a choice that no report measured."""
Fields = frozenset[tuple[str, str]]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (numba_choice, numba_support):
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr("multigemm.backends.triton.config.thrifty", lambda: True)


def operand(dtype: str, order: str, line: int | None) -> Any:
    """An operand whose lines of so many elements lie end to end."""
    kind: torch.dtype = getattr(torch, dtype)
    reach = (line or 16) * kind.itemsize
    return OperandSpec(kind, order, align=min(16, reach & -reach))  # type: ignore[arg-type]


def spec_of(row: dict[str, Any]) -> ProblemSpec | None:
    """The spec of a row's workload; None for classes with more to them, and for tf32, int8 and float64 of cupy, which
    ran on the generic kernel when the reports were made."""
    found = CLASS.fullmatch(row.get("problem_class") or row["spec"])
    if found is None:
        return None
    form, *extents, total, a, a_order, b, b_order, out, out_order, precision = found.groups()
    m, n, k = (None if extent == "*" else int(extent) for extent in extents)
    left = operand(a, a_order, k if a_order == "row" else m)
    right = operand(b, b_order, n if b_order == "row" else k)
    result = operand(out, out_order, n if out_order == "row" else m)
    more: dict[str, Any] = {"compute": left.dtype, "precision": precision}
    spec = ProblemSpec(form, row["groups"], m, n, k, bucket(int(total)), 0, left, right, result, **more)  # type: ignore[arg-type]
    return None if row["entry"].startswith("cupy") and (words_of(spec) or spec.compute is torch.float64) else spec


def identity(kernel: str, fields: dict[str, Any]) -> Fields:
    texts = {name: str(tuple(value) if isinstance(value, list) else value) for name, value in fields.items()}
    if "n_max" in texts:  # of numba, whose heights have come in smaller steps since
        del texts["step"]
    return frozenset({**texts, "kernel": kernel}.items())


def measured(backend: str) -> dict[str, tuple[ProblemSpec, dict[Fields, float]]]:
    """By workload: its spec, and the least time of each config that a report measured on it."""
    specs, times = dict[str, ProblemSpec](), defaultdict[str, dict[Fields, float]](dict)
    for path in REPORTS:
        for row in json.loads(path.read_text())["rows"]:
            if row["entry"].partition("#")[0] != backend or row["status"] != "ok" or (spec := spec_of(row)) is None:
                continue
            kernel = RENAMED.get(row["kernel"], row["kernel"])
            defaults = DEFAULTS.get((backend, ""), DEFAULTS.get((backend, kernel), {}))
            config = identity(kernel, defaults | {RENAMED.get(name, name): x for name, x in row["fields"].items()})
            specs[row["case"]], known = spec, times[row["case"]]
            known[config] = min(row["us"], known.get(config, row["us"]))
    return {case: (spec, times[case]) for case, spec in specs.items()}


@pytest.mark.parametrize("backend", CHOOSE)
def test_no_choice_is_slower_than_what_a_report_has_measured(backend: str) -> None:
    regrets, unjudged, known = dict[str, float](), list[str](), measured(backend)
    for case, (spec, times) in known.items():
        config = CHOOSE[backend](spec)
        chosen = identity(config.kernel, asdict(config))
        if chosen in times:
            regrets[case] = times[chosen] / min(times.values())
        else:
            unjudged.append(case)
    assert len(known) > 260
    assert {case: regret for case, regret in regrets.items() if regret > REGRET} == {}
    assert len(unjudged) <= UNJUDGED[backend] * len(known), unjudged


def weight_gradients(backend: str) -> dict[str, tuple[ProblemSpec, dict[str, float]]]:
    """By problem: its spec, and the times of a backend's configs."""
    found = {}
    for row in json.loads((RESULTS / "h200" / "weight-gradients.json").read_text())["rows"]:
        left, right = operand("bfloat16", "col", row["m"]), operand("bfloat16", "row", row["n"])
        extents = (row["groups"], row["m"], row["n"], None, bucket(row["total"]))
        spec = ProblemSpec("jagged_k", *extents, 0, left, right, right, compute=torch.bfloat16)
        key = " ".join(str(row[name]) for name in ("groups", "total", "m", "n", "sizes"))
        found[key] = spec, row[backend]
    return found


def test_weight_gradients_have_the_config_of_cupy_that_takes_least() -> None:
    """The worst is 8 groups of 128 k, whose clusters share rows with profit: two other problems of so little k lose."""
    names = {getattr(cupy, name): name for name in ("WIDE", "TURNS", "ALONE")}
    regrets = {
        key: times[names[cupy_choice.heuristic(spec, (9, 0))]] / min(times.values())
        for key, (spec, times) in weight_gradients("cupy").items()
    }
    assert len(regrets) == 59
    assert geomean(regrets.values()) < 1.003
    assert [key for key, regret in regrets.items() if regret > REGRET] == ["8 1024 4096 14336 multinomial"]
    assert max(regrets.values()) < 1.06


def test_weight_gradients_have_the_faster_tile_of_triton() -> None:
    judged = {key: found for key, found in weight_gradients("triton").items() if len(found[1]) > 1}
    for key, (spec, times) in judged.items():
        best = hopper_candidates(spec)[0]
        few = spec.groups * (spec.m or 0) * (spec.n or 0) <= 4 * 132 * 128 * 256  # so that an estimate chooses
        assert times[f"{best.block_m}x{best.block_n}"] / min(times.values()) <= (1.04 if few else 1.01), key
    assert len(judged) == 29
