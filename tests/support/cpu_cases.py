"""Cases of every form under each config of the cpu backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from multigemm.backends.cpu import BACKEND
from multigemm.backends.cpu.config import Config
from multigemm.planning.operands import Operands
from multigemm.planning.staging import stage, staged_spec
from multigemm.problem.spec import Form
from multigemm.testing import Case, DeviceCase, Outcome, Subject, check

CPU = torch.device("cpu")
SIZES = (5, 0, 17, 1, 8)
EXTENTS = {"m": 9, "n": 12, "k": 20}


def case_of(form: Form, dtype: str = "float32", lengths: tuple[int, ...] = SIZES, **more: Any) -> Case:
    """A case of a form: `lengths` in the jagged direction (of masked: valid rows), EXTENTS in the others."""
    more = {"mode": "int" if dtype == "int8" else "normal"} | more
    m, n, k = (more.pop(name, extent) for name, extent in EXTENTS.items())
    if form == "per_group":
        dims = tuple((length if m else 0, n and n + 3 * g, k and k + g) for g, length in enumerate(lengths))
        return Case(form=form, dtype=dtype, dims=dims, **more)
    if form == "masked":
        m = m and max(lengths, default=0) + 2
        lengths = tuple(min(length, m) for length in lengths)
    if form.startswith("jagged"):
        extents = {"m": m, "n": n, "k": k} | {form[-1]: 0}
        return Case(form=form, dtype=dtype, lengths=lengths, **extents, **more)
    return Case(form=form, dtype=dtype, lengths=lengths, m=m, n=n, k=k, **more)


def staged(device_case: DeviceCase) -> Operands:
    """A case as `bind` sees it."""
    return stage(device_case.problem, staged_spec(device_case.problem), device_case.out).ops


def configs(device_case: DeviceCase) -> list[Config]:
    """The configs that a case has."""
    return list(BACKEND.configs(staged_spec(device_case.problem), CPU))


def each_config(case: Case) -> Iterator[tuple[DeviceCase, Subject]]:
    """The case for each of its configs, under which the backend runs it."""
    device_case = DeviceCase.from_case(case, CPU)
    for config in configs(device_case):
        subject = Subject(BACKEND)
        subject.pin(config)
        yield device_case, subject


def examine(case: Case) -> list[tuple[DeviceCase, Subject, Outcome]]:
    """Runs a case under each of its configs, twice, and judges values, repeats and foreign memory."""
    found = []
    for device_case, subject in each_config(case):
        outcome = check(device_case, subject)
        assert outcome.ran and outcome.ok, f"{outcome.config} {case!r}\n" + "\n".join(map(str, outcome.findings))
        found.append((device_case, subject, outcome))
    assert found
    return found
