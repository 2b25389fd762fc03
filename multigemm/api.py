"""From a problem to a backend: `grouped_gemm`, `solve`, `plan`, `explain`, `list_backends`.

`multigemm.select.choose` has the rule of choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from multigemm.backends import registry
from multigemm.errors import InvalidProblem, UnknownKeyword, unknown_keyword_text
from multigemm.planning import binding, launch_cache
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.launch_key import PLAIN_LENGTH, Call, Key, config_key, fused_call, key_of, one_cut
from multigemm.planning.plan import Plan
from multigemm.problem.arrays import dtype_of
from multigemm.problem.fused import FusedKeywords, refuse_in_operator
from multigemm.problem.problem import GroupedGemmProblem, Keywords, checked
from multigemm.select.choose import Explanation, Which, choose, explain_choice
from multigemm.torch_internals import no_dynamo, run_while_tracing

KEYWORDS = (*Keywords.__annotations__, "backend", "config")
"""What `grouped_gemm` takes besides a and b."""


@overload
def grouped_gemm(
    a: Tensor, b: Tensor, *, backend: Which = "auto", config: Any = None, **keywords: Unpack[Keywords]
) -> Tensor: ...


@overload
def grouped_gemm(
    a: Sequence[Tensor], b: Sequence[Tensor], *, backend: Which = "auto", config: Any = None,
    **keywords: Unpack[Keywords],
) -> list[Tensor]: ...  # fmt: skip


@overload
def grouped_gemm(
    a: Any, b: Any, *, backend: Which = "auto", config: Any = None, **keywords: Unpack[Keywords]
) -> Any: ...


def grouped_gemm(
    a: Any,
    b: Any,
    *,
    offsets: Any = None,
    sizes: Any = None,
    ends: Any = None,
    jagged: str = "m",
    valid_rows: Any = None,
    c: Any = None,
    alpha: float = 1.0,
    beta: float | None = None,
    bias: Any = None,
    activation: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    precision: str = "ieee",
    deterministic: bool = True,
    batch_invariant: bool | None = None,
    check: str = "host",
    scale_a: Any = None,
    scale_b: Any = None,
    zero_b: Any = None,
    b_format: str | None = None,
    accumulate: str = "promoted",
    backend: Which = "auto",
    config: Any = None,
    **fused: Unpack[FusedKeywords],
) -> Any:
    """Many matrix products of different shapes in one call.

    Computes `C_g = act(alpha * A_g @ B_g + beta * C_g + bias_g)` for every group g.

    Args:
        a, b: the operands, packed ([T, K] and [G, K, N], say) or as lists of matrices.
        offsets, sizes, ends: one of them cuts the packed operands into groups.
        jagged: the direction that they cut: "m", "n" or "k". Weight gradients (a [M, T], b [T, N]) need "k": their
            shapes fit "m" as well.
        out_dtype: dtype of the result; by default that of the operands, or torch.promote_types of two float dtypes.
        check: "full" reads sizes on the device back and checks them, "complete" also that the groups own every row.
        beta: the factor of c; 1 by default where c is given, else 0. An explicit 0 never reads c.
        scale_a, scale_b, zero_b, b_format, accumulate: for quantised operands (docs/how-to/quantised-operands.md).
        a_rows, b_rows, glu_layout, glu_alpha, glu_beta, glu_limit, preact_out, row_scale, combine, out_rows, rows: rows
            picked by index, gates and sums of rows (docs/how-to/moe-keywords.md).
        backend: a name (that backend and no other), several names (the first that can run the problem) or "auto" (the
            fastest that can; the first call of a class may measure, which MULTIGEMM_MEASURE=0 forbids).
        config: the backend's own parameters: its Config, or a mapping of some of its fields.
        others: as in `GroupedGemmProblem`.

    Returns:
        The result, as the caller's kind of array, a list for lists. Differentiable where an input requires grad.
        torch.autocast does not change it; the torch operator (`multigemm.integrations.grouped_gemm`) obeys autocast.

    Raises:
        InvalidProblem: the arguments have no meaning; the text names the value, the limit and the remedy.
        UnknownKeyword: there is no such keyword; the text names what was probably meant.
        BackendUnsupported, BackendUnavailable: no backend that was asked for can solve it here, and why.

    Example:
        >>> import torch, multigemm as mg
        >>> out = mg.grouped_gemm(torch.ones(6, 4), torch.ones(3, 4, 2), sizes=[1, 0, 5])
        >>> out.shape
        torch.Size([6, 2])
    """
    if fused:
        for name in fused.keys() - FusedKeywords.__annotations__.keys():
            raise UnknownKeyword(unknown_keyword_text("grouped_gemm", name, KEYWORDS))
    if is_compiling():  # a graph holds the torch operator, not this code
        return traced_grouped_gemm(
            a, b, offsets=offsets, sizes=sizes, ends=ends, jagged=jagged, valid_rows=valid_rows, c=c, alpha=alpha,
            beta=beta, bias=bias, activation=activation, out=out, out_dtype=out_dtype, precision=precision,
            deterministic=deterministic, batch_invariant=batch_invariant, check=check, scale_a=scale_a, scale_b=scale_b,
            zero_b=zero_b, b_format=b_format, accumulate=accumulate, backend=backend, config=config, **fused,
        )  # fmt: skip
    kind, cut, several = one_cut(offsets, sizes, ends)
    key = class_key = None
    plain = scale_a is scale_b is zero_b is b_format is None and accumulate == "promoted"
    fuses = bool(fused) and any(x is not None for x in fused.values())
    more = fused_call(fused) if fuses else ((), ())
    if check == "host" and not several and more is not None:
        options: Key = (
            jagged, alpha, type(alpha), beta, type(beta), activation, out_dtype, precision, deterministic,
            type(deterministic), batch_invariant, type(batch_invariant),
            tuple(backend) if type(backend) is list else backend,
            None if config is None else config_key(config),
        )  # fmt: skip
        call: Call = (jagged, a, b, kind, cut, valid_rows, c, bias, out)
        if not plain:
            options, call = (*options, b_format, accumulate), (*call, scale_a, scale_b, zero_b)
        if fuses:
            tensors, numbers = more
            options, call = (*options, numbers), (*call, *tensors[len(call) - PLAIN_LENGTH :])
        key = key_of(call, options)
        if key is not None:
            found, class_key = LAUNCHES.recall(key, call)
            if found is not None:
                return found
    problem = GroupedGemmProblem(
        a, b, offsets=offsets, sizes=sizes, ends=ends, jagged=jagged, valid_rows=valid_rows, c=c, alpha=alpha,
        beta=beta, bias=bias, activation=activation, out=out, out_dtype=out_dtype, precision=precision,
        deterministic=deterministic, batch_invariant=batch_invariant, check=check, scale_a=scale_a, scale_b=scale_b,
        zero_b=zero_b, b_format=b_format, accumulate=accumulate, **fused,
    )  # fmt: skip
    return _solve(problem, backend, config, (key, class_key))


@no_dynamo
def _solve(problem: GroupedGemmProblem, backend: Which, config: Any, keys: tuple[Key | None, Key | None]) -> Any:
    if problem.requires_grad and torch.is_grad_enabled():
        from multigemm.integrations import gradients

        return gradients.solve(problem, backend, config, grouped_gemm)
    return LAUNCHES.run(keys, choose(problem, backend, config, eager=True), problem)


@no_dynamo
def solve(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Any:
    """Solve a problem: return its result as the caller's kind of array (a list of arrays for lists).

    Args:
        problem: what to compute.
        backend: a name (that backend and no other), several names (the first that can run the problem) or "auto": the
            fastest that can. The first call of a class of problems measures (besides compiling 13 ms in the median of
            180 on an H200, 45 ms at worst), and its choice is kept on disk; MULTIGEMM_MEASURE=0 forbids it.
        config: the backend's own parameters: its Config, or a mapping of some of its fields.

    Returns:
        The result; differentiable where an input requires grad.

    Raises:
        BackendUnsupported, BackendUnavailable: no backend that was asked for can solve it here, and why.

    Example:
        >>> import torch, multigemm as mg
        >>> problem = mg.GroupedGemmProblem(torch.ones(6, 4), torch.ones(3, 4, 2), sizes=[1, 0, 5])
        >>> mg.solve(problem).shape
        torch.Size([6, 2])
    """
    if checked(problem).requires_grad and torch.is_grad_enabled():
        return _solve(problem, backend, config, (None, None))
    return launch_cache.solve(choose(problem, backend, config, eager=True), problem)


@overload
def plan(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Plan: ...


@overload
def plan(a: Any, b: Any, *, backend: Which = "auto", config: Any = None, **keywords: Unpack[Keywords]) -> Plan: ...


@no_dynamo
def plan(*args: Any, **keywords: Any) -> Plan:
    """Compile and bind a problem and allocate its result. Calling the returned plan only launches.

    Args:
        problem: what to compute; or `a`, `b` and the keywords of `grouped_gemm` in its place.
        backend, config: as for `grouped_gemm`.

    Returns:
        The plan. `plan()` reads the operands where they lie; `plan.run(problem)` solves another problem of the spec.

    Raises:
        InvalidProblem: the arguments have no meaning, or an input requires grad.
        BackendUnsupported, BackendUnavailable: no backend that was asked for can solve it here, and why.

    Example:
        >>> import torch, multigemm as mg
        >>> mg.plan(torch.ones(6, 4), torch.ones(3, 4, 2), sizes=[1, 0, 5], backend="cpu")().shape
        torch.Size([6, 2])
    """
    problem, backend, config = _posed("plan", args, keywords)
    binding.refuse_gradients(problem)
    return Plan(choose(problem, backend, config), problem)


@overload
def explain(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Explanation: ...


@overload
def explain(
    a: Any, b: Any, *, backend: Which = "auto", config: Any = None, **keywords: Unpack[Keywords]
) -> Explanation: ...


@no_dynamo
def explain(*args: Any, **keywords: Any) -> Explanation:
    """Explain which backend and config `grouped_gemm` or `solve` would run with the same arguments, and why.

    Measures wherever those calls would. A plan of a short product may get another backend, because an eager call also
    counts the host's time.

    Args:
        problem: what to compute; or `a`, `b` and the keywords of `grouped_gemm` in its place.
        backend, config: as for `grouped_gemm`.

    Returns:
        The explanation, which prints as a table.

    Raises:
        InvalidProblem: the arguments have no meaning.

    Example:
        >>> import torch, multigemm as mg
        >>> mg.explain(torch.ones(6, 4), torch.ones(3, 4, 2), sizes=[1, 0, 5], backend="cpu").chosen
        'cpu'
    """
    return explain_choice(*_posed("explain", args, keywords))


Posed = tuple[GroupedGemmProblem, Which, Any]


def _posed(function: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Posed:
    """Returns problem, backend and config of a call, which passed a problem or the arguments of `grouped_gemm`."""
    for name in keywords.keys() - {"problem", "a", "b", *KEYWORDS}:
        raise UnknownKeyword(unknown_keyword_text(function, name, KEYWORDS))
    if "problem" in keywords or (args and isinstance(args[0], GroupedGemmProblem)):
        if more := keywords.keys() - {"problem", "backend", "config"}:
            names = ", ".join(sorted(more))
            raise InvalidProblem(f"{function} got a problem and {names}: give these to GroupedGemmProblem(a, b, ...)")
        return _with_problem(*args, **keywords)
    if len(args) + len(keywords.keys() & {"a", "b"}) != 2:
        given = f"a {type(args[0]).__name__}" if args else "missing"
        raise InvalidProblem(
            f"problem is {given}: pass a GroupedGemmProblem, or a, b and the keywords of grouped_gemm by name"
        )
    backend, config = keywords.pop("backend", "auto"), keywords.pop("config", None)
    return GroupedGemmProblem(*args, **keywords), backend, config


def _with_problem(problem: Any, backend: Which = "auto", config: Any = None) -> Posed:
    return checked(problem), backend, config


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of `list_backends()`. Printing it shows the version of an available backend, or what is missing and how
    to install it."""

    name: str
    available: bool
    version: str
    reason: str
    install: str
    emulated: bool

    def __str__(self) -> str:
        if self.available:
            return f"{self.name:8} here      {'emulated on the CPU' if self.emulated else self.version}".rstrip()
        remedy = f"  [{self.install}]" if self.install else ""  # what is installed needs something else
        return f"{self.name:8} {'missing ' if remedy else 'unusable'}  {self.reason}{remedy}"


class Backends(list[BackendInfo]):
    """A list of `BackendInfo` that prints one backend per line."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self))


@no_dynamo
def list_backends() -> Backends:
    """List every known backend: available or not, its version, or what is missing and how to install it.

    Returns:
        A list of BackendInfo, printed one backend a line, with name, whether it is available, its version, else the
        reason and how to install it.

    Example:
        >>> import multigemm as mg
        >>> "cpu" in [backend.name for backend in mg.list_backends() if backend.available]
        True
    """
    states = ((name, registry.state(name)) for name in registry.names())
    return Backends(BackendInfo(name, s.ok, s.version, s.reason, s.install, s.emulated) for name, s in states)


# --- inside torch.compile -----------------------------------------------------------------------------
#
# Problems, choices and plans read addresses, which do not exist while torch traces. So the graph holds
# `torch.ops.multigemm.grouped_gemm`, and the backend is chosen when the graph runs.


def _register_operator() -> None:
    """Registers the operator. That takes about a second, so calls outside of a graph do not wait for it."""
    from multigemm.integrations import torch_op as torch_op


run_while_tracing(_register_operator)  # Dynamo cannot trace an import
run_while_tracing(unknown_keyword_text)  # nor difflib


def traced_grouped_gemm(
    a: Any, b: Any, *, backend: Any = "auto", config: Any = None, out: Any = None, check: str = "host", **keywords: Any
) -> Tensor:
    """Makes the traced call as an operator. Refuses what a graph cannot hold."""
    if isinstance(a, list | tuple) or isinstance(b, list | tuple) or out is not None or config is not None:
        raise InvalidProblem(
            "lists, out= and config= cannot be compiled: pass packed tensors, or keep the call out of torch.compile"
        )
    if check != "host":
        raise InvalidProblem(
            f"check={check!r} cannot be compiled, since a graph never reads sizes back: leave it at 'host', or keep "
            "the call out of torch.compile"
        )
    refuse_in_operator([name for name, x in keywords.items() if x is not None])
    _register_operator()
    _as_tensors(keywords, a.device)
    if (dtype := keywords.get("out_dtype")) is not None and not isinstance(dtype, torch.dtype):
        keywords["out_dtype"] = dtype_of(dtype, "out_dtype")
    for name in ("offsets", "sizes", "ends", "valid_rows"):
        if isinstance(cut := keywords.get(name), list | tuple | range):
            keywords[name] = torch.tensor(list(cut), device=a.device, dtype=None if cut else torch.int64)
    names = backend if isinstance(backend, str) else ",".join(backend)
    if torch.is_autocast_enabled(a.device.type):  # the operator obeys autocast, a problem means what it says
        with torch.autocast(a.device.type, enabled=False):
            return _operator(a, b, backend=names, **keywords)
    return _operator(a, b, backend=names, **keywords)


def _as_tensors(keywords: dict[str, Any], device: torch.device) -> None:
    """Turns lists of sizes into tensors on the operands' device, and `combine` into two arguments."""
    if (combine := keywords.get("combine")) is not None:
        keywords["combine"], keywords["combine_weights"] = combine
    for name in ("a_rows", "b_rows", "combine", "out_rows"):
        if isinstance(rows := keywords.get(name), list | tuple | range):
            keywords[name] = torch.tensor(list(rows), device=device, dtype=torch.int64)


def _operator(*args: Any, **keywords: Any) -> Tensor:
    result: Tensor = torch.ops.multigemm.grouped_gemm(*args, **keywords)
    return result
