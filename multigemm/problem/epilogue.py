"""The rules of the epilogue: dtypes, alpha, beta with C, bias, activation, output."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem.arrays import dtype_name, dtype_of
from multigemm.problem.spec import ACTIVATIONS, FLOAT8, FLOAT_DTYPES, GATES, HALVES, INPUT_DTYPES

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Between them float32 holds a number to all its digits: a smaller one it rounds coarsely, or to 0."""


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({dtype_name(d) for d in dtypes}))


def any_of(dtypes: Collection[torch.dtype]) -> str:
    """The allowed dtypes as text for an error message."""
    return f"one of {dtype_names(dtypes)}" if len(dtypes) > 1 else dtype_names(dtypes)


def compute_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype in which products are formed. Raises for a pair of dtypes that no rule covers."""
    for name, dtype in (("a", a), ("b", b)):
        if dtype not in INPUT_DTYPES:
            raise InvalidProblem(f"{name} has dtype {dtype}; supported: {dtype_names(INPUT_DTYPES)}: convert it")
    if (a is torch.int8) != (b is torch.int8):
        weights = "; 16 bits multiply int8 weights by their scale_b" if b is torch.int8 and a in HALVES else ""
        raise InvalidProblem(f"a is {a} and b is {b}: int8 multiplies int8 only; convert one of them{weights}")
    return torch.promote_types(a, b)


def result_dtype(out_dtype: Any, out: torch.dtype | None, compute: torch.dtype, quantised: bool = False) -> torch.dtype:
    """The dtype of the result: the keyword's, that of the given `out`, or the default (bfloat16 for float8
    operands)."""
    asked = None if out_dtype is None else dtype_of(out_dtype, "out_dtype")
    if asked is not None and out is not None and asked is not out:
        raise InvalidProblem(f"out has dtype {out} and out_dtype is {asked}: pass one of them")
    default = torch.int32 if compute is torch.int8 else torch.bfloat16 if compute in FLOAT8 else compute
    chosen = asked or out or default
    allowed = (torch.int32,) if compute is torch.int8 else (*HALVES, torch.float32) if quantised else FLOAT_DTYPES
    if chosen not in allowed:
        seen, remedy = (f"out has dtype {out}", "pass out as") if out is not None else (f"out_dtype is {asked}", "use")
        raise InvalidProblem(
            f"{seen}; the result of {compute} products cannot be {chosen}: {remedy} {dtype_names(allowed)}"
        )
    return chosen


def inputs_for(out_dtype: Any) -> torch.dtype:
    """The operands' dtype for empty lists, which name none: a dtype that gives the requested result."""
    whole = out_dtype is not None and dtype_of(out_dtype, "out_dtype") is torch.int32
    return torch.int8 if whole else torch.float32


def default_beta(beta: Any, c: Any) -> Any:
    """The given beta. Without one, 1 if there is a c to add, else 0."""
    if beta is not None:
        return beta
    return 0.0 if c is None else 1.0


def scalar(x: Any, name: str, compute: torch.dtype, instead: str = "multiply the result instead") -> float:
    """alpha or beta as a float that the accumulator's type can represent; for int8 a whole number within int32.

    `instead` is the remedy that the error for an infinite number proposes.
    """
    if type(x) is float and (x == 0 or SMALLEST <= abs(x) <= LARGEST) and compute is not torch.int8:
        return x
    if isinstance(x, Tensor | bool) or not isinstance(x, numbers.Real):
        raise InvalidProblem(f"{name}={x!r} is a {type(x).__name__}; it must be a real number on the host")
    try:
        value = float(x)
    except OverflowError:
        kind = type(x).__name__
        raise InvalidProblem(f"{name} is a {kind} beyond the range of float64: scale the operands") from None
    if compute is torch.int8 and not (math.isfinite(value) and value.is_integer() and -(2**31) <= value < 2**31):
        raise InvalidProblem(f"{name}={value} with int8 operands; it must be a whole number that int32 holds")
    if not math.isfinite(value):  # times the sum of an empty group it would be NaN, which such a group must not give
        raise InvalidProblem(f"{name}={value}; it must be finite: {instead}")
    if value != 0 and not SMALLEST <= abs(value) <= LARGEST and compute is not torch.float64:
        raise InvalidProblem(
            f"{name}={value} multiplies in float32, which holds numbers from {SMALLEST:.5g} to {LARGEST:.5g} to all "
            "their digits: scale the operands, or pass float64"
        )
    return value


SYNONYMS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
"""Other libraries' names of activations, where the most similar name here is another function ('swish' and
'swiglu')."""


def one_of(x: Any, name: str, allowed: Sequence[str], optional: bool = False) -> Any:
    """Checks a word against the allowed ones. The error lists them, and names the nearest."""
    if (isinstance(x, str) and x in allowed) or (optional and x is None):
        return x
    near = [SYNONYMS[x]] if isinstance(x, str) and x in SYNONYMS else difflib.get_close_matches(str(x), allowed, 1, 0.5)
    hint = f"; did you mean {near[0]!r}?" if near and near[0] in allowed else ""
    raise InvalidProblem(f"{name}={x!r} is unknown: use one of {', '.join(map(repr, allowed))}{hint}")


def check_activation(activation: Any, compute: torch.dtype) -> None:
    """Checks an activation name or None. int8 allows relu only, because the others need a real-valued accumulator."""
    if activation is None:
        return
    one_of(activation, "activation", (*ACTIVATIONS, *GATES))
    if compute is torch.int8 and activation != "relu":
        raise InvalidProblem(f"activation={activation!r} with int8 operands; only 'relu' is defined for int32 sums")


def check_extra_dtype(dtype: torch.dtype, name: str, inputs: Iterable[torch.dtype], out: torch.dtype) -> None:
    """Checks the dtype of bias or c: an input dtype, the result's, or float32 (int32 for int8 products)."""
    allowed = {torch.int32} if torch.int8 in inputs else {*inputs, out, torch.float32}
    if dtype not in allowed:
        beside = " beside int8 operands" if torch.int8 in inputs else ""
        raise InvalidProblem(f"{name} has dtype {dtype}; it must be {any_of(allowed)}{beside}: convert it")
