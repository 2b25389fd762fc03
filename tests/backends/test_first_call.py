"""What the first call of a layout costs: compiled now, loaded from disk by a later process, and with other sizes.

    python tests/backends/test_first_call.py triton

prints seconds per class of problem, each state in a process of its own, from operands that are ready on the device
to a result that is. Of the clock's time and the processor time of all threads the lesser counts: kernels compile side
by side, and on a machine that is busy with other things the clock says nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

import multigemm as mg

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LIMITS = {"cupy": (10.0, 0.5), "triton": (10.0, 1.0), "numba": (60.0, 1.0)}
"""Seconds that a first call may take where a kernel is compiled, and where it is on disk."""
DRAWS = 200
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300)
TOTALS = (*(1 << i for i in range(15)), 20000)
MET = {
    "cupy": [(2, 9000)],
    "triton": [*itertools.product(GROUPS, TOTALS)],
    "numba": [*itertools.product(GROUPS, TOTALS)],
}
"""Numbers of groups and tokens after which no others compile anything: of cupy, any one."""


def compiled(backend: str) -> int:
    """How many kernels this process has compiled."""
    build = import_module(f"multigemm.backends.{backend}.build")
    if backend == "cupy":
        return int(build.counts["compiled"])
    return int(build.compilations if backend == "triton" else len(build.compilations))


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cut(total: int, groups: int = 8, among: random.Random | None = None) -> torch.Tensor:
    """Offsets of `groups` groups, even or drawn."""
    if among is None:
        return torch.linspace(0, total, groups + 1).to(torch.int32).cuda()
    ends = sorted(among.randint(0, total) for _ in range(groups - 1))
    return torch.tensor([0, *ends, total], dtype=torch.int32).cuda()


def rows(total: int, groups: int, offsets: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> mg.GroupedGemmProblem:
    return mg.GroupedGemmProblem(draw(total, 1024, dtype=dtype), draw(groups, 1024, 512, dtype=dtype), offsets=offsets)


CLASSES: dict[str, Callable[[], mg.GroupedGemmProblem]] = {
    "jagged m, bf16": lambda: rows(4096, 8, cut(4096)),
    "jagged k, bf16": lambda: mg.GroupedGemmProblem(draw(4096, 1024).T, draw(4096, 512), offsets=cut(4096), jagged="k"),
    "list, bf16": lambda: mg.GroupedGemmProblem([draw(128, 128)] * 4, [draw(128, 128)] * 4),
    "unaligned, bf16": lambda: mg.GroupedGemmProblem(draw(4096, 1023), draw(8, 1023, 511), offsets=cut(4096)),
    "jagged m, fp32": lambda: rows(1024, 8, cut(1024), torch.float32),
    "jagged m, fp64": lambda: rows(1024, 8, cut(1024), torch.float64),
}


def first_calls(backend: str) -> dict[str, tuple[float, int]]:
    """Seconds and compilations of the first call of each class, in this process."""
    found = {}
    for name, make in CLASSES.items():
        given, before = make(), compiled(backend)
        torch.cuda.synchronize()
        start, worked = time.perf_counter(), time.process_time()
        mg.solve(given, backend=backend)
        torch.cuda.synchronize()
        seconds = min(time.perf_counter() - start, time.process_time() - worked)
        found[name] = (seconds, compiled(backend) - before)
    return found


def in_a_new_process(backend: str, folder: Path) -> dict[str, tuple[float, int]]:
    """The same in a process that starts with the caches of `folder`."""
    environment = {**os.environ, "MULTIGEMM_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "own")}
    command = [sys.executable, __file__, backend, "child"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (seconds, count) for name, (seconds, count) in json.loads(done.stdout.splitlines()[-1]).items()}


def recompilations(backend: str) -> int:
    """Compilations that new numbers of tokens and groups cause, once those of MET were met."""
    among = random.Random(1)
    for groups, total in MET[backend]:
        mg.solve(rows(total, groups, cut(total, groups)), backend=backend)
    before = compiled(backend)
    for _ in range(DRAWS):
        groups, total = among.randint(1, 300), among.randint(1, 20000)
        mg.solve(rows(total, groups, cut(total, groups, among)), backend=backend)
    torch.cuda.synchronize()
    return compiled(backend) - before


def crowd() -> float:
    """How many processes wait for each processor; 1 where some are idle."""
    return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)


@pytest.mark.parametrize("backend", LIMITS)
def test_first_calls_cold_and_from_disk(backend: str, tmp_path: Path) -> None:
    for limit, compiles in zip(LIMITS[backend], (True, False), strict=True):
        found = in_a_new_process(backend, tmp_path)
        assert all((count > 0) is compiles for _, count in found.values())
        assert {name: seconds for name, (seconds, _) in found.items() if seconds > limit * crowd()} == {}


@pytest.mark.parametrize("backend", LIMITS)
def test_new_numbers_of_tokens_and_groups_compile_nothing(backend: str) -> None:
    assert recompilations(backend) == 0


def main() -> None:
    backend = sys.argv[1]
    if sys.argv[2:] == ["child"]:
        print(json.dumps(first_calls(backend)))
        return
    with tempfile.TemporaryDirectory() as name:
        states = {state: in_a_new_process(backend, Path(name)) for state in ("cold", "from disk")}
    for state, found in states.items():
        for kind, (seconds, count) in found.items():
            print(f"{state:10s} {kind:18s} {seconds:6.2f} s, {count} kernels compiled")
    print(f"{recompilations(backend)} recompilations over {DRAWS} random numbers of tokens and groups")


if __name__ == "__main__":
    main()
