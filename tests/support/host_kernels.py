"""The kernels of `planning/fused_steps.cu` as host code, which the machine's C++ compiler makes of them."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multigemm.cuda.arguments import words
from multigemm.planning import fused_steps
from tests.support.cublas_fake import CPP, PRELUDE, PTX

ARGUMENTS = {"gather_rows": "Gather", "finish_rows": "Finish", "sum_rows": "Sum"}
RUN = """
extern "C" void run(const void* words, int blocks, int threads) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (int b = 0; b < blocks; b++)
        for (int i = 0; i < threads; i++) {
            blockIdx = {b, 0, 0};
            threadIdx = {i, 0, 0};
            NAME(*(const ARGUMENT*)words);
        }
}
"""
BUILT: dict[str, Any] = {}


def _compiled(name: str, defines: dict[str, int], folder: Path) -> Any:
    source = fused_steps.SOURCE
    for ptx, plain in PTX.items():
        assert ptx in source
        source = source.replace(ptx, plain)
    source = PRELUDE + source + RUN.replace("NAME", name).replace("ARGUMENT", ARGUMENTS[name])
    options = [f"-D{key}={value}" for key, value in sorted(defines.items())]
    stem = hashlib.sha256((source + name + " ".join(options)).encode()).hexdigest()[:16]
    if stem not in BUILT:
        (folder / f"{stem}.cpp").write_text(source)
        built = folder / f"{stem}.so"
        command = ["g++", CPP, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w", *options]
        subprocess.run([*command, str(folder / f"{stem}.cpp"), "-o", str(built)], check=True)
        BUILT[stem] = ctypes.CDLL(str(built)).run
    return BUILT[stem]


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Steps run on host memory; returns the names of the kernels that were bound."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the kernels for the host")
    bound: list[str] = []

    def on_host(
        name: str, defines: dict[str, int], index: int, values: list[Any], lines: int, width: int, ops: Any,
        keep: tuple[object, ...] = (),
    ) -> Callable[[], None]:  # fmt: skip
        run, block = _compiled(name, defines, folder), np.frombuffer(words(*values), np.int64).copy()
        bound.append(name)

        def launch(_keep: object = (keep, ops)) -> None:
            run(block.ctypes.data_as(ctypes.c_void_p), max(1, min(lines, 3)), min(fused_steps.THREADS, max(1, width)))

        return launch

    monkeypatch.setattr(fused_steps, "_bound", on_host)
    return bound
