"""Operands of every form, and a float64 loop with an error bound: what the tests of the cpu backend share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backends.cpu import BACKEND
from multigemm.planning.operands import Operands
from multigemm.problem.spec import FORMS, OperandSpec, ProblemSpec

CPU = torch.device("cpu")
U = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float64: 0.0, torch.float32: 2.0**-126, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}


@dataclass
class Case:
    """What to build. `sizes` along the jagged direction (valid rows for masked), M/N/K elsewhere."""

    form: str
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = (5, 0, 17, 1, 8)
    m: int = 9
    n: int = 12
    k: int = 20
    head: int = 0
    tail: int = 0
    shared: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    c_dtype: torch.dtype | None = None
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    activation: str | None = None
    zero_unowned: bool = True
    index: torch.dtype = torch.int32
    transposed: str = ""
    integers: int = 0
    seed: int = 0

    @property
    def target(self) -> torch.dtype:
        return self.out_dtype or (torch.int32 if self.dtype == torch.int8 else self.dtype)


def _values(case: Case, gen: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, name: str = "") -> Tensor:
    flip = bool(name) and name in case.transposed
    shape = (*shape[:-2], shape[-1], shape[-2]) if flip else shape
    if dtype in (torch.int8, torch.int32) or case.integers:
        limit = case.integers or 128
        made = torch.randint(-limit, limit, shape, generator=gen).to(dtype)
    else:
        made = torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)
    return made.transpose(-1, -2) if flip else made


def _shapes(case: Case) -> tuple[Any, Any, Any, Any]:
    g, m, n, k = len(case.sizes), case.m, case.n, case.k
    t = case.head + sum(case.sizes) + case.tail
    if case.form == "jagged_m":
        return (t, k), (k, n) if case.shared else (g, k, n), (t, n), (n,) if case.bias == "row" else (g, n)
    if case.form == "jagged_n":
        return (m, k) if case.shared else (g, m, k), (k, t), (m, t), (t,)
    if case.form == "jagged_k":
        return (m, t), (t, n), (g, m, n), (n,) if case.bias == "row" else (g, n)
    m = max(case.sizes, default=0) + 2 if case.form == "masked" else m
    return (g, m, k), (g, k, n), (g, m, n), (n,) if case.bias == "row" else (g, n)


def filler(dtype: torch.dtype) -> int:
    """What `out` holds before a launch: a value that no test computes."""
    return 77 if dtype.is_floating_point else 123456789


def _per_group(case: Case, gen: torch.Generator) -> dict[str, Any]:
    dims = [(size, case.n + 3 * g, case.k + g) for g, size in enumerate(case.sizes)]
    made: dict[str, Any] = {
        "a": [_values(case, gen, (m, k), case.dtype, "a") for m, n, k in dims],
        "b": [_values(case, gen, (k, n), case.dtype, "b") for m, n, k in dims],
        "out": [torch.full((m, n), filler(case.target), dtype=case.target) for m, n, k in dims],
    }
    if case.beta:
        made["c"] = [_values(case, gen, (m, n), case.c_dtype or case.target) for m, n, k in dims]
    if case.bias:
        made["bias"] = [_values(case, gen, (n,), case.bias_dtype or case.target) for m, n, k in dims]
    return made


def _ends(case: Case) -> tuple[Tensor | None, bool]:
    if not case.form.startswith("jagged"):
        return None, False
    offsets = torch.tensor([0, *case.sizes]).cumsum(0).add(case.head).to(case.index)
    return offsets[1:], case.head > 0


def build(case: Case) -> Operands:
    """Operands as staging would make them."""
    gen = torch.Generator().manual_seed(case.seed)
    ends, head = _ends(case)
    if case.form == "per_group":
        made = _per_group(case, gen)
    else:
        a, b, out, bias = _shapes(case)
        made = {"a": _values(case, gen, a, case.dtype, "a"), "b": _values(case, gen, b, case.dtype, "b")}
        made["out"] = torch.full(out, filler(case.target), dtype=case.target)
        if "o" in case.transposed:
            made["out"] = made["out"].transpose(-1, -2).contiguous().transpose(-1, -2)
        if case.beta:
            made["c"] = _values(case, gen, out, case.c_dtype or case.target)
        if case.bias:
            made["bias"] = _values(case, gen, bias, case.bias_dtype or case.target)
    rows = torch.tensor(case.sizes, dtype=case.index) if case.form == "masked" else None
    return Operands(spec_of(case), ends=ends, head=head, valid_rows=rows, alpha=case.alpha, beta=case.beta, **made)


def spec_of(case: Case) -> ProblemSpec:
    """A spec with the fields that a CPU launch may read."""
    assert case.form in FORMS
    alpha: Any = {0.0: "zero", 1.0: "one"}.get(case.alpha, "any")
    a, b, out = ("col" if name in case.transposed else "row" for name in "abo")
    return ProblemSpec(
        form=case.form,
        groups=len(case.sizes),
        m=case.m,
        n=case.n,
        k=case.k,
        total=sum(case.sizes),
        largest=0,
        a=OperandSpec(case.dtype, a),  # type: ignore[arg-type]
        b=OperandSpec(case.dtype, b),  # type: ignore[arg-type]
        out=OperandSpec(case.target, out),  # type: ignore[arg-type]
        c=OperandSpec(case.c_dtype or case.target) if case.beta else None,
        bias=(case.bias_dtype or case.target) if case.bias else None,
        compute=case.dtype,
        alpha=alpha,
        activation=case.activation,  # type: ignore[arg-type]
        index=case.index,
        zero_unowned=case.zero_unowned,
    )


def pick(x: Any, g: int, dims: int = 3) -> Any:
    """Group g's part of an operand; one with fewer dimensions serves all groups."""
    return x if x is None or (isinstance(x, Tensor) and x.dim() < dims) else x[g]


def groups_of(ops: Operands) -> list[tuple[Any, ...]]:
    """(a, b, out, c, bias) of each group, sliced by a plain loop of this file's own."""
    form, count = ops.spec.form, ops.spec.groups
    cut: list[tuple[Any, ...]] = []
    stops = [] if ops.ends is None else ops.ends.tolist()
    before = 0
    if ops.head and ops.ends is not None:
        before = int(ops.ends.as_strided((1,), (1,), ops.ends.storage_offset() - 1))
    starts = [before, *stops[:-1]]
    a, b, out, c = (cast(Any, operand) for operand in (ops.a, ops.b, ops.out, ops.c))
    for g in range(count):
        bias = pick(ops.bias, g, 2)
        if form in ("batched", "per_group"):
            cut.append((a[g], b[g], out[g], pick(c, g), bias))
        elif form == "masked":
            rows = slice(0, int(cast(Tensor, ops.valid_rows)[g]))
            cut.append((a[g][rows], b[g], out[g][rows], None if c is None else c[g][rows], bias))
        else:
            s = slice(starts[g], stops[g])
            cut.append(_cut(form, a, b, out, c, bias, s, g))
    return cut


def _cut(form: str, a: Any, b: Any, out: Any, c: Any, bias: Any, s: slice, g: int) -> tuple[Any, ...]:
    if form == "jagged_m":
        return a[s], pick(b, g), out[s], None if c is None else c[s], bias
    if form == "jagged_n":
        return pick(a, g), b[:, s], out[:, s], None if c is None else c[:, s], None if bias is None else bias[s]
    return a[:, s], b[s], out[g], pick(c, g), bias


def _activated(x: Tensor, name: str | None) -> Tensor:
    f = torch.nn.functional
    table = {None: lambda t: t, "relu": f.relu, "silu": f.silu, "gelu": f.gelu}
    return f.gelu(x, approximate="tanh") if name == "gelu_tanh" else table[name](x)


def assert_right(ops: Operands) -> None:
    """Each group of `out` against float64 (exact integers for int8) within a bound of K*u."""
    for g, (a, b, out, c, bias) in enumerate(groups_of(ops)):
        if ops.spec.compute == torch.int8:
            _assert_exact(ops, g, a, b, out, c, bias)
        else:
            _assert_close(ops, g, a, b, out, c, bias)


def _assert_exact(ops: Operands, g: int, a: Tensor, b: Tensor, out: Tensor, c: Any, bias: Any) -> None:
    want = int(ops.alpha) * (a.long() @ b.long())
    want = want + (0 if c is None else int(ops.beta) * c.long()) + (0 if bias is None else bias.long())
    want = ((want + 2**31) % 2**32 - 2**31).clamp(min=0 if ops.spec.activation else -(2**31))
    assert torch.equal(out.long(), want), f"group {g}"


def _assert_close(ops: Operands, g: int, a: Tensor, b: Tensor, out: Tensor, c: Any, bias: Any) -> None:
    u, uo = U[ops.spec.acc], U[out.dtype]
    scale = 0.0 if ops.spec.alpha == "zero" else ops.alpha
    exact, size = torch.zeros(out.shape, dtype=torch.float64), torch.zeros(out.shape, dtype=torch.float64)
    if scale:
        exact, size = scale * (a.double() @ b.double()), abs(scale) * (a.double().abs() @ b.double().abs())
    extra = torch.zeros_like(size)
    for term, factor in ((c, ops.beta), (bias, 1.0)):
        if term is not None:
            exact, extra = exact + factor * term.double(), extra + abs(factor) * term.double().abs()
    error = (4 * a.shape[1] + 8) * u * size + 8 * u * extra + a.shape[1] * TINY[ops.spec.acc]
    answer = _activated(exact, ops.spec.activation)
    error = error if ops.spec.activation is None else 1.2 * error + 32 * u * (exact.abs() + answer.abs())
    allowed = error + uo * (answer.abs() + error) + TINY[out.dtype]
    bad = ~((out.double() - answer).abs() <= allowed)
    assert not bad.any(), f"group {g}: {int(bad.sum())} of {bad.numel()} wrong, e.g. {out[bad][0]} for {answer[bad][0]}"


def kernels(ops: Operands) -> list[Any]:
    """The first config of each kernel that this spec has."""
    first: dict[str, Any] = {}
    for config in BACKEND.configs(ops.spec, CPU):
        first.setdefault(config.kernel, config)
    return list(first.values())


def run(ops: Operands, config: Any = None) -> Operands:
    """One launch through the backend's own way in."""
    config = config or BACKEND.configs(ops.spec, CPU)[0]
    BACKEND.plan(ops.spec, config, CPU).bind(ops)()
    return ops
