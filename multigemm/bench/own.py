"""Benchmarks of a user's problem: `mg.benchmark(problem)` and `multigemm bench --problem FILE`."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from multigemm.bench import table
from multigemm.bench.entries import backend_entries, ceiling_entry
from multigemm.bench.operands import Tensors, poison_of
from multigemm.bench.peers import peer_entries
from multigemm.bench.reports import Report
from multigemm.bench.runner import Options, Runner, new_report
from multigemm.bench.workloads import DTYPES, Workload
from multigemm.errors import InvalidProblem, InvalidSetting
from multigemm.problem import rebuild
from multigemm.problem.arrays import give_back
from multigemm.problem.problem import GroupedGemmProblem


class Benchmark(Report):
    """A report that prints as the table of `multigemm bench`."""

    def __str__(self) -> str:
        return table.text(self)


def benchmark(
    problem: GroupedGemmProblem,
    backends: Sequence[str] = (),
    peers: Sequence[str] = (),
    options: Options | None = None,
) -> Benchmark:
    """Times every backend and peer on a problem, on the problem's own operands and with its epilogue.

    Each result is checked before it is timed. Results go to memory of their own: nothing of the caller's is written.
    Peers run plain products alone. A kernel that hangs or crashes takes this process with it; `multigemm bench
    --problem FILE` measures in a child process.

    Args:
        problem: what is measured; its sizes are read back from the device once.
        backends: names; by default all available ones, and "auto".
        peers: names as `multigemm bench --peers` takes them; by default all installed ones.
        options: how to measure.

    Returns:
        A report. `print` shows it as a table; `report.rows` holds the numbers.

    Raises:
        InvalidSetting: for a name that is unknown.

    Example:
        >>> print(mg.benchmark(mg.GroupedGemmProblem(a, b, offsets=offsets)))
    """
    tensors = own_tensors(problem, "problem")
    device, case = problem.device, tensors.workload
    ours, absent = backend_entries(list(backends), device)
    theirs, missing = peer_entries(list(peers), device, [case])
    options = options or Options.usual(device)
    report = Benchmark(**vars(new_report(device, {case.dtype}, options, {**absent, **missing})))
    entries = [*ours, *theirs, ceiling_entry()]
    Runner(lambda case: entries, device, options, report, tensors_of=lambda case, device: tensors).run([case])
    return report


def load(path: Path) -> GroupedGemmProblem:
    """Runs a Python file and returns its `problem`: a GroupedGemmProblem, or the result of a function of that name."""
    if not path.is_file():
        raise InvalidSetting(f"{path}: there is no such file")
    try:
        found = runpy.run_path(str(path)).get("problem")
        found = found() if callable(found) else found
    except Exception as error:  # the file may do anything
        raise InvalidSetting(f"{path}{_line_of(error, path)}: {type(error).__name__}: {error}") from error
    if not isinstance(found, GroupedGemmProblem):
        raise InvalidSetting(f"{path}: it has to define `problem`, a GroupedGemmProblem or what returns one")
    return found


def _line_of(error: Exception, path: Path) -> str:
    """The line of the file at which it failed, as text; "" if unknown."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def own_tensors(problem: GroupedGemmProblem, name: str) -> Tensors:
    """The `Tensors` of a user's problem; results go to new memory, in row-major order."""
    given, offsets = with_own_result(problem), None
    case = own_workload(given, name)
    if case.form.startswith("jagged"):
        offsets = torch.tensor([0, *case.sizes.cumsum()], dtype=torch.int32, device=problem.device)
    return Tensors(case, rebuild.arguments(given), offsets)


def own_workload(problem: GroupedGemmProblem, name: str) -> Workload:
    """The `Workload` that describes a user's problem in a report: form, extents, sizes, dtype and layouts."""
    if problem.quantisation is not None:
        raise InvalidProblem("benchmarks of quantised operands come later: time multigemm.plan(problem) by yourself")
    if problem.spec.fused is not None:
        names = ", ".join(problem.spec.fused.keywords)
        raise InvalidProblem(f"benchmarks of {names} come later: time multigemm.plan(problem) by yourself")
    spec, form, extents = problem.spec, problem.form, problem.sizes()
    tf32 = problem.precision == "tf32" and spec.compute == torch.float32
    dtype = "tf32" if tf32 else next(short for short, dtype in DTYPES.items() if dtype == spec.compute)
    case = Workload(
        name, "own", form, spec.groups, dtype=dtype, distribution="given",
        shared_b=spec.b.shared, trans_a=spec.a.order == "col", trans_b=spec.b.order == "col",
    )  # fmt: skip
    if problem.extents is None:
        return replace(case, products=tuple(extents))
    jagged = "m" if form == "masked" else form[-1] if form.startswith("jagged") else ""
    full = {extent: 0 if extent == jagged else getattr(problem.extents, extent) for extent in "mnk"}
    rows = problem.extents.m if form == "masked" else full["m"]
    sizes = tuple(extent["mnk".index(jagged)] for extent in extents) if jagged else ()
    return replace(case, m=rows, n=full["n"], k=full["k"], total=sum(sizes), given=sizes)


def with_own_result(problem: GroupedGemmProblem) -> GroupedGemmProblem:
    """The same problem with a new `out`. Elements that no group owns hold NaN, or a large integer."""
    a, b, keywords = rebuild.arguments(problem)

    def result(shape: Sequence[int]) -> object:
        made = torch.full(tuple(shape), poison_of(problem.out_dtype), dtype=problem.out_dtype, device=problem.device)
        return give_back(made, problem.kind)

    shapes = problem.out_shape[1:] if problem.squeezed else problem.out_shape
    out = [result(shape) for shape in shapes] if problem.extents is None else result(shapes)
    return GroupedGemmProblem(a, b, **{**keywords, "out": out})
