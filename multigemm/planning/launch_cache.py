"""The one cache of bound launches: a call like an earlier one moves that call's launch to its operands, and launches.

Validation, choice and binding depend on the layout of the operands and on the keywords. These are the key. What a key
cannot hold is looked at on every call: whether the memory of an operand is still there, whether a gradient, a tangent
or a mode wants more than the result, whether a CUDA graph is being captured, and whether a given `out` shares memory
with an input. Contents of sizes on the host are part of the key; those on the device are the kernel's to read.

An entry belongs to one thread and one stream, so that its workspace is never used twice at once, and holds no operand.
It is made when a key comes for the second time. A `_MovingEntry` has a launch that follows its operands; a
`_BindingEntry` binds anew what a backend cannot move. Token counts that come once would never have an entry: for rows
that are cut on a GPU a `_TokensEntry` serves all counts of a class, half an octave, and all sizes on the host. The
cache is bounded in entries and in memory; `clear` empties it, and a forked child begins with an empty one.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from threading import Lock, get_ident
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from multigemm.cuda.device import capturing, to_device
from multigemm.cuda.running_sums import running_sums
from multigemm.planning.binding import Bound, Choice, bind, caller_result
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate
from multigemm.problem.arrays import LOWEST
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import half_octave
from multigemm.settings import settings
from multigemm.torch_internals import (
    any_requires_grad,
    current_device,
    current_raw_stream,
    dispatch_modes,
    empty_cuda,
    forward_mode,
    grad_enabled,
    is_capturing,
)

ENTRIES = 4096
"""A step of training makes six products in each layer, each with a layout of its own."""
WORKSPACE = 64 << 20
"""Bytes of device memory that all entries may own together; one entry a sixteenth of it."""
GPU_BITS, CPU_BITS = 255, 15
"""Masks of the low bits of an address that binding may depend on: lines of the cache, boxes of the copy engine."""
COUNTED = 1 << 30
"""Elements, from which on the number of rows may decide how a kernel counts."""
_PLAIN = frozenset((Tensor, Parameter))
_WHOLE_NUMBERS: tuple[set[type], ...] = ({int}, set())
_INDEX_TYPES = frozenset((np.dtype(np.int32).char, np.dtype(np.int64).char))
_HOST = frozenset((list, tuple, range))


class Call(NamedTuple):
    """The tensors of a call of the front door; absent ones are None. `kind` names the keyword that holds `cut`."""

    jagged: str
    a: Tensor
    b: Tensor
    kind: str
    cut: Any
    valid_rows: Any
    c: Tensor | None
    bias: Tensor | None
    out: Tensor | None


def one_cut(offsets: Any, sizes: Any, ends: Any) -> tuple[str, Any, bool]:
    """The keyword that cuts the groups, its value, and whether another one was given as well."""
    if offsets is not None:
        return "offsets", offsets, sizes is not None or ends is not None
    if sizes is not None:
        return "sizes", sizes, ends is not None
    return "ends", ends, False


Key = tuple[Any, ...]
GROUPS = 10
"""Where in a key the groups stand; before them stand the layouts of a, whose shape comes first, and of b."""


def key_of(call: Call, options: Key) -> Key | None:
    """What a call is kept by; None for a call that no entry may serve."""
    _, a, b, kind, cut, valid_rows, c, bias, out = call
    try:
        index, a_at, b_at, stream, phase = a.get_device(), a.data_ptr(), b.data_ptr(), 0, CPU_BITS
        if type(a) not in _PLAIN or type(b) not in _PLAIN or a_at < LOWEST or b_at < LOWEST or b.get_device() != index:
            return None
        if index >= 0:
            if not a.is_cuda or is_capturing():
                return None
            phase, stream = GPU_BITS, current_raw_stream(index)
        differentiable = grad_enabled()
        if (differentiable and (a.requires_grad or b.requires_grad)) or a.is_neg() or b.is_neg():
            return None
        if forward_mode() or dispatch_modes():
            return None
        groups, rest = None if cut is None else _index_key(cut, phase, index), None
        if bias is not None or c is not None or out is not None or valid_rows is not None:
            if differentiable and any_requires_grad(bias, c, out):
                return None
            rest = (
                None if bias is None else _layout(bias, phase, index), None if c is None else _layout(c, phase, index),
                None if out is None else (*_layout(out, phase, index), c is not None and _same_view(c, out)),
                None if valid_rows is None else _index_key(valid_rows, phase, index),
            )  # fmt: skip
        return (
            a.shape, a.stride(), a.dtype, a_at & phase, b.shape, b.stride(), b.dtype, b_at & phase, index, kind, groups,
            rest, options, stream, get_ident(), id(settings()),
        )  # fmt: skip
    except (_NotPlain, RuntimeError, TypeError, AttributeError):  # no memory, or no tensor
        return None


class _NotPlain(Exception):
    """An operand that no key describes."""


def _layout(x: Tensor, phase: int, index: int) -> Key:
    """Everything about a tensor on the device of that number but its values and where exactly it lies."""
    at = x.data_ptr()
    if type(x) not in _PLAIN or at < LOWEST or x.get_device() != index or x.is_neg():
        raise _NotPlain
    return x.shape, x.stride(), x.dtype, at & phase


def _index_key(cut: Any, phase: int, index: int) -> Key:
    """Sizes of groups: by layout where they lie on the operands' GPU, by value where the host has them."""
    if isinstance(cut, Tensor):
        if cut.is_cpu:
            return (*_layout(cut, phase, -1), tuple(cut.tolist()))
        return _layout(cut, phase, index)
    if type(cut) in _HOST:
        values = tuple(cut)
        if set(map(type, values)) not in _WHOLE_NUMBERS:  # 1.0 and True are equal to 1, and no sizes
            raise _NotPlain
        return ("host", values)
    if type(cut) is np.ndarray and cut.ndim == 1 and cut.dtype.isnative and cut.dtype.char in _INDEX_TYPES:
        return (cut.dtype.str, cut.shape, cut.tobytes())
    raise _NotPlain


def _tokens_key(key: Key, call: Call) -> Key | None:
    """What calls have in common that differ in their number of tokens and in sizes on the host alone."""
    a, b, cut = call.a, call.b, call.cut
    if call.jagged != "m" or cut is None or a.dim() != 2 or b.dim() != 3 or not a.is_cuda or not b.shape[0]:
        return None
    if call.out is not None or call.c is not None or call.valid_rows is not None:
        return None
    rows, depth = a.shape
    groups = key[GROUPS]
    if not isinstance(cut, Tensor):
        try:
            sizes = np.diff(_offsets(call.kind, cut))
        except OverflowError:  # more than 64 bits hold, which is refused in words
            return None
        if not len(sizes):
            return None
        groups = ("host", len(sizes), bool((sizes == sizes[0]).all()))
    elif cut.is_cpu:
        return None
    if _reach(a) >= COUNTED * a.element_size() or rows * b.shape[2] >= COUNTED or rows > a.stride(1) > 1:
        return None
    return ("tokens", depth, half_octave(rows), min(rows, 2), *key[1:GROUPS], groups, *key[GROUPS + 1 :])


def _same_view(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


class _Entry(ABC):
    """What every call of one key has in common."""

    __slots__ = (
        "_busy", "_choice", "_device", "_dtype", "_given_out", "_reach", "_settings", "_shape", "_strides", "index",
    )  # fmt: skip

    def __init__(self, problem: GroupedGemmProblem, choice: Choice) -> None:
        self._choice = choice  # its identity may be part of the key
        shape = problem.out_shape[1:] if problem.squeezed else problem.out_shape
        self._shape, self._dtype, self._device = tuple(shape), problem.out_dtype, problem.device
        self._strides = torch.empty(self._shape, device="meta").stride()
        self.index = problem.device.index if problem.device.type == "cuda" else -1
        self._given_out, self._busy = problem.out is not None, False
        self._reach = {
            name: _reach(problem.each(name)[0]) for name in ("a", "b", "c", "bias", "out") if problem.each(name)
        }
        self._settings = settings()  # its identity is part of the key

    def run(self, call: Call) -> Tensor | None:
        """The result of a call of this key; None where it has to go the whole way."""
        if self._busy:  # a finaliser that runs in the middle of a call makes one of its own
            return None
        self._busy = True
        try:
            return self._run(call)
        finally:
            self._busy = False

    @abstractmethod
    def _run(self, call: Call) -> Tensor | None: ...

    def result(self, call: Call) -> Tensor | None:
        """Memory for the result: fresh, or the caller's; None where that may share memory with an input."""
        if self._given_out:
            return None if self._shares(call) else call.out
        if self.index < 0:
            return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)
        return empty_cuda(self._shape, self._strides, self._dtype)

    def _shares(self, call: Call) -> bool:
        """Whether the range of memory of the caller's `out` meets that of an input."""
        out, reach = call.out, self._reach
        assert out is not None
        start = out.data_ptr()
        end = start + reach["out"]
        c = None if call.c is None or _same_view(call.c, out) else call.c
        inputs = [(x, reach.get(name, 0)) for name, x in (("a", call.a), ("b", call.b), ("bias", call.bias), ("c", c))]
        inputs += [(x, _reach(x)) for x in (call.cut, call.valid_rows) if isinstance(x, Tensor)]
        return any(x is not None and x.data_ptr() < end and start < x.data_ptr() + size for x, size in inputs)


def _reach(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not x.numel():
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))) * x.element_size()


def _made_for(problem: GroupedGemmProblem, ops: Operands) -> tuple[Tensor | None, Tensor | None]:
    """`ends` and `valid_rows` where staging made them; None where they are the caller's memory, or absent."""
    grouping, valid = problem.grouping, problem.valid_rows
    ends = ops.ends if grouping is not None and (grouping.live is None or grouping.kind == "sizes") else None
    return ends, ops.valid_rows if valid is not None and valid.live is None else None


def _bytes_of(tensors: tuple[Tensor | None, ...]) -> int:
    return sum(x.nbytes for x in tensors if x is not None)


class _MovingEntry(_Entry):
    """A launch that follows its operands. `_ends` and `_valid_rows` are 0 where it reads the caller's own tensor."""

    __slots__ = (
        "_ends", "_follows_ends", "_follows_valid", "_keep", "_kind", "_launch", "_step", "_valid_rows",
        "workspace",
    )  # fmt: skip

    def __init__(self, problem: GroupedGemmProblem, ops: Operands, choice: Choice, launch: Any, kind: str) -> None:
        super().__init__(problem, choice)
        self._launch, self._kind, self._keep = launch, kind, _made_for(problem, ops)
        self._follows_ends, self._follows_valid = (x is None for x in self._keep)
        self._ends, self._valid_rows = (0 if x is None else x.data_ptr() for x in self._keep)
        self._step = ops.ends.element_size() if kind == "offsets" and ops.ends is not None else 0
        self.workspace = launch.workspace_bytes() + _bytes_of(self._keep)

    def _run(self, call: Call) -> Tensor | None:
        out = self.result(call)
        if out is None:
            return None
        ends, valid, sizes = self._ends, self._valid_rows, 0
        if self._follows_ends and call.cut is not None:
            ends = call.cut.data_ptr() + self._step
        elif self._kind == "sizes" and type(call.cut) in _PLAIN:
            sizes = call.cut.data_ptr()
        if self._follows_valid and call.valid_rows is not None:
            valid = call.valid_rows.data_ptr()
        c, bias = call.c, call.bias
        self._launch.move(
            (
                call.a.data_ptr(), call.b.data_ptr(), out.data_ptr(), 0 if c is None else c.data_ptr(),
                0 if bias is None else bias.data_ptr(), ends, valid, sizes,
            )
        )  # fmt: skip
        self._launch()
        return out


class _BindingEntry(_Entry):
    """What a backend that cannot move its launches needs to bind the operands of the next call."""

    __slots__ = ("_alpha", "_beta", "_bind", "_host", "_kind", "_spec", "_squeezed", "workspace")

    def __init__(self, problem: GroupedGemmProblem, ops: Operands, choice: Choice, kind: str) -> None:
        super().__init__(problem, choice)
        cut = problem.cut
        self._bind, self._spec, self._kind, self._squeezed = choice.recipe.bind, choice.spec, kind, problem.squeezed
        self._alpha, self._beta = problem.alpha, problem.beta
        self._host: dict[str, Any] | None = None
        if cut is not None and cut.live is None:
            self._host = {
                "ends": ops.ends, "head": ops.head, "valid_rows": ops.valid_rows, "host_offsets": ops.host_offsets,
                "host_valid_rows": ops.host_valid_rows,
            }  # fmt: skip
        self.workspace = _bytes_of(_made_for(problem, ops))

    def _run(self, call: Call) -> Tensor | None:
        out = self.result(call)
        if out is None:
            return None
        a, b, c, target = call.a, call.b, call.c if self._beta != 0 else None, out
        if self._squeezed:
            a, b, target = a.unsqueeze(0), b.unsqueeze(0), out.unsqueeze(0)
            c = None if c is None else c.unsqueeze(0)
        cut = self._cut(call) if self._host is None else self._host
        ops = Operands(
            self._spec, a, b, target, c, call.bias, alpha=self._alpha, beta=self._beta, device=self._device, **cut
        )
        self._bind(ops)()
        return out

    def _cut(self, call: Call) -> dict[str, Any]:
        """Groups that are cut on the operands' device."""
        if call.valid_rows is not None:
            return {"valid_rows": call.valid_rows}
        if self._kind == "offsets":
            return {"ends": call.cut[1:], "head": True}
        if self._kind == "sizes" and call.cut is not None:
            ends = torch.empty(call.cut.shape, dtype=torch.int64, device=self._device)
            if not self._choice.recipe.sums_sizes:
                running_sums(call.cut, ends)()
            return {"ends": ends, "sizes": call.cut}
        return {"ends": call.cut}


class _TokensEntry(_Entry):
    """How calls of any number of tokens in a class run: rows that are cut on a GPU."""

    __slots__ = ("_alpha", "_bind", "_columns", "_ends", "_groups", "_kind", "_spec", "_sums", "workspace")

    def __init__(self, problem: GroupedGemmProblem, ops: Operands, choice: Choice, kind: str) -> None:
        super().__init__(problem, choice)
        self._bind, self._spec, self._kind, self._alpha = choice.recipe.bind, choice.spec, kind, problem.alpha
        self._columns, self._groups = self._shape[1], choice.spec.groups
        self._ends: Tensor | None = None
        self._sums: Any = None
        self.workspace = 8 * self._groups

    def _run(self, call: Call) -> Tensor | None:
        rows = call.a.shape[0]
        cut = self._cut(call.cut) if isinstance(call.cut, Tensor) else self._host_cut(call.cut, rows)
        if cut is None:
            return None
        out = empty_cuda((rows, self._columns), (self._columns, 1), self._dtype)
        ops = Operands(self._spec, call.a, call.b, out, None, call.bias, alpha=self._alpha, device=self._device, **cut)
        self._bind(ops)()
        return out

    def _cut(self, live: Tensor) -> dict[str, Any]:
        if self._kind == "offsets":
            return {"ends": live[1:], "head": True}
        if self._kind == "ends":
            return {"ends": live}
        if self._ends is None:
            self._ends = torch.empty(live.shape, dtype=torch.int64, device=self._device)
        if self._choice.recipe.sums_sizes:
            return {"ends": self._ends, "sizes": live}
        if self._sums is None or not hasattr(self._sums, "move"):
            self._sums = running_sums(live, self._ends)
        else:
            self._sums.move((0, 0, 0, 0, 0, 0, 0, live.data_ptr()))
        self._sums()
        return {"ends": self._ends, "sizes": live}

    def _host_cut(self, cut: Any, rows: int) -> dict[str, Any] | None:
        """Sizes on the host as offsets on the device; None for what has to be refused in words."""
        offsets = _offsets(self._kind, cut)
        rising = not bool((offsets[1:] < offsets[:-1]).any())
        if len(offsets) != self._groups + 1 or offsets[0] < 0 or offsets[-1] > rows or not rising:
            return None
        on_device = to_device(offsets.astype(np.int32), self._device)
        return {"ends": on_device[1:], "head": True, "host_offsets": offsets}


def _offsets(kind: str, cut: Any) -> npt.NDArray[np.int64]:
    """Groups that the host cuts, whatever keyword says so, as offsets [G + 1]."""
    values = np.asarray(cut, dtype=np.int64)
    if kind == "offsets":
        return values
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    offsets[1:] = np.cumsum(values) if kind == "sizes" else values
    return offsets


class LaunchCache:
    """Entries by key, the latest ones; `seen` holds keys that came once."""

    def __init__(self) -> None:
        self._entries: dict[Key, Any] = {}
        self._seen: dict[int, None] = {}
        self._bytes = 0
        self._lock = Lock()
        self.served = 0
        """Calls that an entry has served, for tests."""

    def recall(self, key: Key, call: Call) -> Tensor | None:
        """The result of a call whose key has an entry; None for any other."""
        try:
            entry = self._entries.get(key)
        except TypeError:  # a config or a backend that cannot be a key
            return None
        if entry is None:
            tokens = _tokens_key(key, call)
            entry = None if tokens is None else self._entries.get(tokens)
        if entry is None:
            return None
        index = entry.index
        if index < 0 or index == current_device():
            found: Tensor | None = entry.run(call)
        else:
            with torch.cuda.device(index):
                found = None if is_capturing() else entry.run(call)
        self.served += found is not None
        return found

    def run(self, key: Key | None, call: Call | None, choice: Choice, problem: GroupedGemmProblem) -> Any:
        """Binds and launches; what comes for the second time is kept for the third."""
        out = allocate(problem)
        bound = bind(choice, problem, out)
        bound.launch()
        if key is not None and call is not None and _lasting(choice, problem) and not capturing(problem.device):
            if self.comes_again(key) and key not in self._entries:
                self.keep(key, _entry_of(problem, bound, choice, call.kind))
            tokens = _tokens_key(key, call)
            if tokens is not None and self.comes_again(tokens) and tokens not in self._entries:
                self.keep(tokens, _TokensEntry(problem, bound.ops, choice, call.kind))
        return caller_result(problem, out)

    def comes_again(self, key: Key) -> bool:
        """Whether a key came before; most come once, and an entry costs more than a call."""
        try:
            name = hash(key)  # one that two keys share makes an entry one call early
        except TypeError:
            return False
        with self._lock:
            if name in self._seen:
                return True
            if len(self._seen) >= 4 * ENTRIES:
                del self._seen[next(iter(self._seen))]
            self._seen[name] = None
            return False

    def find(self, key: Key) -> Any:
        """The entry of a key, or None."""
        return self._entries.get(key)

    def keep(self, key: Key, entry: Any) -> None:
        """Keeps an entry, which says how much device memory it owns; the oldest ones go."""
        if entry.workspace > WORKSPACE // 16:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes += entry.workspace - (0 if old is None else old.workspace)
            while self._entries and (len(self._entries) >= ENTRIES or self._bytes > WORKSPACE):
                self._bytes -= self._entries.pop(next(iter(self._entries))).workspace
            self._entries[key] = entry

    def clear(self) -> None:
        """Forgets everything; launches that still run are ordered before whatever reuses their memory."""
        with self._lock:
            self._entries.clear()
            self._seen.clear()
            self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)


def _lasting(choice: Choice, problem: GroupedGemmProblem) -> bool:
    """Whether an entry may serve later calls: nothing has to be read back, cast or copied before each launch."""
    spec = problem.spec
    if problem.kind != "torch" or problem.form == "per_group" or choice.recipe.syncs or problem.refreshes:
        return False
    cut = problem.cut
    dense = cut is None or cut.live is None or cut.live.shape[0] <= 1 or cut.live.stride(0) == 1
    return dense and spec.a.dtype is spec.compute and spec.b.dtype is spec.compute


def _entry_of(problem: GroupedGemmProblem, bound: Bound, choice: Choice, kind: str) -> Any:
    """An entry that moves, if every launch can and none holds an address of the caller's that would stay behind."""
    launch, ops, cut = bound.launch, bound.ops, problem.cut
    callers = [ops.a, ops.b, ops.out, ops.c, ops.bias, None if cut is None else cut.live]
    spans = [(x.data_ptr(), x.data_ptr() + _reach(x)) for x in callers if isinstance(x, Tensor)]
    if hasattr(launch, "move") and not launch.stays_behind(spans):  # type: ignore[attr-defined]
        return _MovingEntry(problem, ops, choice, launch, kind)
    return _BindingEntry(problem, ops, choice, kind)


def solve(choice: Choice, problem: GroupedGemmProblem) -> Any:
    """The result of a problem by a choice that was made for its spec."""
    if problem.kind != "torch" or problem.form == "per_group":
        return LAUNCHES.run(None, None, choice, problem)
    grouping, cut = problem.grouping, problem.cut
    kind = "" if grouping is None else grouping.kind if grouping.live is not None else "offsets"
    values = None if cut is None else cut.host if cut.live is None else cut.live
    a, b, c = (x[0] if problem.squeezed and isinstance(x, Tensor) else x for x in (problem.a, problem.b, problem.c))
    masked = problem.valid_rows is not None
    cuts = (None, values) if masked else (values, None)
    call = Call(problem.form[-1], a, b, kind, cuts[0], cuts[1], c, problem.bias, problem.given_out)  # type: ignore[arg-type]
    key = key_of(call, (id(choice), problem.alpha, problem.beta, problem.squeezed))
    found = None if key is None else LAUNCHES.recall(key, call)
    return LAUNCHES.run(key, call, choice, problem) if found is None else found


LAUNCHES = LaunchCache()
"""The cache of this process."""
clear = LAUNCHES.clear


def _begin_anew() -> None:
    """In a forked child: no entry of the parent's, and a lock that nobody holds."""
    LAUNCHES.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_begin_anew)
