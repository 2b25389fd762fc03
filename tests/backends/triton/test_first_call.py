"""What the first call of a kernel costs: compiled now, loaded from disk, and with sizes never seen before.

    python tests/backends/triton/test_first_call.py

prints seconds per class of problem, each state in a process of its own. The clock runs from operands that are
ready on the device to a result that is; the first line of a cold process includes the import of Triton.
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
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import build as compiled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
COLD_SECONDS = 10.0
CACHED_SECONDS = 1.0
DRAWS = 200


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def cut(total: int, groups: int, among: random.Random | None = None) -> torch.Tensor:
    """Offsets of `groups` groups, even or drawn."""
    if among is None:
        return torch.linspace(0, total, groups + 1).to(torch.int32).cuda()
    ends = sorted(among.randint(0, total) for _ in range(groups - 1))
    return torch.tensor([0, *ends, total], dtype=torch.int32).cuda()


def rows(total: int, groups: int, offsets: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Any:
    return mg.GroupedGemmProblem(draw(total, 1024, dtype=dtype), draw(groups, 1024, 512, dtype=dtype), offsets=offsets)


CLASSES: dict[str, Callable[[], mg.GroupedGemmProblem]] = {
    "jagged m, bf16": lambda: rows(4096, 8, cut(4096, 8)),
    "jagged k, bf16": lambda: mg.GroupedGemmProblem(
        draw(4096, 1024).T, draw(4096, 512), offsets=cut(4096, 8), jagged="k"
    ),
    "list, bf16": lambda: mg.GroupedGemmProblem([draw(128, 128)] * 4, [draw(128, 128)] * 4),
    "unaligned, bf16": lambda: mg.GroupedGemmProblem(draw(4096, 1023), draw(8, 1023, 511), offsets=cut(4096, 8)),
    "jagged m, fp32": lambda: rows(1024, 8, cut(1024, 8), torch.float32),
    "jagged m, fp64": lambda: rows(1024, 8, cut(1024, 8), torch.float64),
}


def first_calls() -> dict[str, tuple[float, int]]:
    """Seconds and compilations of the first call of each class, in this process."""
    found = {}
    for name, make in CLASSES.items():
        given, before = make(), compiled.compilations
        torch.cuda.synchronize()
        start = time.perf_counter()
        mg.solve(given, backend="triton")
        torch.cuda.synchronize()
        found[name] = (time.perf_counter() - start, compiled.compilations - before)
    return found


def in_a_new_process(folder: Path) -> dict[str, tuple[float, int]]:
    """The same in a process that starts with the caches of `folder`."""
    environment = {**os.environ, "MULTIGEMM_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "own")}
    command = [sys.executable, __file__, "child"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (seconds, count) for name, (seconds, count) in json.loads(done.stdout.splitlines()[-1]).items()}


GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 300)
TOTALS = (*(1 << i for i in range(15)), 20000)


def recompilations(draws: int = DRAWS) -> int:
    """Compilations that new token counts and group counts cause, once every size class was met."""
    among = random.Random(1)
    for groups, total in itertools.product(GROUPS, TOTALS):
        mg.solve(rows(total, groups, cut(total, groups)), backend="triton")
    before = compiled.compilations
    for _ in range(draws):
        groups, total = among.randint(1, 300), among.randint(1, 20000)
        mg.solve(rows(total, groups, cut(total, groups, among)), backend="triton")
    torch.cuda.synchronize()
    return compiled.compilations - before


def test_first_calls_cold_and_from_disk(tmp_path: Path) -> None:
    cold = in_a_new_process(tmp_path)
    assert all(count > 0 for _, count in cold.values())
    assert {name: seconds for name, (seconds, _) in cold.items() if seconds > COLD_SECONDS} == {}
    cached = in_a_new_process(tmp_path)
    assert all(count == 0 for _, count in cached.values())
    assert {name: seconds for name, (seconds, _) in cached.items() if seconds > CACHED_SECONDS} == {}


def test_new_sizes_compile_nothing() -> None:
    """200 random token counts and group counts: kernels that a layer has met take them all."""
    assert recompilations() == 0


def main() -> None:
    if sys.argv[1:] == ["child"]:
        print(json.dumps(first_calls()))
        return
    with tempfile.TemporaryDirectory() as name:
        states = {"cold": in_a_new_process(Path(name)), "from disk": in_a_new_process(Path(name))}
    for state, found in states.items():
        for kind, (seconds, count) in found.items():
            print(f"{state:10s} {kind:18s} {seconds:6.2f} s, {count} kernels compiled")
    print(f"{recompilations()} recompilations over {DRAWS} random token and group counts")


if __name__ == "__main__":
    main()
