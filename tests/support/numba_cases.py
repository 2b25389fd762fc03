"""Small ragged problems of every form, for the Numba backend's tests.

Run as a program, it solves them and reports one JSON line for each: the simulator must be chosen
before Numba is imported, so its tests live in a process of their own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import multigemm as mg

SIZES = (5, 0, 9, 1)
N, K, M = 11, 13, 6
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
}
FORMS = ("per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked")
LAYOUTS = ("row", "col", "strided")
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


class Maker:
    """Seeded matrices in a few memory layouts."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str, layout: str) -> None:
        self.source = torch.Generator().manual_seed(seed)
        self.dtype, self.device, self.layout = dtype, device, layout

    def values(self, *shape: int) -> Tensor:
        if self.dtype == torch.int8:
            return torch.randint(-9, 10, shape, generator=self.source).to(torch.int8).to(self.device)
        return torch.randn(shape, generator=self.source).to(self.dtype).to(self.device)

    def matrix(self, *shape: int) -> Tensor:
        if self.layout == "col":
            return self.values(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        if self.layout == "strided":
            return self.values(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
        return self.values(*shape)


def ends_of(sizes: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor(sizes, dtype=dtype).cumsum(0).to(dtype).to(device)


def operands(form: str, make: Maker, scale: int = 1) -> tuple[Any, Any, dict[str, Any]]:
    """a, b and the grouping of one problem; `scale` multiplies every extent."""
    sizes = tuple(s * scale + (s > 0 and scale > 1) for s in SIZES)
    total, groups, m, n, k = sum(sizes) + 3, len(sizes), M * scale, N * scale, K * scale
    ends = ends_of(sizes, make.device, torch.int32)
    offsets = torch.cat([ends.new_zeros(1), ends]) + 2
    if form == "per_group":
        shapes = [(7, 5, 9), (1, 12, 0), (0, 3, 4), (9, 8, 17), (8, 16, 8)]
        shapes = [(i * scale, j * scale, x * scale) for i, j, x in shapes]
        return [make.matrix(i, x) for i, _, x in shapes], [make.matrix(x, j) for _, j, x in shapes], {}
    if form == "jagged_m":
        return make.matrix(total, k), make.matrix(groups, k, n), {"offsets": offsets}
    if form == "jagged_n":
        return make.matrix(groups, m, k), make.matrix(k, total), {"offsets": offsets.long(), "jagged": "n"}
    if form == "jagged_k":
        return make.matrix(m, total), make.matrix(total, n), {"ends": ends, "jagged": "k"}
    a, b = make.matrix(groups, m, k), make.matrix(groups, k, n)
    rows = torch.tensor([m, 0, 1, m - 1], dtype=torch.int32, device=make.device)
    return a, b, {"valid_rows": rows} if form == "masked" else {}


def epilogue(problem: mg.GroupedGemmProblem, make: Maker, activation: str | None) -> dict[str, Any]:
    """alpha, beta, c, bias and an activation that fit the result of `problem`."""
    shape = problem.out_shape
    wide = torch.int32 if make.dtype == torch.int8 else make.dtype

    def like(size: Any) -> Tensor:
        return make.values(*size).to(wide)

    whole = isinstance(problem.a, list)
    c = [like(s) for s in shape] if whole else like(shape)
    bias = [like(s[-1:]) for s in shape] if whole else like(shape[-1:])
    return {"alpha": 2.0, "beta": -1.0, "c": c, "bias": bias, "activation": activation}


def cases(
    device: str, dtypes: Any = DTYPES, scale: int = 1, forms: Any = FORMS, layouts: Any = LAYOUTS
) -> Iterator[tuple[str, mg.GroupedGemmProblem]]:
    """Every form with every dtype, in turn over layouts, epilogues and output dtypes."""
    seed = 0
    for form in forms:
        for name in dtypes:
            dtype = DTYPES[name]
            for layout in layouts:
                seed += 1
                make = Maker(seed, dtype, device, layout)
                a, b, grouping = operands(form, make, scale)
                extra: dict[str, Any] = {}
                if seed % 2:
                    activation = ACTIVATIONS[seed // 2 % (2 if name == "int8" else 5)]
                    extra = epilogue(mg.GroupedGemmProblem(a, b, **grouping), make, activation)
                if seed % 3 == 0 and name != "int8":
                    extra["out_dtype"] = (torch.float32, torch.bfloat16, torch.float16)[seed // 3 % 3]
                title = f"{form} {name} {layout} {sorted(extra)} {extra.get('activation')}"
                yield title, mg.GroupedGemmProblem(a, b, **grouping, **extra)


def main() -> None:
    """One JSON line for each case, then one with the rate."""
    began, count = time.perf_counter(), 0
    names = sys.argv[1:] or list(DTYPES)
    for title, problem in cases("cpu", {name: DTYPES[name] for name in names}):
        verdict = mg.verify(problem, mg.solve(problem, backend="numba"))
        count += 1
        print(json.dumps({"title": title, "ok": bool(verdict), "text": str(verdict)}), flush=True)
    print(json.dumps({"count": count, "seconds": time.perf_counter() - began}))


if __name__ == "__main__":
    main()
