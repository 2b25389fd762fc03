"""The definition of the right answer, and of how far from it a right kernel may be."""

from multigemm.reference.verify import Answer, Verdict, answer, expected, judge, verify

__all__ = ["Answer", "Verdict", "answer", "expected", "judge", "verify"]
