"""What tests of a backend may import: cases, hostile memory, oracles, a conformance suite, planted faults."""

from multigemm.testing.case import Case, Layout, Scale, classes
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
    "Layout",
    "Limits",
    "Outcome",
    "PlacedCase",
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
