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
        ("epilogues or output or alpha or few or extents or quantised or (generated and jagged_m)", 81),
    ],
)
def test_it_conforms(chosen: str, least: int) -> None:
    said = run("-m", "multigemm.testing.conformance", "--backend", "numba", "-k", chosen)
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed.group(1)) >= least and "skipped" not in said, said[-500:]


def test_an_epilogue_chosen_at_run_time_is_the_compiled_one() -> None:
    assert int(run("tests/support/numba_epilogues.py")) == 5 * 5 * 4 * 3 + 4


THREADS = """
import threading, time
import numpy as np
from multigemm.backends.numba.kernels.runtime import cuda, kernel
from numba.cuda.simulator.kernelapi import FakeCUDAShared

real = np.empty
def slowly(*arguments, **keywords):
    time.sleep(0.05)
    return real(*arguments, **keywords)
np.empty = slowly
shared, found = FakeCUDAShared(0), []
def ask():
    found.append(shared.array(4, np.float32))
threads = [threading.Thread(target=ask) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
np.empty = real
assert len({id(array) for array in found}) == 1, "each thread has an array of its own"

@kernel
def rounds(seen, early, broken):
    thread = cuda.threadIdx.x
    for turn in range(5):
        if thread == early and turn == 2:
            return
        if thread == broken and turn == 3:
            raise ValueError("broken")
        seen[thread] = turn
        cuda.syncthreads()
        for other in range(8):
            assert other in (early, broken) or seen[other] == turn
        cuda.syncthreads()

for early in (-1, 0, 5):
    seen = np.zeros(8, np.int64)
    rounds[3, 8](seen, early, -1)
    assert seen.tolist() == [1 if thread == early else 4 for thread in range(8)]
try:
    rounds[1, 8](np.zeros(8, np.int64), -1, 2)
except ValueError as error:
    print(error)
"""


def test_threads_of_a_block_share_arrays_and_wait_for_each_other() -> None:
    """Also where one of them has left, or fails: its error is raised."""
    assert run("-c", THREADS).strip().endswith("broken")
