"""Importing costs nothing: no torch, no GPU library, no CUDA context before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_neither_torch_nor_a_gpu_library() -> None:
    heavy = "{m.partition('.')[0] for m in sys.modules} & {'torch', 'triton', 'cupy', 'numba', 'numpy', 'cuda'}"
    assert run(f"import sys, multigemm; print({heavy})") == "set()"


@pytest.mark.slow
def test_layers_and_the_cpu_load_no_compiler_and_no_gpu_library_and_public_names_are_there() -> None:
    """torch's compiler takes more than a second."""
    code = (
        "import sys, numpy as np, multigemm as mg, multigemm.nn; print('torch._dynamo' in sys.modules);"
        "mg.grouped_gemm(np.ones((3, 2)), np.ones((2, 4)));"
        "print({m.partition('.')[0] for m in sys.modules} & {'cupy', 'triton'});"
        "import multigemm.backends, multigemm.reference;"
        "missing = [n for n in mg.__all__ if not hasattr(mg, n)];"
        "print(missing, callable(mg.expected), callable(mg.plan), type(mg.backends).__name__,"
        " set(mg.__all__) <= set(dir(mg)))"
    )
    assert run(code).splitlines() == ["False", "set()", "[] True True module True"]


def test_import_and_help_are_quick() -> None:
    best = {}
    for what in ("import multigemm", "from multigemm.__main__ import main; main(['--help'])", "pass"):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run(what)
            times.append(time.perf_counter() - start)
        best[what] = min(times)
    bare = best.pop("pass")
    assert all(t - bare < 0.15 for t in best.values()), best


def test_unknown_attribute() -> None:
    import multigemm

    with pytest.raises(AttributeError, match="no attribute 'grouped_gem'"):
        multigemm.grouped_gem  # noqa: B018
