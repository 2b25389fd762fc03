"""Random problems with picked rows, gates, weights and sums of rows, and what a backend gets wrong in them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from multigemm.backend import Backend
from multigemm.testing import Case, DeviceCase, Finding, Limits, Scale, Subject, check, random_case
from multigemm.testing.placed_case import spec_of
from tests.model_mutants.faults import FUSED_HUNTING

CPU = torch.device("cpu")
BLOCKS = Case(
    form="jagged_k", dtype="float8_e4m3fn", dtype_b="float8_e5m2", m=3, n=4, lengths=(70, 0, 45), head=5, tail=2,
    scale_a=Scale("1x32"), scale_b=Scale("row"), seed=1,
)  # fmt: skip
"""A jagged K in blocks, of which some belong to no group."""


def fused_cases(count: int, first: int = 0, limits: Limits = FUSED_HUNTING) -> Iterator[Case]:
    """The fused cases of so many seeds."""
    return (random_case(seed, limits) for seed in range(first, first + count))


def findings(
    backend: Backend, count: int, first: int = 0, limits: Limits = FUSED_HUNTING
) -> Iterator[tuple[Case, Finding]]:
    """What is wrong in the results of a backend for so many cases, under each of its configs."""
    for case in fused_cases(count, first, limits):
        subject, spec = Subject(backend), spec_of(case)
        if subject.refusals(spec, CPU):
            continue
        device_case = DeviceCase.from_case(case, CPU)
        for config in range(len(backend.configs(spec, CPU))):
            yield from ((case, finding) for finding in check(device_case, Subject(backend, config)).findings)
