"""Which backend "auto" takes for a class of problems. The first of these rules that applies:

1. the table holds two backends or more for the class: the fastest of them;
2. it was measured once, in this process or an earlier one: what was chosen then;
3. it may be measured now: the fastest of the (at most three) backends that the static order names;
4. the static order.

A backend's time is the device's for a plan, which is captured or called in long rows. An eager call takes no less than
the host needs to launch it: there the time is the longer one of the two, so that among backends that are faster than
the host, the one with the shortest way to its launch is chosen.

Problems that are to be batch invariant know no ranking: `invariant_order` names one backend for all of some dtypes.

A choice, once made, stays: in this process by any of the rules, on disk by rule 3. Ranks of a process group, which have
to choose alike, go by rules 1 and 4, as does everyone where MULTIGEMM_MEASURE=0 forbids rules 2 and 3.

The evidence for the static order are the reports in `benchmarks/results/`: 845 rankings of four backends on one H100.
Beside the fastest of each, the first of the order takes 1.03 times as long in the geometric mean, and the fastest of
its three 1.0004 times. `tests/select/test_static_order.py` holds the order to the reports: change a line, and run it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import OperandSpec, ProblemSpec
from multigemm.select import recipes, registry, table
from multigemm.select.measure_once import WORTH, fastest, forbidden, measure_once
from multigemm.select.problem_class import EQUAL, ON_DEVICE, ProblemClass
from multigemm.select.table import Entry, Measured

AT_MOST = 3
HOST_US = {"cupy": 11.0, "numba": 11.0, "triton": 11.0, "cublas": 35.0}
"""Of a warm eager call, for tables that hold the time of the device alone (`benchmarks/host_time.py`, offsets, H200,
2026-11-22)."""
LESS_BUSY = 0.8
"""Of the other backend's host time: with less, an eager call over equal groups takes a backend that is up to 3 %
slower, since a caller who waits for the device has the rest of the time for work of his own."""
NOT_MEASURED = "first of the static order; not measured: "
LONG_K, MANY_ROWS = 1024, 64
"""From both on, 16-bit kernels of CuPy lead those of Triton: a slower start of each tile, and a faster main loop."""
FEW_GROUPS = 8
"""So many calls of cuBLAS in a row, each with a float32 kernel that is up to five times as fast, beat one launch."""
SPLIT_COLUMNS = 1200
"""Columns of all groups: a float32 product with no more fills a GPU by splitting K alone, as Triton's kernel does."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Backends, the one to take first, why, and what is known of their times."""

    names: tuple[str, ...]
    why: str
    times: Mapping[str, Measured] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class Query:
    """What a ranking is asked for: a problem, its class, the backends that can, and whether an eager call is to run."""

    problem: GroupedGemmProblem
    problem_class: ProblemClass
    able: Sequence[str]
    eager: bool = False

    @property
    def order(self) -> tuple[str, ...]:
        """The backends that can: as the static order has them, then the others."""
        named = [name for name in static_order(self.problem_class) if name in self.able]
        return (*named, *(name for name in self.able if name not in named))

    def us(self, name: str, measured: Measured) -> float:
        """The time that counts."""
        return max(measured.us, measured.host_us or HOST_US.get(name, 0.0)) if self.eager else measured.us

    def ranked(self, times: Mapping[str, Measured], best: str, why: str, source: str) -> Ranking:
        """The best one, the others by their times, and those without a time."""
        known = {name: self.us(name, measured) for name, measured in times.items()}
        names = sorted(self.order, key=lambda name: (name != best, known.get(name, math.inf)))
        us, device_us = self.us(best, times[best]), times[best].us
        host = f" of the host (the device takes {device_us:.1f})" if us > device_us else ""
        return Ranking(tuple(names), f"{why}, {us:.1f} us{host}, {source}", times, source)

    def by_entry(self, made: Entry) -> Ranking:
        """As it was measured once: what was chosen then, or for an eager call, by the time that counts there."""
        if not made.chosen:
            return Ranking(self.order, NOT_MEASURED + next(iter(made.failed.values())))
        us = {name: self.us(name, measured) for name, measured in made.backends.items()}
        best = self._best_eager(made.backends, us) if self.eager else made.chosen
        why = "the fastest" if us[best] == min(us.values()) else "about as fast as the fastest, and preferred to it"
        return self.ranked(made.backends, best, why, f"measured on {made.date[:10]}")

    def _best_eager(self, times: Mapping[str, Measured], us: Mapping[str, float]) -> str:
        """Over equal groups, whose times no other way to cut them changes, of those that are about as fast the one that
        keeps the host clearly less busy."""
        best = fastest(us, [*self.order, *us])
        if self.problem_class.where != EQUAL:
            return best
        host = {name: m.host_us for name, m in times.items() if us[name] <= WORTH * us[best] and m.host_us}
        least = min(host, key=lambda name: host[name], default=best)
        return least if host.get(least, 0.0) < LESS_BUSY * host.get(best, 0.0) else best


def rank(query: Query, may_measure: bool) -> Ranking:
    """The ranking of the backends that are able to solve a problem; measures, unless something is against it."""
    found = known(query)
    if found.why:
        return found
    if why_not := forbidden() if may_measure else "a config is given":
        return Ranking(found.names, NOT_MEASURED + why_not)
    with recipes.lock_of(query.problem.device):
        found = known(query)  # another thread may have measured
        if not found.why:
            worth = worth_measuring(query.problem_class, found.names)
            made = measure_once(query.problem, query.problem_class, worth)
            found = query.by_entry(table.table().keep_choice(made))
    return found


def known(query: Query) -> Ranking:
    """What is known without measuring now; where that is nothing, the static order without a reason."""
    names, device, tuned = query.order, query.problem.device, table.table()
    found = {name: x for name in names if (x := tuned.find(name, query.problem_class, device)) is not None}
    if len(found) > 1:
        times = {name: measured for name, (measured, _) in found.items()}
        best = min(times, key=lambda name: (query.us(name, times[name]), times[name].us))
        return query.ranked(times, best, "the fastest in the table", found[best][1])
    worth = worth_measuring(query.problem_class, names)
    if len(worth) < 2:
        return Ranking(names, "the only one that can")
    made = None if forbidden() else tuned.choice(query.problem_class, device, worth)
    return Ranking(names, "") if made is None else query.by_entry(made)


def worth_measuring(problem_class: ProblemClass, names: Sequence[str]) -> tuple[str, ...]:
    """Those that the static order names and all of third parties; where that leaves one alone, the first three."""
    named = static_order(problem_class)
    found = [name for name in names if name in named or name not in registry.BUILTIN]
    return tuple(found if len(found) > 1 else names[:AT_MOST])


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
    if c.quantised:
        return ("cupy", "triton", "numba") if _float8_of_hopper(c) else ("triton", "cupy", "numba")
    if c.dtype == "int8":
        return "numba", "triton", "cupy"
    if "+gather" in c.precision or "+gate" in c.precision:
        return "triton", "cupy"
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


def _float8_of_hopper(c: ProblemClass) -> bool:
    """What cupy multiplies as float8 by wgmma; all other quantised operands it multiplies in tf32, 10 to 40 times as
    slowly as Triton's kernel does (H200, 2026-11-22, 11 cases of mixtures of experts)."""
    along_k = c.a.partition("/")[2].startswith("row") and c.b.partition("/")[2].startswith("col")
    blocks = all("x32" not in x and "x64" not in x for x in (c.a, c.b))
    both = c.a.startswith("float8") and c.b.startswith("float8")
    return both and along_k and blocks and c.form not in ("jagged_k", "per_group") and not c.unaligned


def invariant_order(spec: ProblemSpec) -> tuple[str, ...]:
    """The order for batch-invariant problems: by dtype alone, since another backend gives other bits."""
    if spec.quantised:
        return "triton", "cupy", "numba", "cpu"
    if spec.compute in (torch.float16, torch.bfloat16):
        return "cupy", "triton", "numba", "cpu"
    if spec.compute is torch.int8 or (spec.compute is torch.float32 and spec.precision != "tf32"):
        return "numba", "triton", "cupy", "cpu"
    return "triton", "numba", "cupy", "cpu"


def plain_spec(spec: ProblemSpec) -> ProblemSpec:
    """An ordinary problem of the same dtypes: who runs it runs all, but for a few limits that it tells."""
    a, b, out = (OperandSpec(dtype) for dtype in (spec.compute, spec.compute, spec.out.dtype))
    return ProblemSpec(
        "jagged_m", 1, None, 64, 64, 64, 0, a, b, out, compute=spec.compute,
        precision=spec.precision, batch_invariant=True,
    )  # fmt: skip
