"""Operands with exact answers, and the configs to force: what the GPU tests of the cublas backend share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cublas.config import Config

cuda: Any = torch.cuda
ALL = (Config("auto"), Config("loop"), Config("batched"), Config("streams", 3), Config("grouped"), Config("grouped_mm"))
NEEDS_SIZES = (Config("loop"), Config("batched"), Config("streams", 3), Config("grouped"))


def ints(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=gen, device="cuda").to(dtype)


def exact_rows(a: Tensor, b: Tensor, sizes: list[int], start: int = 0) -> Tensor:
    """The exact rows of a jagged-m problem with small integers; zeros where no group is."""
    want = torch.zeros(a.shape[0], b.shape[-1], dtype=torch.float64, device=a.device)
    for g, size in enumerate(sizes):
        want[start : start + size] = a[start : start + size].double() @ b[g].double()
        start += size
    return want


def offsets_of(sizes: list[int], head: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(np.cumsum([head, *sizes]), dtype=dtype, device="cuda")


def captured(plan: mg.Plan) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call, and its result."""
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    return graph, out
