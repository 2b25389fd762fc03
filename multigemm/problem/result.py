"""The shape of a problem's result, and the checks of C, bias and the caller's `out` against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem.operand_reader import Operand, is_list
from multigemm.problem.spec import Form

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
