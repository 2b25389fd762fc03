"""How many Python functions some work enters, and in which files of the product."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (ROOT / "multigemm", ROOT / "backends", ROOT / "reference")


class PythonCalls(NamedTuple):
    """How many functions were entered, but for those of tests, and the files of the product that they are in."""

    functions: int
    files: frozenset[Path]


def python_calls(work: Callable[[], object]) -> PythonCalls:
    """Counts what `work` enters; that function itself and what a garbage collection calls are none of it."""
    entered: list[str] = []

    def profiler(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/tests/" not in frame.f_code.co_filename:
            entered.append(frame.f_code.co_filename)

    gc.disable()
    sys.setprofile(profiler)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    paths = (Path(name).resolve() for name in set(entered))
    return PythonCalls(len(entered), frozenset(x for x in paths if any(x.is_relative_to(top) for top in PRODUCT)))
