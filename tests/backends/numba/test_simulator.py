"""The plain-core kernel in Numba's CUDA simulator: its schedule, masks and epilogues without a GPU.

Numba chooses between compiler and simulator when it is imported, so the simulator has processes of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "MULTIGEMM_EMULATE": "1", "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}


def run(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


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
    assert int(run(str(ROOT / "tests" / "support" / "numba_epilogues.py"))) == 5 * 5 * 4 * 3 + 4


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
