"""Importing costs nothing: no torch, no GPU library, no CUDA context before it is needed."""

from __future__ import annotations

import resource

import pytest

from tests.support.python_process import run_python


def run(code: str) -> str:
    return run_python("-c", code, anew=True).stdout.strip()


def test_import_loads_neither_torch_nor_a_gpu_library() -> None:
    heavy = "{m.partition('.')[0] for m in sys.modules} & {'torch', 'triton', 'cupy', 'numba', 'numpy', 'cuda'}"
    assert run(f"import sys, multigemm; print({heavy})") == "set()"


@pytest.mark.slow
def test_layers_the_benchmark_and_the_cpu_load_no_compiler_and_no_gpu_library_and_public_names_are_there() -> None:
    """torch's compiler takes more than a second."""
    code = (
        "import sys, numpy as np, multigemm as mg, multigemm.nn; print('torch._dynamo' in sys.modules);"
        "import multigemm.bench.cli, multigemm.bench.tune;"
        "print([m for m in ('triton', 'cupy', 'numba', 'matplotlib') if m in sys.modules]);"
        "mg.grouped_gemm(np.ones((3, 2)), np.ones((2, 4)));"
        "print({m.partition('.')[0] for m in sys.modules} & {'cupy', 'triton'});"
        "import multigemm.backends, multigemm.reference;"
        "missing = [n for n in mg.__all__ if not hasattr(mg, n)];"
        "print(missing, callable(mg.expected), callable(mg.plan), type(mg.backends).__name__,"
        " set(mg.__all__) <= set(dir(mg)))"
    )
    assert run(code).splitlines() == ["False", "[]", "set()", "[] True True module True"]


def processor_seconds(code: str) -> float:
    """What a process takes of a processor, which other processes do not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_and_help_are_quick() -> None:
    bare = min(processor_seconds("pass") for _ in range(3))
    for what in ("import multigemm", "from multigemm.__main__ import main; main(['--help'])"):
        assert min(processor_seconds(what) for _ in range(3)) - bare < 0.15, what


def test_unknown_attribute() -> None:
    import multigemm

    with pytest.raises(AttributeError, match="no attribute 'grouped_gem'"):
        multigemm.grouped_gem  # noqa: B018
