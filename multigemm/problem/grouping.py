"""Where groups begin and end: offsets, sizes or ends, on the host or on the device.

Host data are checked and copied when the problem is made, so later changes of the list have no effect. A tensor on the
operands' device is followed in place: its contents may change between two runs of a plan, and it is never read back
unless `check="full"` asks for it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem.arrays import adopt, is_array

Kind = Literal["offsets", "sizes", "ends"]
Int64s = npt.NDArray[np.int64]
INDEX_DTYPES = (torch.int32, torch.int64)
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1


class Grouping(NamedTuple):
    """The cut into `groups` groups. Exactly one of `live` (followed in place) and `host` (offsets [G+1]) is set."""

    kind: Kind
    groups: int
    live: Tensor | None = None
    host: Int64s | None = None

    @property
    def index_dtype(self) -> torch.dtype:
        """The integer dtype that a kernel reads; for values on the host, the dtype that device values usually have."""
        if self.live is not None:
            return self.live.dtype
        return torch.int64 if self.host is not None and self.host[-1] > INT32_MAX else torch.int32

    @property
    def equal(self) -> bool:
        """Whether the sizes are known on the host and all equal."""
        if self.host is None or len(self.host) < 2:
            return False
        step = self.host[1] - self.host[0]
        if self.host[-1] - self.host[0] != step * self.groups:
            return False
        return bool((np.diff(self.host) == step).all())

    def read(self) -> Int64s:
        """Offsets [G+1] on the host, not clamped. Waits for the device if they are there."""
        if self.host is not None:
            return self.host
        assert self.live is not None
        return _as_offsets(self.live.cpu().numpy().astype(np.int64), self.kind)


def _as_offsets(values: Int64s, kind: Kind) -> Int64s:
    if kind == "offsets":
        return values
    ends = np.cumsum(values) if kind == "sizes" else values
    return np.concatenate([np.zeros(1, np.int64), ends])


def read_index_array(x: Any, name: str, device: torch.device, dims: int = 1) -> Tensor | Int64s:
    """Reads integers in a vector (or matrix): a live tensor on `device`, or a copy on the host."""
    if isinstance(x, Tensor) or is_array(x):
        tensor = adopt(x, name).tensor
        if tensor.dtype not in INDEX_DTYPES:
            remedy = ".to(torch.int64)" if isinstance(x, Tensor) else ".astype('int64')"
            raise InvalidProblem(f"{name} has dtype {tensor.dtype}; it must be int32 or int64: call {remedy}")
        if tensor.dim() != dims:
            remedy = "a vector: call .reshape(-1)" if dims == 1 else "a matrix: call .reshape(R, -1)"
            raise InvalidProblem(f"{name} has {tensor.dim()} dimensions; it must be {remedy}")
        if tensor.device.type == "cpu" and not (isinstance(x, Tensor) and tensor.device == device):
            return tensor.numpy().astype(np.int64)
        if tensor.device == device:
            return tensor
        raise InvalidProblem(
            f"{name} is on {tensor.device}, the operands are on {device}: move it there or to the host"
        )
    if isinstance(x, str | bytes | bytearray):
        raise InvalidProblem(f"{name}={x!r} is text: pass a list, an int32 or int64 array")
    if not isinstance(x, Sequence):
        kind = "vector" if dims == 1 else "matrix"
        raise InvalidProblem(
            f"{name} is of type {type(x).__name__}; it must be a {kind} of integers: a list, an int32 or int64 array"
        )
    return read_list(x, name)


def read_list(x: Sequence[Any], name: str) -> Int64s:
    """A sequence of integers as a host tensor."""
    if isinstance(x, memoryview) and x.ndim != 1:
        raise InvalidProblem(f"{name} has {x.ndim} dimensions; it must be a vector")
    try:
        if type(x) in (list, tuple) and set(map(type, x)) == {int}:  # the common case, at a tenth of the time
            return np.array(x, dtype=np.int64)
        away = next((v for v in x if isinstance(v, Tensor) and not v.is_cpu), None)
        if away is not None:
            remedy = f"none is read back: pass torch.stack({name})"
            raise InvalidProblem(f"{name} holds a tensor on {away.device}, and {remedy}")
        if any(_is_bool(v) for v in x):
            raise TypeError
        return np.array([operator.index(v) for v in x], dtype=np.int64)
    except (TypeError, OverflowError):
        bad = next((v for v in x if _is_bool(v) or not hasattr(v, "__index__")), x)
        raise InvalidProblem(f"{name} holds {bad!r}; it must hold integers that fit in 64 bits") from None


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool | np.bool_) or (isinstance(x, Tensor) and x.dtype is torch.bool)


def make_grouping(
    offsets: Any,
    sizes: Any,
    ends: Any,
    *,
    groups: int | None,
    total: int,
    device: torch.device,
    full: bool,
    complete: bool = False,
    others: Mapping[str, int] = {},
) -> Grouping:
    """The grouping given by offsets, sizes or ends, checked against `groups` and `total`.

    `groups` is None where only the vector tells the number. `others` are the extents of the other directions along
    which the operands could be cut, for the message. `complete`: the groups must own all of `total`.
    """
    kind, x = _only_one(offsets, sizes, ends)
    values = read_index_array(x, kind, device)
    length = values.shape[0]
    count = length - 1 if kind == "offsets" else length
    if count < 0 or (groups is not None and count != groups):
        _wrong_length(kind, length, groups)
    if _readable(values, full):
        _check_values(values.tolist(), kind, total, others, complete)
    if isinstance(values, Tensor):
        return Grouping(kind, count, live=values)
    return Grouping(kind, count, host=_as_offsets(values, kind))


def _readable(values: Tensor | Int64s, full: bool) -> bool:
    """Whether values may be checked: those on a GPU are not read unless `check="full"` asks for it."""
    return full or not isinstance(values, Tensor) or values.is_cpu


def _only_one(offsets: Any, sizes: Any, ends: Any) -> tuple[Kind, Any]:
    if offsets is not None and sizes is None and ends is None:
        return "offsets", offsets
    if sizes is not None and offsets is None and ends is None:
        return "sizes", sizes
    if ends is not None and offsets is None and sizes is None:
        return "ends", ends
    given = [name for name, x in (("offsets", offsets), ("sizes", sizes), ("ends", ends)) if x is not None]
    raise InvalidProblem(f"{' and '.join(given)} were given together: pass exactly one of them")


def _wrong_length(kind: Kind, length: int, groups: int | None) -> NoReturn:
    if groups is None:
        raise InvalidProblem("offsets is empty; it must hold G + 1 values: pass [0] for no groups")
    want = f"G + 1 = {groups + 1}" if kind == "offsets" else f"G = {groups}"
    meant = ": they begin with 0; pass ends= for the ends alone" if kind == "offsets" and length == groups else ""
    raise InvalidProblem(
        f"{kind} has length {length}; the operands have {groups} groups, so it must have length {want}{meant}"
    )


def _check_values(values: list[int], kind: Kind, total: int, others: Mapping[str, int], complete: bool) -> None:
    """Requires monotone offsets from 0 or later to `total` or earlier. The message names the first bad position."""
    first = values[0] if kind == "offsets" else 0
    last = sum(values) if kind == "sizes" else values[-1] if values else 0
    if complete and (first > 0 or last < total):
        raise InvalidProblem(
            f"the groups of {kind} own {first} to {last} of the jagged extent {total}, and check='complete' wants all: "
            "mend them, or take check='full', by which the rest of the result is 0"
        )
    if not values:
        return
    if kind == "sizes":
        if min(values) < 0:
            g = next(i for i, v in enumerate(values) if v < 0)
            raise InvalidProblem(f"sizes[{g}] is {values[g]}; a group cannot have a negative size")
        if sum(values) > total:
            raise InvalidProblem(
                f"sizes add up to {sum(values)}, the jagged extent is {total}: {_shorter(sum(values), others)}"
            )
        return
    if values != sorted(values):
        g = next(i for i in range(1, len(values)) if values[i] < values[i - 1])
        raise InvalidProblem(
            f"{kind}[{g}] is {values[g]}, less than {kind}[{g - 1}] = {values[g - 1]}: they must not fall"
        )
    if values[0] < 0:
        raise InvalidProblem(f"{kind}[0] is {values[0]}; it must be 0 or more")
    if values[-1] > total:
        raise InvalidProblem(
            f"{kind}[{len(values) - 1}] is {values[-1]}, past the jagged extent {total}: {_shorter(values[-1], others)}"
        )


def _shorter(last: int, others: Mapping[str, int]) -> str:
    """The remedy for groups that end past the jagged extent: another direction whose extent holds them, if there is
    one."""
    fits = next((direction for direction, extent in others.items() if last <= extent), None)
    if fits is None:
        return "shrink them or pass more rows"
    purpose = "for weight gradients " if fits == "k" else "to cut the columns of b "
    return f"{purpose}pass jagged={fits!r}, whose extent is {others[fits]}; else shrink them or pass more rows"


def make_valid_rows(x: Any, *, groups: int, rows: int, device: torch.device, full: bool) -> Grouping:
    """Reads `valid_rows` of the masked form: like sizes, but each is at most `rows`."""
    values = read_index_array(x, "valid_rows", device)
    length = values.shape[0]
    if length != groups:
        raise InvalidProblem(f"valid_rows has length {length}; it must have one value for each of the {groups} groups")
    for g, value in enumerate(values.tolist() if _readable(values, full) else []):
        if not 0 <= value <= rows:
            raise InvalidProblem(f"valid_rows[{g}] is {value}; it must lie in 0..{rows}, the rows of a")
    if isinstance(values, Tensor):
        return Grouping("sizes", groups, live=values)
    return Grouping("sizes", groups, host=_as_offsets(values, "sizes"))
