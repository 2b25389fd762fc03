"""What tests of a backend may import: cases, hostile memory, oracles, a conformance suite, planted faults."""

from multigemm.testing.case import Case, Layout, classes
from multigemm.testing.oracles import Finding, Outcome, check, check_case
from multigemm.testing.strategies import EMULATED, Limits, cases, random_case
from multigemm.testing.subject import Subject
from multigemm.testing.world import Stand, World

__all__ = [
    "EMULATED",
    "Case",
    "Finding",
    "Layout",
    "Limits",
    "Outcome",
    "Stand",
    "Subject",
    "World",
    "cases",
    "check",
    "check_case",
    "classes",
    "random_case",
]
