"""Random problems with picked rows, gates, weights and sums of rows, and what a backend gets wrong in them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from multigemm.backend import Backend
from multigemm.testing import Case, DeviceCase, Finding, Limits, Subject, check, random_case
from multigemm.testing.placed_case import spec_of

FUSED = Limits(work=1 << 12, groups=8, longest=40, fused=1)
CPU = torch.device("cpu")


def fused_cases(count: int, first: int = 0, limits: Limits = FUSED) -> Iterator[Case]:
    """The fused cases of so many seeds."""
    return (random_case(seed, limits) for seed in range(first, first + count))


def findings(backend: Backend, count: int, first: int = 0, limits: Limits = FUSED) -> Iterator[tuple[Case, Finding]]:
    """What is wrong in the results of a backend for so many cases, under each of its configs."""
    for case in fused_cases(count, first, limits):
        subject, spec = Subject(backend), spec_of(case)
        if subject.refusals(spec, CPU):
            continue
        device_case = DeviceCase.from_case(case, CPU)
        for config in range(len(backend.configs(spec, CPU))):
            yield from ((case, finding) for finding in check(device_case, Subject(backend, config)).findings)
