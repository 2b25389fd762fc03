"""What the model kernel is made of: flat memory with pointers and strides, and the places for faults.

Memory outside every buffer does not exist for it: an access beyond the storage is dropped, as if
nothing had noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.reference.dtypes import round_once
from multigemm.reference.numpy_reference import activate

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tile:
    """The model's config."""

    bm: int = 16
    bn: int = 16
    bk: int = 16


class Flat:
    """The whole storage that a tensor lies in, as one flat array, and the tensor's place in it."""

    def __init__(self, tensor: Tensor) -> None:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        size = tensor.dtype.itemsize
        whole = storage[: storage.numel() // size * size]
        kind = torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype
        data = whole.view(kind).numpy()
        self.data: Array = data.view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else data
        self.base = tensor.storage_offset()

    def load(self, index: Index, mask: Array) -> Array:
        inside = mask & (index >= 0) & (index < self.data.size)
        got: Array = np.zeros(index.shape, self.data.dtype)
        got[inside] = self.data[index[inside]]  # and no other one: the storage may begin with an unmapped page
        return got

    def store(self, index: Index, mask: Array, values: Array) -> None:
        inside = mask & (index >= 0) & (index < self.data.size)
        self.data[index[inside]] = values[inside]


@dataclass(slots=True)
class Matrix:
    """One group's matrix: flat memory, element offset, strides."""

    flat: Flat
    base: int
    row: int
    col: int

    def at(self, i: Index, j: Index) -> Index:
        found: Index = self.base + i[:, None] * self.row + j[None, :] * self.col
        return found


@dataclass(slots=True)
class Group:
    """One group as a kernel sees it after its prologue."""

    index: int
    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    out: Matrix
    c: Matrix | None
    bias: Matrix | None


Round = Callable[[Array, torch.dtype], Array]


def _no_change(x: Any) -> Any:
    return x


@dataclass(slots=True)
class Faults:
    """Every deviation from the correct kernel; see multigemm.testing.mutants for the ones that are planted."""

    mask_k_a: bool = True
    mask_k_b: bool = True
    mask_m_load: bool = True
    mask_n_load: bool = True
    mask_m_store: bool = True
    mask_n_store: bool = True
    k_steps: Callable[[int], int] = _no_change
    start: Callable[[int, int], int] = lambda value, group: value
    end: Callable[[int, int], int] = lambda value, group: value
    clamp: bool = True
    ignore_head: bool = False
    group_of: dict[str, Callable[[int, int], int]] = field(default_factory=dict)
    extent: Callable[[str, int], int] = lambda name, value: value
    stale: bool = False
    tiles: Callable[[list[tuple[int, int]]], list[tuple[int, int]]] = _no_change
    index: Callable[[Index], Index] = _no_change
    swap: str = ""
    transpose_out: bool = False
    epilogue: str = ""
    reads_c_at_beta_zero: bool = False
    round: Round = round_once
    accumulate: torch.dtype | None = None
    inputs: Callable[[Array], Array] = _no_change
    zero_head: bool = True
    zero_tail: bool = True
    zero_when_given: bool = False
    skip_empty_k: bool = False
    skip_nan: bool = False
    early_metadata: bool = False
    adds_to_out: bool = False
    writes_input: bool = False
    leaves_last_group: bool = False
    read_past_n: bool = False
    drift: bool = False
    split_rounds: bool = False
    contiguous: str = ""
    valid_rows_ignored: bool = False
    shared_bias: bool = False
    one_bias_column: bool = False
    alpha_zero_multiplies: bool = False
    factor: Callable[[float], float] = _no_change
    old: Callable[[Array], Array] = _no_change
    bias: Callable[[Array], Array] = _no_change
    sum: Callable[[Array], Array] = _no_change
    activate: Callable[[Array, str | None], Array] = activate
    parts: Callable[[int, int], int] = lambda rows, groups: 1
    backwards: Callable[[int], bool] = lambda tile: False
