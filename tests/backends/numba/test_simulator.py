"""The plain-core kernel in Numba's CUDA simulator: its schedule, masks and epilogues without a GPU.

Numba chooses between compiler and simulator when it is imported, so the simulator has processes of its own.
"""

from __future__ import annotations

import re

import pytest

from tests.support.python_process import run_python

pytestmark = pytest.mark.slow

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")


def run(*arguments: str) -> str:
    return run_python(*arguments, environment={"MULTIGEMM_EMULATE": "1", "NUMBA_ENABLE_CUDASIM": "1"}).stdout


@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        ("form_and_dtype or say or (sizes and not graph) or contents", 66),
        ("epilogues or output or alpha or few or extents or (generated and jagged_m)", 75),
    ],
)
def test_it_conforms(chosen: str, least: int) -> None:
    said = run("-m", "multigemm.testing.conformance", "--backend", "numba", "-k", chosen)
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed.group(1)) >= least and "skipped" not in said, said[-500:]


def test_an_epilogue_chosen_at_run_time_is_the_compiled_one() -> None:
    assert int(run("tests/support/numba_epilogues.py")) == 5 * 5 * 4 * 3 + 4


def test_threads_share_one_array() -> None:
    """Two threads that ask for a shared array at the same time must not each get their own."""
    program = """
import threading
from multigemm.backends.numba.kernels import runtime
from numba.cuda.simulator.kernelapi import FakeCUDAShared
import time, numpy as np
made = []
real = np.empty
def empty(*a, **k):
    time.sleep(0.05)
    return real(*a, **k)
np.empty = empty
shared = FakeCUDAShared(0)
def ask():
    made.append(shared.array(4, np.float32))
threads = [threading.Thread(target=ask) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len({id(x) for x in made}))
"""
    assert run("-c", program).strip() == "1"
