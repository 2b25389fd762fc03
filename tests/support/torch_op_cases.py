"""Problems for the torch operator's tests: every form, small, in one vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORMS = ("jagged_m", "jagged_m_shared", "jagged_n", "jagged_n_shared", "jagged_k", "batched", "masked", "one")


def operands(form: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(a, b, the keywords that cut the groups): an empty group in the middle, rows before and after all groups."""
    make = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).to(dtype)

    cut = {"offsets": torch.tensor([1, 3, 3, 6], dtype=torch.int32)}
    if form.startswith("jagged_m"):
        return new(7, 3), new(3, 2) if form.endswith("shared") else new(3, 3, 2), cut
    if form.startswith("jagged_n"):
        return new(3, 2) if form.endswith("shared") else new(3, 3, 2), new(2, 7), {**cut, "jagged": "n"}
    if form == "jagged_k":
        return new(3, 7), new(7, 2), {**cut, "jagged": "k"}
    if form == "one":
        return new(4, 3), new(3, 2), {}
    a, b = new(3, 4, 3), new(3, 3, 2)
    return a, b, {"valid_rows": torch.tensor([4, 0, 2])} if form == "masked" else {}


def bias_shapes(form: str) -> list[tuple[int, ...]]:
    """The bias shapes that a form takes, for the operands above."""
    if form.startswith("jagged_n"):
        return [(7,)]
    return [(2,), (1, 2)] if form == "one" else [(2,), (3, 2)]


def result_shape(form: str) -> tuple[int, ...]:
    """The shape of the result, for the operands above."""
    if form.startswith("jagged_m"):
        return (7, 2)
    if form.startswith("jagged_n"):
        return (3, 7)
    return {"jagged_k": (3, 3, 2), "one": (4, 2)}.get(form, (3, 4, 2))


def graph_counter(backend: str) -> Any:
    """A backend of torch.compile that counts graphs; Dynamo, which takes a second to load, is loaded here."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)
