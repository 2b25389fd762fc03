"""Turns the arrays of one problem into tensors on one device, or raises.

The first operand decides the device and the array library; the others must match. Empty lists have no first operand:
then arrays that all groups share may lie anywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem.arrays import Adopted, Kind, Step, adopt, read_only

Operand = Tensor | list[Tensor]


def is_list(x: Any) -> bool:
    """Whether an operand is a list of separate matrices."""
    return isinstance(x, list | tuple)


class OperandReader:
    """Adopts the arrays of one problem and records mirrored copies, which are refreshed before each launch."""

    __slots__ = ("decided", "device", "kind", "mirrors")

    def __init__(self) -> None:
        self.kind: Kind = "torch"
        self.device = torch.device("cpu")
        self.decided = False
        self.mirrors: dict[str, Adopted] = {}

    def first(self, x: Any, name: str) -> Tensor:
        """Adopts the operand that decides device and library."""
        got = adopt(x, name)
        self.kind, self.device, self.decided = got.kind, got.tensor.device, True
        return self._keep(got, name)

    def operand(self, x: Any, name: str) -> Tensor:
        """Adopts a further operand, which must have the same library and device."""
        got = self._same_device(adopt(x, name), name)
        if got.kind != self.kind:
            raise InvalidProblem(f"{name} is a {got.kind} array and a is a {self.kind} array: pass one kind of array")
        return self._keep(got, name)

    def extra(self, x: Any, name: str) -> Tensor:
        """Adopts bias or c: from any library, on the same device."""
        return self._keep(self._same_device(adopt(x, name), name), name)

    def result(self, x: Any, name: str) -> Tensor:
        """Adopts an output, which must be writable in place."""
        if read_only(x):
            raise InvalidProblem(f"{name} is read-only: pass an array that may be written")
        got = self._same_device(adopt(x, name), name)
        if got.refresh is not None:
            raise InvalidProblem(
                f"{name} has a negative or odd stride, which no kernel writes through: pass another view"
            )
        if torch.is_grad_enabled() and got.tensor.requires_grad:
            raise InvalidProblem(
                f"{name} requires grad, and a result in the caller's memory has no gradient: pass {name}.detach(), or "
                f"leave {name} away"
            )
        return got.tensor

    def forget(self, name: str) -> None:
        """Drops the mirrors of an operand, or of a list's matrices, that no launch will read."""
        self.mirrors = {k: v for k, v in self.mirrors.items() if k.partition("[")[0] != name}

    def refreshes(self) -> list[Step]:
        """The copies that must run before each launch."""
        return [mirror.refresh for mirror in self.mirrors.values() if mirror.refresh is not None]

    def _same_device(self, got: Adopted, name: str) -> Adopted:
        if self.decided and got.tensor.device != self.device:
            raise InvalidProblem(f"{name} is on {got.tensor.device} and a is on {self.device}: move it to one device")
        return got

    def _keep(self, got: Adopted, name: str) -> Tensor:
        if got.refresh is not None:
            self.mirrors[name] = got
        return got.tensor


def common_dtype(x: Operand, name: str) -> torch.dtype:
    """The common dtype of an operand's matrices, of which there is at least one."""
    if isinstance(x, Tensor):
        return x.dtype
    dtypes = {t.dtype for t in x}
    if len(dtypes) > 1:
        raise InvalidProblem(f"{name} mixes {', '.join(sorted(map(str, dtypes)))}: convert the list to one dtype")
    return dtypes.pop()
