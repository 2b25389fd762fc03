"""The order of backends where nothing was measured: at most three names for each class of problems, the best first.

The evidence are the reports in `benchmarks/results/`: 845 rankings of four backends on one H100. Beside the fastest of
each, the first of this order takes 1.03 times as long in the geometric mean, and the fastest of its three 1.0004 times.
`tests/select/test_static_order.py` holds the order to the reports: change a line here, and run it.
"""

from __future__ import annotations

import torch

from multigemm.problem.spec import OperandSpec, ProblemSpec
from multigemm.select.problem_class import EQUAL, ON_DEVICE, ProblemClass

LONG_K, MANY_ROWS = 1024, 64
"""From both on, 16-bit kernels of CuPy lead those of Triton: a slower start of each tile, and a faster main loop."""
FEW_GROUPS = 8
"""So many calls of cuBLAS in a row, each with a float32 kernel that is up to five times as fast, beat one launch."""
SPLIT_COLUMNS = 1200
"""Columns of all groups: a float32 product with no more fills a GPU by splitting K alone, as Triton's kernel does."""


def static_order(c: ProblemClass) -> tuple[str, ...]:
    """The backends that are worth measuring for a class, the one that is expected to be fastest first."""
    own = _own_kernels(c)
    if c.where == ON_DEVICE:
        return own
    batch = c.dtype != "int8" and (c.where == EQUAL or c.form == "batched")
    if batch or (c.dtype == "float32" and c.groups <= FEW_GROUPS):
        return "cublas", *own[:2]
    return *own[:2], "cublas"


def _own_kernels(c: ProblemClass) -> tuple[str, ...]:
    """Backends whose kernels read sizes on the device. cuBLAS has one call for that, which was never the fastest."""
    if c.dtype == "int8":
        return "numba", "triton", "cupy"
    if c.dtype in ("float64", "tf32"):
        return "triton", "numba", "cupy"
    if c.dtype == "float32":
        few_tiles = c.n is not None and c.groups * c.n <= SPLIT_COLUMNS
        weights_by_rows = c.b.partition("/")[2].startswith("row")
        return ("triton", "numba", "cupy") if few_tiles or weights_by_rows else ("numba", "triton", "cupy")
    k = c.total / max(c.groups, 1) if c.form == "jagged_k" else c.k or 0
    long = k >= LONG_K and c.rows >= MANY_ROWS and c.form != "masked"
    if (long or c.form == "jagged_n") and not c.unaligned:
        return "cupy", "triton"
    return "triton", "cupy"


def invariant_order(spec: ProblemSpec) -> tuple[str, ...]:
    """The order for batch-invariant problems: by dtype alone, since another backend gives other bits."""
    if spec.compute in (torch.float16, torch.bfloat16):
        return "cupy", "triton", "numba", "cpu"
    if spec.compute is torch.float32 and spec.precision != "tf32":
        return "numba", "triton", "cupy", "cpu"
    if spec.compute is torch.int8:
        return "numba", "triton", "cupy", "cpu"
    return "triton", "numba", "cupy", "cpu"


PLAIN_EXTENT = 64


def plain_spec(spec: ProblemSpec) -> ProblemSpec:
    """An ordinary problem of the same dtypes: who runs it runs all, but for a few limits that it tells."""
    a, b, out = (OperandSpec(dtype) for dtype in (spec.compute, spec.compute, spec.out.dtype))
    return ProblemSpec(
        "jagged_m", 1, None, PLAIN_EXTENT, PLAIN_EXTENT, PLAIN_EXTENT, 0, a, b, out, compute=spec.compute,
        precision=spec.precision, batch_invariant=True,
    )  # fmt: skip
