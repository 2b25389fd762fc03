"""The competitors of a benchmark: multigemm's backends, peers and ceilings, behind one interface.

An `Entry` turns the tensors of a workload into a `Prepared` call, or raises `Refused` with the reason. The rest of the
benchmark does not know what it measures, so that backends are checked, timed and shown exactly as peers are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, Literal

import torch

from multigemm import api
from multigemm.backends import registry
from multigemm.bench.operands import Matrices, Tensors, make
from multigemm.bench.reports import AUTO, HOST_SIZES, INVARIANT, STATIC
from multigemm.bench.workloads import Workload
from multigemm.errors import BackendUnavailable, BackendUnsupported
from multigemm.planning.plan import Plan
from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.problem_class import Query
from multigemm.select.ranking import is_hopper, static_order
from multigemm.select.timing import Call

Kind = Literal["backend", "peer", "ceiling"]


class Refused(Exception):
    """The entry does not run this workload on this machine. The text gives the reason."""


@dataclass
class Prepared:
    """A call that is ready to be timed, and the output that it writes.

    If `out` is None, the call returns its result, or something from which `unpack` makes it before the check. `whole`
    is a user's complete call including the problem, if that differs from `call`.
    """

    call: Call
    out: Matrices | None
    kernel: str = ""
    config: str = ""
    why: str = ""
    syncs: bool = False
    whole: Call | None = None
    build_s: float = 0.0
    problem_class: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    unpack: Callable[[Any], Matrices] = lambda returned: returned

    def result(self, returned: Any) -> Matrices:
        """The result of a call, for the check."""
        return self.unpack(returned) if self.out is None else self.out


@dataclass(frozen=True)
class Entry:
    """One competitor. `checks` is False for a ceiling, which computes something else on purpose.

    `known` are fields of its row that are known before it is prepared, which may crash. An `optional` entry is not
    started once the time limit has passed. An entry that does not take a workload has no row.
    """

    name: str
    kind: Kind
    prepare: Callable[[Any], Prepared]
    checks: bool = True
    known: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = False
    takes: Callable[[Workload], bool] = lambda case: case.form != "layer"


def backend_entry(
    name: str, number: int | None = None, host_sizes: bool = False, batch_invariant: bool = False
) -> Entry:
    """A backend of multigemm, "auto", or "auto-static", entered where users enter: problem, then plan.

    Args:
        name: the backend.
        number: which of the backend's configs for a problem, from 0; None for its own choice.
        host_sizes: whether the offsets lie on the host.
        batch_invariant: whether it has to keep that promise.
    """

    def pose(tensors: Tensors) -> GroupedGemmProblem:
        return tensors.pose(host_sizes, **({"batch_invariant": True} if batch_invariant else {}))

    def prepare(tensors: Tensors) -> Prepared:
        if host_sizes and tensors.offsets is None:
            raise Refused("only packed forms have sizes that can lie on the host or the device")
        if host_sizes and tensors.host_offsets is None:
            raise Refused("sizes on the host are timed for a suite's workloads without scales only")
        started = time.perf_counter()
        try:
            posed = pose(tensors)
            config = None if number is None else _config(name, number, posed)
            plan = _first_of_static_order(posed) if name == STATIC else api.plan(posed, name, config)
        except (BackendUnsupported, BackendUnavailable) as error:
            raise Refused(_reason(error, name)) from error
        built = time.perf_counter() - started

        def whole() -> object:
            return api.solve(pose(tensors), plan.backend if name == STATIC else name, config)

        kernel = f"{plan.backend}: {plan.kernel}" if name in (AUTO, STATIC) else plan.kernel
        ready = Prepared(plan, tensors.out, kernel, str(plan.config or ""), plan.why, plan.syncs, whole, built)
        if name not in (AUTO, STATIC):
            ready.problem_class, ready.fields = str(Query(posed).problem_class), as_fields(plan.config)
        return ready

    label = name + HOST_SIZES * host_sizes + INVARIANT * batch_invariant
    return Entry(label if number is None else f"{label}#{number}", "backend", prepare)


def _first_of_static_order(posed: GroupedGemmProblem) -> Plan:
    """The plan that `auto` makes where it may not measure and no table knows the class."""
    for name in static_order(Query(posed).problem_class, is_hopper(posed.device)):
        try:
            plan = api.plan(posed, name)
        except (BackendUnsupported, BackendUnavailable):
            continue
        if not plan.syncs:
            return plan
    return api.plan(posed, AUTO)


def _config(name: str, number: int, posed: GroupedGemmProblem) -> Any:
    configs = list(registry.get(name).configs(staged_spec(posed), posed.device))
    if number >= len(configs):
        raise Refused(f"{name} has {len(configs)} configs for this problem")
    return configs[number]


def as_fields(config: Any) -> dict[str, Any]:
    """A config in the form of the tuning table."""
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}


def _reason(error: Exception, name: str) -> str:
    if isinstance(error, BackendUnsupported):
        return "; ".join(error.reasons.get(name) or [f"{k}: {'; '.join(v)}" for k, v in error.reasons.items()])
    return error.reason if isinstance(error, BackendUnavailable) else str(error)


def available_backends(device: torch.device) -> dict[str, str]:
    """Maps each backend to "" if it can run on the device, else to the reason."""
    found = {}
    for name in registry.names():
        if name == "null":
            continue
        state = registry.get(name).availability()
        if state.ok and name == "cpu" and device.type != "cpu":
            found[name] = "computes in host memory"
        elif state.ok and state.emulated:
            found[name] = "runs in an emulator here, which says nothing about its speed"
        else:
            found[name] = "" if state.ok else state.reason
    return found


def backend_entries(
    names: list[str], device: torch.device, configs: int = 0, batch_invariant: bool = False
) -> tuple[list[Entry], dict[str, str]]:
    """The entries of multigemm itself, and the absent backends with their reasons.

    Args:
        names: backends, "auto" and "auto-static"; by default all available backends, and "auto".
        device: where they run.
        configs: so many of each backend's configs, each as an entry of its own; 0 for the backend's own choice.
        batch_invariant: whether each is measured under that promise, too.
    """
    states = available_backends(device)
    for name in names:
        if name not in (AUTO, STATIC):
            registry.get(name)  # raises for one that does not exist
    chosen = names or [*[n for n, why in states.items() if not why], AUTO]
    here = [name for name in chosen if not states.get(name)]
    entries = [
        backend_entry(name, number)
        for name in here
        for number in (range(configs) if configs and name not in (AUTO, STATIC) else [None])
    ]
    if "cublas" in here and device.type == "cuda":
        knowing = [name for name in ("cublas", AUTO, STATIC) if name in chosen]  # the others never look at host sizes
        entries += [backend_entry(name, host_sizes=True) for name in knowing]
    entries += [backend_entry(name, batch_invariant=True) for name in (here if batch_invariant else ())]
    absent = {name: why for name, why in states.items() if why and (name in chosen or not names)}
    return entries, absent


def config_entries(case: Workload, names: Sequence[str], limit: int, device: torch.device) -> list[Entry]:
    """Every config of these backends for a workload: the first of each backend, then the second of each, and so on.

    A backend that plans by the sizes is tried with sizes in either place, where that makes two classes of problems. One
    that cannot run the workload is an entry that says why. `limit` is how many configs of each are tried; 0 is all.
    """
    tensors = make(case, device, drawn=False)
    posed: dict[bool, tuple[GroupedGemmProblem, str]] = {}
    for on_host in (False, True) if tensors.host_offsets is not None else (False,):
        whole = tensors.pose(on_host)
        key = str(Query(whole).problem_class)
        if key not in [other for _, other in posed.values()]:
            posed[on_host] = whole, key
    found: list[tuple[int, Entry]] = []
    for name in names:
        backend = registry.get(name)
        for on_host in posed if plans_by_sizes(name) else (False,):
            whole, key = posed[on_host]
            spec = staged_spec(whole)
            if backend.not_supported_reasons(spec, device):
                found.append((0, backend_entry(name, host_sizes=on_host)))
                continue
            for number, config in enumerate(list(backend.configs(spec, device))[: limit or None]):
                known = {"problem_class": key, "config": str(config), "fields": as_fields(config)}
                entry = backend_entry(name, number, on_host)
                found.append((number, replace(entry, known=known, optional=number > 0)))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def plans_by_sizes(name: str) -> bool:
    """Whether a backend runs another kernel if the sizes are on the host."""
    return bool(getattr(registry.get(name), "decides_at_bind", False))


def ceiling_entry() -> Entry:
    """One dense product of the same FLOPs with one weight: what the machine's BLAS does without groups."""
    return Entry("dense", "ceiling", _dense, checks=False)


def _dense(tensors: Tensors) -> Prepared:
    workload = tensors.workload
    a, b = tensors.a, tensors.b
    if workload.recipe is not None:
        raise Refused("torch has no dense product of operands with these scales")
    if isinstance(a, list) or isinstance(b, list):
        _, n, k = max(workload.products, key=lambda p: p[1] * p[2])
        rows = max(1, round(workload.flops / (2 * max(1, n * k))))
        like = a[0] if isinstance(a, list) else a
        a, b = _fill(like, rows, k), _fill(like, k, n)
    elif workload.form == "jagged_n":
        a = a[0]
    elif workload.form != "jagged_k":
        rows = int(workload.sizes.sum())
        a = a if a.dim() == 2 else a.reshape(-1, workload.k)[:rows]
        b = b if b.dim() == 2 else b[0]
    if workload.dtype == "int8":
        raise Refused("torch has no dense int8 product with an out argument")
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    out = torch.empty(a.shape[0], b.shape[1], dtype=workload.out_dtype, device=a.device)
    left, right = a, b
    return Prepared(lambda: torch.mm(left, right, out=out), None, "torch.mm")


def _fill(like: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    values = torch.randn(
        rows, cols, device=like.device, dtype=like.dtype if like.is_floating_point() else torch.float32
    )
    return values.to(like.dtype)
