"""What tests of kernels in Triton's interpreter share: a problem solved and judged, and kernels with a fault."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import multigemm as mg


def solved(*operands: Any, config: Any = None, **options: Any) -> Any:
    """The result of a problem, which is right."""
    problem = mg.GroupedGemmProblem(*operands, **options)
    out = mg.solve(problem, "triton", config)
    verdict = mg.verify(problem, out)
    assert verdict, verdict.text
    return out


def module_with(source: Path, text: str, instead: str, folder: Path) -> Any:
    """The module of a file with another text in one place, from a file of its own: the interpreter reads sources."""
    whole = source.read_text()
    assert text in whole, "the kernel no longer says so"
    path = folder / "faulty.py"
    path.write_text(whole.replace(text, instead))
    os.environ["TRITON_INTERPRET"] = "1"  # as the backend does when it emulates for the first time
    spec = importlib.util.spec_from_file_location("faulty", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
