"""The form and the extents of a problem, from the operands' shapes; the shape of its result, and what must fit it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem.arrays import Kind, Operand, is_list
from multigemm.problem.spec import Form


class Extents(NamedTuple):
    """The extents of a packed form; the jagged extent holds T. `groups` is None where only the offsets tell the
    number."""

    form: Form
    groups: int | None
    m: int
    n: int
    k: int

    def along(self, direction: str) -> int:
        """The extent along "m", "n" or "k"."""
        return self.m if direction == "m" else self.n if direction == "n" else self.k

    def other_cuts(self) -> dict[str, int]:
        """The other directions along which two matrices given with an m cut could be cut, with their extents."""
        return {"k": self.k, "n": self.n} if self.form == "jagged_m" and self.groups is None else {}

    def result_shape(self, groups: int) -> tuple[int, ...]:
        """The shape of the result."""
        if self.form in ("jagged_m", "jagged_n"):
            return (self.m, self.n)
        return (groups, self.m, self.n)


JAGGED: dict[str, Form] = {"m": "jagged_m", "n": "jagged_n", "k": "jagged_k"}
RANKS = {
    "jagged_m": "a [T, K] and b [G, K, N], or [K, N] shared",
    "jagged_n": "a [G, M, K], or [M, K] shared, and b [K, T]",
    "jagged_k": "a [M, T] and b [T, N]",
    "masked": "a [G, M, K] and b [G, K, N]",
    "batched": "a [G, M, K] and b [G, K, N] (or a [M, K] and b [K, N] for one group)",
}
ALLOWED = {
    "jagged_m": {(2, 3), (2, 2)},
    "jagged_n": {(3, 2), (2, 2)},
    "jagged_k": {(2, 2)},
    "masked": {(3, 3)},
    "batched": {(3, 3)},
}

FOLDED = {"jagged_m": (2, 3), "masked": (3, 3), "batched": (3, 3)}
"""The ranks to which the leading dimensions of a and b can be folded."""


def infer(
    a: Tensor,
    b: Tensor,
    *,
    jagged: str,
    grouped: bool,
    masked: bool,
    squeezed: bool = False,
    kind: Kind = "torch",
) -> Extents:
    """Derives the form and its extents. Raises InvalidProblem with the shapes seen and the shapes wanted.

    `squeezed`: the caller gave two matrices, so that messages must not mention the group dimension. `kind`: the library
    of the caller's arrays, in whose spelling remedies are written.
    """
    if not isinstance(jagged, str) or jagged not in JAGGED:
        raise InvalidProblem(f"jagged={jagged!r} is not a direction: use 'm', 'n' or 'k'")
    if masked and grouped:
        raise InvalidProblem(
            "valid_rows and offsets, sizes or ends were given together: the masked form has no cut, leave one out"
        )
    if jagged != "m" and not grouped:
        raise InvalidProblem(f"jagged={jagged!r} without a cut: pass offsets, sizes or ends, or leave jagged out")
    form: Form = "masked" if masked else JAGGED[jagged] if grouped else "batched"
    x, y = a.shape, b.shape
    if (len(x), len(y)) not in ALLOWED[form]:
        seen = f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}"
        raise InvalidProblem(f"{seen}; the form {form} takes {RANKS[form]}{_hint(form, a, b, kind)}")
    if x[-1] != y[-2]:
        if form == "jagged_m" and len(x) == len(y) == 2 and x[0] == y[0]:
            raise InvalidProblem(
                f"a has shape {tuple(x)} and b {tuple(y)}: for weight gradients pass a.T and jagged='k'; for a product "
                f"with one shared b, the last extent of a, {x[-1]}, must equal the first of b, {y[0]}"
            )
        raise InvalidProblem(
            f"a has shape {tuple(x[squeezed:])} and b {tuple(y[squeezed:])}: the last extent of a, {x[-1]}, must equal "
            f"the second last of b, {y[-2]}; {_turned(a, b, squeezed, kind)}"
        )
    if len(x) == 3 and len(y) == 3 and x[0] != y[0]:
        raise InvalidProblem(f"a has {x[0]} groups and b has {y[0]}: the numbers must be equal")
    groups = x[0] if len(x) == 3 else y[0] if len(y) == 3 else None
    return Extents(form, groups, x[-2], y[-1], x[-1])


def _turned(a: Tensor, b: Tensor, squeezed: bool, kind: Kind) -> str:
    """The transposed view to pass, of the operand that seems to be stored in the other order."""
    for name, x, fits in (("b", b, b.shape[-1] == a.shape[-1]), ("a", a, a.shape[-2] == b.shape[-2])):
        if fits:
            swap = "transpose(1, 2)" if kind == "torch" else "swapaxes(1, 2)"
            return f"pass {name}.{swap if x.dim() - squeezed == 3 else 'T'} if {name} is stored the other way"
    return "pass a transposed view if one of them is stored the other way"


def _hint(form: Form, a: Tensor, b: Tensor, kind: Kind) -> str:
    dims = FOLDED.get(form, (a.dim(), b.dim()))
    deep = [_flattened(x, name, kind, to) for x, name, to in zip((a, b), "ab", dims, strict=True) if x.dim() > to]
    if deep:
        return f"; fold the leading dimensions: {' and '.join(deep)}"
    if form == "batched" and (a.dim(), b.dim()) in {(2, 3), (3, 2)}:
        shared = ".expand() the shared operand" if kind == "torch" else "np.broadcast_to() for the shared operand"
        return f"; pass offsets, sizes or ends for a jagged problem, or {shared}"
    return ""


def _flattened(x: Tensor, name: str, kind: Kind, dims: int) -> str:
    """The expression that merges the leading dimensions, in the spelling of the array's library."""
    if kind == "torch":
        return f"{name}.flatten(0, {x.dim() - dims})"
    return f"{name}.reshape({', '.join(map(str, (-1, *x.shape[x.dim() - dims + 1 :])))})"


def check_counts(a: Sequence[Any], b: Sequence[Any]) -> None:
    """Refuses lists of different lengths."""
    if len(a) != len(b):
        raise InvalidProblem(f"a has {len(a)} matrices and b has {len(b)}: a list problem needs as many of each")


def check_lists(a: list[Tensor], b: list[Tensor]) -> None:
    """Refuses a pair of list members that is not a product of two matrices."""
    for g, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.dim() != 2 or y.dim() != 2:
            raise InvalidProblem(
                f"a[{g}] has shape {tuple(x.shape)} and b[{g}] {tuple(y.shape)}: both must be matrices"
            )
        if x.shape[1] != y.shape[0]:
            raise InvalidProblem(
                f"a[{g}] has shape {tuple(x.shape)} and b[{g}] {tuple(y.shape)}: the inner extents {x.shape[1]} and "
                f"{y.shape[0]} must be equal"
            )


# --- the result: the checks of C, bias and the caller's `out` against its shape ----------------------

Take = Callable[[Any, str], Tensor]
"""Adopts one array, called by a name."""


class Result(NamedTuple):
    """The shape of the result: a list of shapes for per_group. `squeezed`: the problem is a single product without a
    group dimension.

    `called` describes this shape in messages.
    """

    form: Form
    groups: int
    shape: Any
    squeezed: bool = False
    called: str = "the result"

    def take(self, take: Take, x: Any, name: str) -> Operand:
        """Adopts `c`, `out` or `preact_out`: one array of this shape, or a list of arrays."""
        if self.form != "per_group":
            if is_list(x):
                raise InvalidProblem(f"{name} is a list; it must be one array of shape {self.shape}: stack it")
            return self.fit(take(x, name), name)
        if not is_list(x) or len(x) != self.groups:
            seen = f"a list of {len(x)}" if is_list(x) else f"a {type(x).__name__}"
            raise InvalidProblem(f"{name} is {seen}; this problem needs a list of {self.groups} matrices")
        return [self._fit(take(t, f"{name}[{g}]"), self.shape[g], f"{name}[{g}]") for g, t in enumerate(x)]

    def fit(self, x: Tensor, name: str) -> Tensor:
        """Reshapes an array of a packed problem to the result's shape."""
        if not self.squeezed:
            return self._fit(x, self.shape, name)
        return self._fit(x, self.shape[1:], name).unsqueeze(0)

    def _fit(self, x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
        if tuple(x.shape) != shape:
            raise InvalidProblem(f"{name} has shape {tuple(x.shape)}; it must be {shape}, the shape of {self.called}")
        return x

    def take_bias(self, take: Take, bias: Any) -> Operand:
        """Adopts the bias: one vector for all groups, or one per group."""
        if self.form == "per_group":
            return self._list_bias(take, bias)
        if is_list(bias):
            raise InvalidProblem(f"bias is a list; a {self.form} problem takes one array: stack it")
        return self.fit_bias(take(bias, "bias"))

    def fit_bias(self, bias: Tensor) -> Tensor:
        """Reshapes the bias of a packed problem; where columns are jagged, all groups share one row."""
        n = self.shape[-1]
        return _fit_bias(bias, [(n,)] if self.form == "jagged_n" else [(n,), (self.groups, n)])

    def _list_bias(self, take: Take, bias: Any) -> list[Tensor]:
        if not is_list(bias):
            shared = take(bias, "bias")
            bias = list(shared.unbind(0)) if shared.dim() == 2 else [shared] * self.groups
        if len(bias) != self.groups:
            raise InvalidProblem(f"bias has {len(bias)} entries; the problem has {self.groups} groups")
        vectors = [take(x, f"bias[{g}]") for g, x in enumerate(bias)]
        return [_fit_bias(x, [(n,)]) for x, (_, n) in zip(vectors, self.shape, strict=True)]


def _fit_bias(bias: Tensor, wanted: list[tuple[int, ...]]) -> Tensor:
    if tuple(bias.shape) not in wanted:
        shapes = " or ".join(map(str, wanted))
        raise InvalidProblem(f"bias has shape {tuple(bias.shape)}; it must be {shapes}: one value for each column")
    return bias
