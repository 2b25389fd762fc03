"""What tests of a backend may import: cases, guarded memory, oracles, a conformance suite.

A `Case` is a problem as data (`case`); `strategies` draws them, `values` gives them numbers, `placed_case` memory with
poison and guard bands. `oracles` judges a run, `deep_oracles`, `relations` and `guard_pages` the same launch under
other circumstances, and `subject` is the backend under one of its configs. `multigemm fuzz` is made of these, and so is
`conformance`, the suite for backends of one's own; `own_kernels` is for kernels that are no backend; `corpus` keeps
failures as files.

Programs for machines with a GPU, each `python -m multigemm.testing.NAME`: `repeated_calls` (the cache of launches),
`batch_invariance` (bits of rows in any company), `sanitize` (the memory checkers, with `control`). That oracles can
fail is shown by the tests, with faults planted in model kernels.
"""

from multigemm.testing.case import Case, Fused, Layout, RowNumbers, Scale, classes
from multigemm.testing.oracles import Finding, Outcome, check, check_case
from multigemm.testing.own_kernels import assert_correct, problems, random_problem
from multigemm.testing.placed_case import DeviceCase, PlacedCase
from multigemm.testing.strategies import EMULATED, Limits, cases, random_case
from multigemm.testing.subject import Subject

World = PlacedCase
Stand = DeviceCase
"""The names of both in 0.1."""

__all__ = [
    "EMULATED",
    "Case",
    "DeviceCase",
    "Finding",
    "Fused",
    "Layout",
    "Limits",
    "Outcome",
    "PlacedCase",
    "RowNumbers",
    "Scale",
    "Stand",
    "Subject",
    "World",
    "assert_correct",
    "cases",
    "check",
    "check_case",
    "classes",
    "problems",
    "random_case",
    "random_problem",
]
