"""Runs and rows of reports that nobody measured, for tests of forecasts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from multigemm.bench import fit
from multigemm.bench.results import HOST_SIZES, Row
from multigemm.select.shape import Shape

KEY = "jagged_m g8 m* n512 k608 t4096 bfloat16/row bfloat16/col bfloat16/row ieee device-sizes"
TILES = {"x": (128, 256, 1), "y": (64, 64, 1)}


def made_up(count: int = 40) -> tuple[list[tuple[fit.Run, fit.Run]], np.ndarray[Any, Any]]:
    """Runs of two backends whose ratio is a smooth function of K."""
    draw, its, truth = np.random.default_rng(0), [], []
    for index in range(count):
        k = float(2 ** draw.uniform(6, 12))
        place = Shape(8, 256.0, 512.0, k)
        key = KEY.replace("k608", f"k{int(k)}")
        ratio = 0.3 * math.sin(math.log2(k))
        case = f"case_{index // 2}"
        one = fit.Run(case, "H100" if index % 2 else "H200", key, place, 10.0 * math.exp(ratio), "a", TILES["x"])
        its.append((one, replace(one, us=10.0, ran="b", footprint=TILES["y"])))
        truth.append(ratio)
    return its, np.array(truth)


def rows(case: Any, **us: float) -> Iterator[Row]:
    for name, took in us.items():
        entry = name.replace("_host", HOST_SIZES)
        told = case.key, case.name, case.suite, case.form, case.distribution, case.dtype, "of some shape"
        row = Row(*told, 1, 1, 1, 1.0, False, entry, "backend", "ok")
        row.us, row.spec, row.ran = took, KEY, "auto/bound: a loop" if "picks" in name else "64"
        yield row
