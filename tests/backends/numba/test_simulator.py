"""The plain-core kernel in Numba's CUDA simulator: its schedule, masks and epilogues without a GPU.

Numba chooses between compiler and simulator when it is imported, so the simulator has a process of
its own, which solves every form with every dtype and prints one verdict per line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")

ROOT = Path(__file__).parents[3]
MINIMUM_RATE = 3.0


@cache
def run(program: str, *arguments: str) -> list[dict[str, Any]]:
    environ = {**os.environ, "MULTIGEMM_EMULATE": "1", "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / program), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_form_and_dtype_is_right() -> None:
    lines = run("numba_cases.py")
    wrong = [f"{line['title']}: {line['text']}" for line in lines[:-1] if not line["ok"]]
    assert not wrong, "\n".join(wrong)
    assert lines[-1]["count"] == len(lines) - 1 == 90


def test_simulator_is_fast_enough_to_be_used() -> None:
    last = run("numba_cases.py")[-1]
    assert last["count"] / last["seconds"] > MINIMUM_RATE


@pytest.mark.parametrize(
    "what", ["epilogue", "values and guards", "no operands read", "in place", "sizes that lie", "rebinding"]
)
def test_contract(what: str) -> None:
    lines = [line for line in run("numba_contract.py") if line["what"] == what]
    assert lines, f"nothing checked {what}"
    wrong = [f"{line['title']}: {line['text']}" for line in lines if not line["ok"]]
    assert not wrong, "\n".join(wrong)


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
    environ = {**os.environ, "MULTIGEMM_EMULATE": "1", "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "1"
