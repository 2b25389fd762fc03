"""What the first call of a layout costs: compiled now, and loaded from disk by a later process.

    python tests/backends/cupy/test_cupy_first_call.py

prints seconds per class of problem, each state in a process of its own, from operands that are ready on the device
to a result that is; CuPy is imported before. Of the clock's time and the processor time of all threads the lesser
counts: kernels compile side by side, and on a machine that is busy with other things the clock says nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import multigemm as mg

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
COLD_SECONDS = 10.0
CACHED_SECONDS = 0.5


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cut(total: int) -> torch.Tensor:
    return torch.linspace(0, total, 9).to(torch.int32).cuda()


CLASSES: dict[str, Callable[[], mg.GroupedGemmProblem]] = {
    "jagged m": lambda: mg.GroupedGemmProblem(draw(4096, 1024), draw(8, 1024, 512), offsets=cut(4096)),
    "list": lambda: mg.GroupedGemmProblem([draw(128, 128)] * 4, [draw(128, 128)] * 4),
    "unaligned": lambda: mg.GroupedGemmProblem(draw(4096, 1023), draw(8, 1023, 511), offsets=cut(4096)),
    "float32": lambda: mg.GroupedGemmProblem(
        draw(1024, 1024, dtype=torch.float32), draw(8, 1024, 512, dtype=torch.float32), offsets=cut(1024)
    ),
}


def first_calls() -> dict[str, tuple[float, int]]:
    """Seconds and compilations of the first call of each class, in this process."""
    from multigemm.backends.cupy import BACKEND, build

    assert BACKEND.availability().ok
    found = {}
    for name, make in CLASSES.items():
        given, before = make(), build.counts["compiled"]
        torch.cuda.synchronize()
        start, worked = time.perf_counter(), time.process_time()
        mg.solve(given, backend="cupy")
        torch.cuda.synchronize()
        seconds = min(time.perf_counter() - start, time.process_time() - worked)
        found[name] = (seconds, build.counts["compiled"] - before)
    return found


def in_a_new_process(folder: Path) -> dict[str, tuple[float, int]]:
    """The same in a process that starts with the cache of `folder`."""
    environment = {**os.environ, "MULTIGEMM_CACHE_DIR": str(folder)}
    command = [sys.executable, __file__, "child"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (seconds, count) for name, (seconds, count) in json.loads(done.stdout.splitlines()[-1]).items()}


def crowd() -> float:
    """How many processes wait for each processor; 1 where some are idle."""
    return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)


def test_first_calls_cold_and_from_disk(tmp_path: Path) -> None:
    cold, limit = in_a_new_process(tmp_path), COLD_SECONDS * crowd()
    assert all(count > 0 for _, count in cold.values())
    assert {name: seconds for name, (seconds, _) in cold.items() if seconds > limit} == {}
    cached, limit = in_a_new_process(tmp_path), CACHED_SECONDS * crowd()
    assert all(count == 0 for _, count in cached.values())
    assert {name: seconds for name, (seconds, _) in cached.items() if seconds > limit} == {}


def main() -> None:
    if sys.argv[1:] == ["child"]:
        print(json.dumps(first_calls()))
        return
    with tempfile.TemporaryDirectory() as name:
        states = {"cold": in_a_new_process(Path(name)), "from disk": in_a_new_process(Path(name))}
    for state, found in states.items():
        for kind, (seconds, count) in found.items():
            print(f"{state:10s} {kind:14s} {seconds:6.2f} s, {count} kernels compiled")


if __name__ == "__main__":
    main()
