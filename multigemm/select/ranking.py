"""Which backend "auto" takes for a class of problems. The first of these rules that applies:

1. the table holds two backends or more for the class: the fastest of them;
2. it was measured once, in this process or an earlier one: what was chosen then;
3. it may be measured now: the fastest of the two to four backends that the static order names, and of third parties;
4. the static order.

A plan is ranked by the time of the device. An eager call takes no less than the host needs to launch it: there the time
is the longer one of the two.

`tests/select/test_static_order.py` holds the static order to the reports in `benchmarks/results/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from multigemm.backends import registry
from multigemm.cuda.device import first_gpu_processors
from multigemm.problem.spec import OperandSpec, ProblemSpec
from multigemm.select import table
from multigemm.select.measure_once import WORTH, fastest, forbidden, measure_once
from multigemm.select.problem_class import EQUAL, ON_DEVICE, ProblemClass, Query
from multigemm.select.table import Entry, Measured

HOPPER = 9
"""The major compute capability of the GPUs that the static order was fitted on."""
HOST_US = {"cupy": 11.0, "numba": 11.0, "triton": 11.0, "cublas": 35.0}
"""Of a warm eager call, for tables that hold the time of the device alone (`benchmarks/host_time.py`, offsets, H200,
2026-11-22)."""
LESS_BUSY = 0.8
"""Of the other backend's host time: with less, an eager call over equal groups takes a backend that is up to 3 %
slower, since a caller who waits for the device has the rest of the time for work of his own."""
LONG_K, MANY_ROWS = 1024, 128
"""From both on, 16-bit kernels of CuPy lead those of Triton: a slower start of each tile, and a faster main loop.

Of a weight gradient K is that of an average group: Triton's best config takes 0.81 to 0.95 of the time of CuPy's up to
192, 0.99 in the mean of 512, and 1.02 of 1024 (59 problems, H200, bfloat16, 2026-11-23,
benchmarks/results/h200/weight-gradients.json). Of products whose rows are summed, Qwen3-30B's second one (K 768),
Triton's take 0.92 with 256 rows per group, 0.98 with 1024 and 1.02 with 32 (H200, 2026-11-24).
"""
FEW_ROWS, HEAVY_WEIGHTS = 32, 1 << 23
"""Up to so many rows per group a product waits for its weights. From so many elements of them on CuPy's 16-bit kernels
lead Triton's: they ask for larger pieces. Fewer are read before a pipeline is under way, and Triton's low tiles start
sooner, on more multiprocessors. Fitted to one half of 350 random shapes and held to the other (H200, 2026-11-25)."""
FEW_TILES = 33
"""Square tiles of 128, a quarter of the multiprocessors, up to which Triton leads for a long K too: it shares tiles out
along K."""
TILE_ROWS, TILE_COLUMNS = 256, 128
"""Of 16-bit kernels, as a rule."""
FEW_GROUPS = 8
"""Up to this many calls of cuBLAS in a row, each with a float32 kernel up to five times as fast, beat one launch."""
SPLIT_COLUMNS = 1200
"""The columns of all groups up to which a float32 product fills a GPU only by splitting K, as Triton's kernel does."""


class Ranking(NamedTuple):
    """The backends in order of preference, the reason for the first, and their known times."""

    names: Sequence[str]
    why: str
    times: Mapping[str, Measured]


def rank(query: Query, able: Sequence[str], why_not: str = "") -> Ranking:
    """Ranks the backends `able` to solve a problem. Measures them, unless `why_not` or a setting forbids it."""
    order, worth = candidates(query.problem_class, able, is_hopper(query.problem.device))
    found = table.table().find(query.problem_class, query.problem.device)
    times = {name: found[name] for name in order if name in found}
    if len(times) > 1:
        return _ranked(query, order, times)
    if len(worth) < 2:
        return Ranking(order, "the only one that can", {})
    entry, obstacle = _measured(query, worth, why_not)
    if entry is None:
        return Ranking(order, f"first of the static order; not measured: {obstacle}", {})
    source = f"measured on {entry.date[:10]}"
    times = {name: replace(measured, source=source) for name, measured in entry.backends.items()}
    return _ranked(query, order, times, entry.chosen)


def candidates(c: ProblemClass, able: Sequence[str], hopper: bool = True) -> tuple[list[str], list[str]]:
    """The backends that are able, in the static order, the others behind; and those of them that are worth measuring:
    the static order's and all of other packages. If that is a single one, all."""
    named = [name for name in static_order(c, hopper) if name in able]
    order = [*named, *(name for name in able if name not in named)]
    worth = [name for name in order if name in named or name not in registry.BUILTIN]
    return order, worth if len(worth) > 1 else order


def _measured(query: Query, names: Sequence[str], why_not: str) -> tuple[Entry | None, str]:
    """The entry of a class that was or is measured, once for all threads; else None and why nothing is measured."""
    if forbids := forbidden():
        return None, forbids
    device, tuned = query.problem.device, table.table()
    found = tuned.choice(query.problem_class, device, names)
    if found is None and why_not:
        return None, why_not
    if found is None:
        with registry.lock_of(device):  # another thread may have measured meanwhile
            found = tuned.choice(query.problem_class, device, names) or tuned.keep_choice(measure_once(query, names))
    return (found, "") if found.chosen else (None, next(iter(found.failed.values())))


def _ranked(query: Query, order: Sequence[str], times: Mapping[str, Measured], chosen: str = "") -> Ranking:
    """Ranks the backends by the time that counts, those without a time last. `chosen`: the backend that was measured
    to be best for a plan; "" for times of a table, where the fastest is best."""
    host_us = {n: m.host_us or HOST_US.get(n, 0.0) for n, m in times.items()} if query.eager else {}
    us = {n: max(m.us, host_us.get(n, 0.0)) for n, m in times.items()}  # an eager call takes the host's time at least
    best = chosen or min(times, key=lambda name: (us[name], times[name].us))
    if chosen and query.eager:
        best = _best_eager(times, us, order, equal=query.problem_class.where == EQUAL)
    why = "the fastest" if us[best] == min(us.values()) else "about as fast as the fastest, and preferred to it"
    why += "" if chosen else " in the table"
    measured = times[best]
    host = f" of the host (the device takes {measured.us:.1f})" if us[best] > measured.us else ""
    names = sorted(order, key=lambda name: (name != best, us.get(name, math.inf)))
    return Ranking(names, f"{why}, {us[best]:.1f} us{host}, {measured.source}", times)


def _best_eager(times: Mapping[str, Measured], us: Mapping[str, float], order: Sequence[str], equal: bool) -> str:
    """The best backend of an eager call. Over equal groups, among backends that are about equally fast, the one that
    keeps the host clearly less busy."""
    best = fastest(us, [*order, *us])
    near = {n: m.host_us for n, m in times.items() if equal and us[n] <= WORTH * us[best] and m.host_us}
    least = min(near, key=lambda name: near[name], default=best)
    return least if near.get(least, 0.0) < LESS_BUSY * near.get(best, 0.0) else best


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU runs the kernels for Hopper; True where there is no GPU to rank for."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == HOPPER


def static_order(c: ProblemClass, hopper: bool = True) -> tuple[str, ...]:
    """The backends that are worth measuring for a class, the one expected to be fastest first. cuBLAS is left out for
    sizes on the device: its one call for these was never the fastest."""
    own = _own_kernels(c) if hopper else _portable_kernels(c)
    if c.where == ON_DEVICE:
        return own
    if (_is_batch(c) and c.dtype != "int8") or (c.dtype == "float32" and c.groups <= FEW_GROUPS):
        return "cublas", *own
    return *own, "cublas"


def _is_batch(c: ProblemClass) -> bool:
    """Whether cuBLAS runs all groups in one call.

    Not of equal jagged columns in 16 bits: 1.9 and 4.3 times the time of the fastest kernel (H200, 2026-11-23).
    """
    columns = c.form == "jagged_n" and c.dtype in ("float16", "bfloat16")
    return not columns and (c.where == EQUAL or c.form == "batched")


def _own_kernels(c: ProblemClass) -> tuple[str, ...]:
    """The backends with kernels of their own. Numba takes 7 to 12 s to compile a 16-bit kernel for Hopper, and
    measuring waits for it. So it takes part where long tiles are so few that their shape decides; elsewhere it was
    never the fastest, nor with quantised operands on Hopper."""
    if c.quantised:
        return ("cupy", "triton") if _of_hopper(c) else by_dtype(c)
    if "+gather" in c.precision or "+gate" in c.precision:
        return ("cupy", "triton") if _of_hopper(c) else ("triton", "cupy")
    if c.dtype == "float32":
        few_columns = c.n is not None and c.groups * c.n <= SPLIT_COLUMNS
        weights_by_rows = c.b.partition("/")[2].startswith("row")
        return ("triton", "numba", "cupy") if few_columns or weights_by_rows else by_dtype(c)
    if c.dtype not in ("float16", "bfloat16"):
        return by_dtype(c)
    k = c.total / max(c.groups, 1) if c.form == "jagged_k" else c.k or 0
    many = c.rows >= MANY_ROWS
    deep = many and k >= LONG_K
    long = deep and _tiles(c, 128, 128) > FEW_TILES
    if "+combine" in c.precision and _of_hopper(c) and (long or not many or "+epilogue" in c.precision):
        return "cupy", "triton"
    few = c.rows <= FEW_ROWS and c.groups * (c.n or 0) * k >= HEAVY_WEIGHTS
    found = ("cupy", "triton") if (long or few) and not c.unaligned else ("triton", "cupy")
    return (*found, "numba") if deep and _tiles(c, TILE_ROWS, TILE_COLUMNS) <= first_gpu_processors() else found


def _tiles(c: ProblemClass, rows: int, columns: int) -> int:
    return c.groups * math.ceil(c.rows / rows) * math.ceil((c.n or c.rows) / columns)


def _portable_kernels(c: ProblemClass) -> tuple[str, ...]:
    """The backends with kernels of their own where those for Hopper do not run.

    Plain aligned 16 bits by the portable kernels, on an H200, as parts of the rate of the best of six tiles of CUTLASS
    for sm_80: triton 0.89, numba 0.85, cupy 0.70 (2026-11-25, benchmarks/results/h200/before-hopper.json). Blackwell
    runs the same kernels and was not measured. Numba's takes some 6 s to compile, once for each dtype and layout.
    """
    if c.quantised:
        return by_dtype(c)
    if any(step in c.precision for step in ("+gather", "+gate", "+combine")):
        return "triton", "cupy"
    return ("triton", "numba", "cupy") if c.dtype in ("float16", "bfloat16") and not c.unaligned else _own_kernels(c)


def _of_hopper(c: ProblemClass) -> bool:
    """Whether cupy's kernels for Hopper can run these quantised or fused operands. For others cupy is slower than
    Triton, for quantised ones 10 to 40 times (H200, 2026-11-22); weights by wgmma are not measured yet."""
    if c.unaligned or c.form == "per_group":
        return False
    if not c.quantised:
        same = c.dtype in ("float16", "bfloat16") and c.out.partition("/")[0] == c.dtype
        return same and c.form != "jagged_n"
    along_k = c.a.partition("/")[2].startswith("row") and c.b.partition("/")[2].startswith("col")
    narrow = any(block in x for x in (c.a, c.b) for block in ("x32", "x64"))
    if c.a.startswith("float8"):
        return along_k and not narrow and c.form != "jagged_k"
    return along_k and c.form in ("jagged_m", "batched", "masked")


def by_dtype(c: ProblemClass) -> tuple[str, ...]:
    """The order of backends by dtype alone, for batch-invariant problems."""
    if c.quantised:
        return "triton", "cupy", "numba"
    if c.dtype in ("float16", "bfloat16"):
        return "cupy", "triton", "numba"
    return ("numba", "triton", "cupy") if c.dtype in ("int8", "float32") else ("triton", "numba", "cupy")


def plain_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec of an ordinary problem of the same dtypes. A backend that runs it runs nearly all problems of these
    dtypes."""
    a, b, out = (OperandSpec(dtype) for dtype in (spec.compute, spec.compute, spec.out.dtype))
    return ProblemSpec(
        "jagged_m", 1, None, 64, 64, 64, 0, a, b, out, compute=spec.compute,
        precision=spec.precision, batch_invariant=True,
    )  # fmt: skip
