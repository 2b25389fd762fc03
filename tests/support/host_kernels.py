"""The kernels of `cuda/fused_steps.cu` as host code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multigemm.cuda.arguments import words
from multigemm.planning import fused_steps
from tests.support.cuda_on_host import host_function

ARGUMENTS = {"gather_rows": "Gather", "finish_rows": "Finish", "sum_rows": "Sum"}


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps run on host memory; returns the names of the kernels that were bound."""
    bound: list[str] = []

    def on_host(
        name: str, defines: dict[str, int], index: int, values: list[Any], lines: int, width: int, ops: Any,
        keep: tuple[object, ...] = (),
    ) -> Callable[[], None]:  # fmt: skip
        options = tuple(f"-D{key}={value}" for key, value in sorted(defines.items()))
        run = host_function(fused_steps.SOURCE, name, ARGUMENTS[name], options)
        block = np.frombuffer(words(*values), np.int64).copy()
        bound.append(name)

        def launch(_keep: object = (keep, ops)) -> None:
            run(block.ctypes.data_as(ctypes.c_void_p), max(1, min(lines, 3)), min(fused_steps.THREADS, max(1, width)))

        return launch

    monkeypatch.setattr(fused_steps, "_bound", on_host)
    return bound
