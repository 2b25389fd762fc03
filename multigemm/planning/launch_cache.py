"""The cache of bound launches: a call like an earlier one moves that call's launch to its own operands, and launches.

`launch_key` defines which calls are alike. What a key cannot hold is checked on every call. `launch_key` checks whether
an operand's memory was freed, whether a gradient or a mode wants more than the result, and whether a CUDA graph is
being captured. This module checks whether a given `out` shares memory with an input.

An entry belongs to one thread and one stream, so that its workspace is never used twice at once, and holds no operand.
It is made when a key comes for the second time. A `_MovingEntry` has a launch that follows its operands; a
`_TensorEntry` has one that takes the caller's tensors; a `_BindingEntry` binds anew if the backend has no such launch.

Token counts and sizes on the host that occur once would never get an entry. So for rows and inner extents that are cut
on a GPU, one entry serves a class of calls that differ in nothing else and whose token counts lie within half an
octave. Its launch is resized for each new count, and sizes on the host are copied to where it reads them. The cache is
bounded in entries and in memory; `clear` empties it, and a forked child begins with an empty one.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import addressof, c_char
from dataclasses import replace
from itertools import accumulate
from struct import Struct, error
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import WithSizes
from multigemm.cuda.arguments import FUSED_OPERANDS, OPERANDS
from multigemm.cuda.device import capturing, to_device, upload
from multigemm.planning.binding import Bound, Choice, bind, caller_result
from multigemm.planning.launch_key import (
    HOST_SEQUENCES,
    KIND,
    NO_SCALES,
    PLAIN,
    PLAIN_LENGTH,
    QUANTISED_LENGTH,
    Call,
    Key,
    class_key_of,
    key_of,
)
from multigemm.planning.operands import Operands, reach_bytes
from multigemm.planning.running_sums import running_sums
from multigemm.planning.staging import allocate
from multigemm.problem.overlap import same_view
from multigemm.problem.problem import SCALES, GroupedGemmProblem
from multigemm.problem.scales import as_bytes
from multigemm.settings import settings
from multigemm.torch_internals import (
    current_device,
    current_raw_stream,
    empty_cuda,
    is_capturing,
)

ENTRIES = 4096
"""The largest number of entries. A training step makes six products in each layer, each with a layout of its own."""
NOTHING_MORE = (0,) * (len(OPERANDS) - OPERANDS.index("scale_a"))
"""The addresses of scales, zero points, fused operands and lent memory, for a call that has none of these."""
WORKSPACE = 64 << 20
"""Bytes of device memory that all entries may own together; one entry a sixteenth of it."""
_PREACT = QUANTISED_LENGTH + FUSED_OPERANDS.index("preact")
"""The position of `preact_out` in a call."""
BROKEN = -1
"""The token count of an entry whose resizing was interrupted, so that nothing is known of it. Another entry replaces
it."""


class _Entry(ABC):
    """The common part of all calls of one key; for a class of token counts, everything but the count."""

    __slots__ = (
        "_busy", "_choice", "_counted", "_device", "_dtype", "_given_out", "_grids", "_inner", "_reach", "_settings",
        "_shape", "_strides", "_tokens", "_writes_given", "index", "workspace",
    )  # fmt: skip

    def __init__(self, problem: GroupedGemmProblem, choice: Choice, counted: bool) -> None:
        self._choice = choice  # its identity may be part of the key
        shape = problem.out_shape[1:] if problem.squeezed else problem.out_shape
        self._shape, self._dtype, self._device = tuple(shape), problem.out_dtype, problem.device
        self._strides = torch.empty(self._shape, device="meta").stride()
        self.index = problem.device.index if problem.device.type == "cuda" else -1
        self._counted, self._given_out, self._busy = counted, problem.out is not None, False
        self._writes_given = self._given_out or (problem.fused is not None and problem.fused.preact is not None)
        self._inner = problem.form == "jagged_k"
        self._tokens = _tokens_of(problem) if counted else 0
        self._reach = {
            name: reach_bytes(problem.each(name)[0]) for name in ("a", "b", "c", "bias", "out") if problem.each(name)
        }
        self._grids = _grids(problem)
        self._settings = settings()  # its identity is part of the key
        self.workspace = 0
        """The bytes of device memory that it owns."""

    def run(self, call: Call) -> Tensor | None:
        """Runs a call of this key and returns its result; None if the call needs the full path."""
        if self._busy:  # a finaliser that runs in the middle of a call makes one of its own
            return None
        self._busy = True
        try:
            if self._counted:
                tokens = call[1].shape[self._inner]
                if tokens != self._tokens and not self.resize(tokens):
                    return None
            if self._writes_given and self._shares(call):
                return None
            if self._given_out:
                out = call[8]
            elif self.index < 0:
                out = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)
            else:
                out = empty_cuda(self._shape, self._strides, self._dtype)
            return out if self.launch(call, out) else None
        finally:
            self._busy = False

    @property
    def intact(self) -> bool:
        """Whether the entry can serve a call."""
        return self._tokens != BROKEN

    @abstractmethod
    def launch(self, call: Call, out: Tensor) -> bool:
        """Launches into the result. False if it could not."""

    def resize(self, tokens: int) -> bool:
        """Changes the entry to another number of tokens. False if it could not."""
        self._tokens = tokens
        if not self._inner:
            self._shape = (tokens, self._shape[1])
        return True

    def _shares(self, call: Call) -> bool:
        """Whether the memory range of the caller's `out` or `preact_out` overlaps that of an input or of the other."""
        _, a, b, _, cut, valid_rows, given_c, bias, out, *more = call
        reach = self._reach
        c = None if given_c is None or (out is not None and same_view(given_c, out)) else given_c
        inputs = [(x, reach.get(name, 0)) for name, x in (("a", a), ("b", b), ("bias", bias), ("c", c))]
        preact = call[_PREACT] if len(call) > QUANTISED_LENGTH else None
        inputs += [(x, reach_bytes(x)) for x in (cut, valid_rows, *more) if isinstance(x, Tensor) and x is not preact]
        written = [] if out is None else [(out, reach["out"])]
        if preact is not None:
            if preact is out:
                return True
            written.append((preact, reach_bytes(preact)))
            inputs += written[:-1]
        return any(_meet(x, size, y, extent) for x, size in written for y, extent in inputs if y is not None)


def _meet(x: Tensor, size: int, y: Tensor, extent: int) -> bool:
    """Whether two memory ranges overlap."""
    start, other = x.data_ptr(), y.data_ptr()
    return other < start + size and start < other + extent


def _made_for(problem: GroupedGemmProblem, ops: Operands) -> tuple[Tensor | None, Tensor | None]:
    """`ends` and `valid_rows` if staging made them; None for each that is the caller's memory or absent."""
    grouping, valid = problem.grouping, problem.valid_rows
    ends = ops.ends if grouping is not None and (grouping.live is None or grouping.kind == "sizes") else None
    return ends, ops.valid_rows if valid is not None and valid.live is None else None


def _grids(problem: GroupedGemmProblem) -> dict[str, tuple[torch.Size, tuple[int, ...]]]:
    """Scales and zero points as backends see them: shapes and strides of views that start at the caller's address."""
    given = () if problem.quantisation is None else problem.quantisation.each()
    return {name: (x.grid.shape, x.grid.stride()) for name, x in given if isinstance(x.grid, Tensor)}


def _bytes_of(tensors: tuple[Tensor | None, ...]) -> int:
    return sum(x.nbytes for x in tensors if x is not None)


class _HostCut:
    """The offsets of a class of calls whose sizes are on the host, and where their launch reads them on the device."""

    __slots__ = ("_address", "_kind", "_layout", "_memory", "_place", "index")

    def __init__(self, kind: str, ops: Operands, index: int, memory: memoryview | None = None) -> None:
        assert ops.ends is not None and ops.ends.dtype is torch.int32 and ops.head
        self._kind, self.index, self._place = kind, index, ops.ends.data_ptr() - 4
        self._layout = Struct(f"{ops.spec.groups + 1}i")
        self._memory = memoryview(bytearray(self._layout.size)).cast("i") if memory is None else memory
        self._address = addressof(c_char.from_buffer(self._memory))

    def offsets(self, cut: Any, rows: int, may_fall: bool = False) -> memoryview | None:
        """The cut as offsets, valid until the next call; None if it must be refused, which the full path does with a
        message. `may_fall`: whoever takes them refuses those that fall."""
        kind, offsets = self._kind, self._memory
        values = cut if type(cut) in HOST_SEQUENCES else cut.tolist()
        try:
            if kind == "sizes":
                self._layout.pack_into(offsets, 0, *accumulate(values, initial=0))
            else:
                self._layout.pack_into(offsets, 0, *(values if kind == "offsets" else (0, *values)))
        except error:  # past 31 bits, or not as many
            return None
        if offsets[0] < 0 or offsets[-1] > rows:
            return None
        rising = may_fall or (min(values, default=0) >= 0 if kind == "sizes" else sorted(offsets) == [*offsets])
        return offsets if rising else None

    def upload(self) -> None:
        """Copies the offsets to the device before the next launch. The driver takes so few bytes before it returns."""
        upload(self._place, self._address, self._layout.size, self.index)


class _MovingEntry(_Entry):
    """A launch that follows its operands. `_ends` and `_valid_rows` are 0 if it reads the caller's own tensor."""

    __slots__ = (
        "_ends", "_follows_ends", "_follows_valid", "_host", "_keep", "_kind", "_launch", "_start", "_step", "_stream",
        "_valid_rows", "_work",
    )  # fmt: skip

    def __init__(
        self, problem: GroupedGemmProblem, ops: Operands, choice: Choice, launch: Any, kind: str, counted: bool = False
    ) -> None:
        super().__init__(problem, choice, counted)
        self._launch, self._kind, self._keep = launch, kind, _made_for(problem, ops)
        on_gpu = self.index >= 0 and getattr(launch, "index", -1) == self.index
        self._start = launch.on if on_gpu else None
        self._stream = current_raw_stream(self.index) if on_gpu else 0  # part of the key
        self._follows_ends, self._follows_valid = (x is None for x in self._keep)
        self._ends, self._valid_rows = (0 if x is None else x.data_ptr() for x in self._keep)
        self._step = ops.ends.element_size() if kind == "offsets" and ops.ends is not None else 0
        host = counted and problem.grouping is not None and problem.grouping.live is None
        self._host = _HostCut(kind, ops, self.index) if host else None
        self.workspace = launch.workspace_bytes() + _bytes_of(self._keep)
        self._work: int = getattr(launch, "work_bytes", 0)
        if self._work:
            launch.drop_lent()  # an entry that waits for its next call holds none

    def launch(self, call: Call, out: Tensor) -> bool:
        more = call[PLAIN_LENGTH:]
        _, a, b, _, cut, valid_rows, c, bias, _ = call[:PLAIN_LENGTH] if more else call
        ends, valid, sizes = self._ends, self._valid_rows, 0
        if self._follows_ends:
            if cut is not None:
                ends = cut.data_ptr() + self._step
        elif self._kind == "sizes" and type(cut) in PLAIN:
            sizes = cut.data_ptr()
        if self._host is not None:
            if self._host.offsets(cut, self._tokens) is None:
                return False
            self._host.upload()
        if valid_rows is not None and self._follows_valid:
            valid = valid_rows.data_ptr()
        rest, lent = NOTHING_MORE, None
        if more:
            rest = (*[0 if x is None else x.data_ptr() for x in more], *NOTHING_MORE[len(more) :])
            if self._work:  # freed at the end, which orders it before whatever reuses it
                lent = empty_cuda((self._work,), (1,), torch.uint8)
                rest = (*rest[:-1], lent.data_ptr())
        self._launch.move(
            (
                a.data_ptr(), b.data_ptr(), out.data_ptr(), 0 if c is None else c.data_ptr(),
                0 if bias is None else bias.data_ptr(), ends, valid, sizes, *rest,
            )
        )  # fmt: skip
        if self._start is None:
            self._launch()
        else:
            self._start(self._stream)
        return True

    def resize(self, tokens: int) -> bool:
        """Changes the launch to another number of tokens; the outcome equals a new bind for that number."""
        before = self._tokens
        if before == BROKEN:
            return False
        self._tokens = BROKEN  # should this be interrupted
        self._launch.resize(before, tokens, not self._inner)
        return super().resize(tokens)


class _BindingEntry(_Entry):
    """What is needed to bind the next call's operands, for a backend whose launches cannot be moved or resized."""

    __slots__ = ("_alpha", "_beta", "_ends", "_fused", "_host", "_kind", "_spec", "_squeezed", "_sums")

    def __init__(
        self, problem: GroupedGemmProblem, ops: Operands, choice: Choice, kind: str, counted: bool = False
    ) -> None:
        super().__init__(problem, choice, counted)
        cut = problem.cut
        self._spec, self._kind, self._squeezed = choice.spec, kind, problem.squeezed
        self._alpha, self._beta = problem.alpha, problem.beta
        self._fused = None if problem.fused is None else problem.fused.without_tensors()
        self._ends: Tensor | None = None
        self._sums: Any = None
        self._host: dict[str, Any] | _HostCut | None = None
        if cut is not None and cut.live is None:
            self._host = {
                "ends": ops.ends, "head": ops.head, "valid_rows": ops.valid_rows, "host_offsets": ops.host_offsets,
                "host_valid_rows": ops.host_valid_rows,
            }  # fmt: skip
            if counted:
                self._host = _HostCut(kind, ops, self.index)
        self.workspace = _bytes_of(_made_for(problem, ops))

    def launch(self, call: Call, out: Tensor) -> bool:
        _, a, b, _, given, valid_rows, c, bias, _, *more = call
        target, c = out, c if self._beta != 0 else None
        if self._squeezed:
            a, b, target = a.unsqueeze(0), b.unsqueeze(0), out.unsqueeze(0)
            c = None if c is None else c.unsqueeze(0)
        cut = self._cut(given, valid_rows)
        if cut is None:
            return False
        alpha, beta, device = self._alpha, self._beta, self._device
        ops = Operands(self._spec, a, as_bytes(b), target, c, bias, alpha=alpha, beta=beta, device=device, **cut)
        if self._grids:
            named = dict(zip(SCALES, more, strict=False))
            ops = replace(ops, **{name: named[name].as_strided(*grid) for name, grid in self._grids.items()})
        if self._fused is not None:
            ops = replace(ops, fused=self._fused.with_tensors(*more[len(SCALES) :], squeezed=self._squeezed))
        self._choice.recipe.bind(ops)()  # the result has elements: memory without any has no address, hence no key
        return True

    def _cut(self, cut: Any, valid_rows: Any) -> dict[str, Any] | None:
        """The boundaries of the groups; None if they must be refused, which the full path does with a message."""
        if isinstance(self._host, dict):
            return self._host
        if self._host is not None:
            offsets = self._host.offsets(cut, self._tokens)
            if offsets is None:
                return None
            on_host = np.array(offsets)
            on_device = to_device(on_host, self._device)
            return {"ends": on_device[1:], "head": True, "host_offsets": on_host.astype(np.int64)}
        if valid_rows is not None:
            return {"valid_rows": valid_rows}
        if self._kind == "offsets":
            return {"ends": cut[1:], "head": True}
        if self._kind == "sizes" and cut is not None:
            return {"ends": self._summed(cut), "sizes": cut}
        return {"ends": cut}

    def _summed(self, sizes: Tensor) -> Tensor:
        """Memory for `ends`, shared by the calls of this stream. Filled, unless the recipe sums sizes itself."""
        if self._ends is None:
            self._ends = torch.empty(sizes.shape, dtype=torch.int64, device=self._device)
        if self._choice.recipe.sums_sizes:
            return self._ends
        if self._sums is None or not hasattr(self._sums, "move"):
            self._sums = running_sums(sizes, self._ends)
        else:
            self._sums.move((0, 0, 0, 0, 0, 0, 0, sizes.data_ptr()))
        self._sums()
        return self._ends


class _TensorEntry(_Entry):
    """A launch that is a function of the caller's tensors, for library operations that take and return tensors."""

    __slots__ = ("_on_tensors",)

    def __init__(
        self, problem: GroupedGemmProblem, choice: Choice, on_tensors: OnTensors, workspace: int, counted: bool
    ) -> None:
        super().__init__(problem, choice, counted)
        self._on_tensors, self.workspace = on_tensors, workspace

    def run(self, call: Call) -> Tensor | None:
        if self._given_out or self._busy:
            return super().run(call)
        self._busy = True
        try:
            found: Tensor | None = self._on_tensors(call[1], call[2], call[4], None)
            return found
        finally:
            self._busy = False

    def launch(self, call: Call, out: Tensor) -> bool:
        self._on_tensors(call[1], call[2], call[4], out)
        return True


class LaunchCache:
    """The most recent entries by key. `seen` holds keys that came once."""

    def __init__(self) -> None:
        self._entries: dict[Key, Any] = {}
        self._seen: dict[int, None] = {}
        self._bytes = 0
        self._lock = RLock()  # a finaliser that calls may run while it is held
        self.served = 0
        """The number of calls that an entry has served, for tests."""

    def recall(self, key: Key, call: Call) -> tuple[Tensor | None, Key | None]:
        """The result of a call if its key or its class has an entry; else None, and the key of the class."""
        class_key = None
        try:
            entry = self._entries.get(key)
            if entry is None:
                class_key = class_key_of(key, call)
                if class_key is None or (entry := self._entries.get(class_key)) is None:
                    return None, class_key
        except TypeError:  # a config or a backend that cannot be a key
            return None, None
        index = entry.index
        if index < 0 or index == current_device():
            found: Tensor | None = entry.run(call)
        else:
            with torch.cuda.device(index):
                found = None if is_capturing() else entry.run(call)
        self.served += found is not None
        return found, class_key

    def run(self, keys: tuple[Key | None, Key | None], choice: Choice, problem: GroupedGemmProblem) -> Any:
        """Binds and launches. A key that comes for the second time gets an entry for the third.

        `keys` are those of the call and of its class.
        """
        out = allocate(problem)
        bound = bind(choice, problem, out)
        bound.launch()
        if keys[0] is not None and _lasting(choice, problem) and not capturing(problem.device):
            for key, counted in zip(keys, (False, True), strict=True):
                if key is not None and self.comes_again(key) and not self._holds(key):
                    entry = _entry_of(problem, bound, choice, keys[0][KIND], counted)
                    if entry is not None:
                        self.keep(key, entry)
        return caller_result(problem, out)

    def _holds(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.intact

    def comes_again(self, key: Key) -> bool:
        """Whether a key came before. Most keys come once, and an entry costs more than a call."""
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
        """Stores an entry and counts its device memory; the oldest entries are dropped."""
        if entry.workspace > WORKSPACE // 16:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            self._bytes += entry.workspace - (0 if old is None else old.workspace)
            while self._entries and (len(self._entries) >= ENTRIES or self._bytes > WORKSPACE):
                old = self._entries.pop(next(iter(self._entries)))
                self._bytes -= old.workspace
            self._entries[key] = entry

    def clear(self) -> None:
        """Drops all entries. Launches that still run finish before their memory is reused."""
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
    if problem.fused is not None and not problem.fused.moves:
        return False
    cut = problem.cut
    dense = cut is None or cut.live is None or cut.live.shape[0] <= 1 or cut.live.stride(0) == 1
    uncast = spec.a.dtype is spec.compute and spec.b.dtype is spec.compute
    return dense and (uncast or problem.quantisation is not None)


def _entry_of(problem: GroupedGemmProblem, bound: Bound, choice: Choice, kind: str, counted: bool) -> _Entry | None:
    """A `_MovingEntry` if every launch can move and none keeps an address of the caller's; else another kind, or None.

    `counted`: the entry serves a class of token counts, so its launch must also resize. If it cannot, there is no entry
    for quantised operands (their grids of scales would have to be laid out anew) nor where tokens are summed over.
    """
    launch, ops, cut = bound.launch, bound.ops, problem.cut
    if counted and problem.form == "jagged_k" and choice.spec.quantised:
        return None
    if counted and cut is not None and cut.live is None and (with_sizes := _with_sizes(problem, bound, choice)):
        index = problem.device.index if problem.device.type == "cuda" else -1
        placed = _placed(with_sizes, _HostCut(kind, ops, index, with_sizes.offsets), problem.form == "jagged_k")
        return _TensorEntry(problem, choice, placed, with_sizes.workspace_bytes(), counted)
    on_tensors = _on_tensors(problem, bound, kind, counted)
    if on_tensors is not None:
        return _TensorEntry(problem, choice, on_tensors, 16 * choice.spec.groups, counted)
    callers = [ops.a, ops.b, ops.out, ops.c, ops.bias, None if cut is None else cut.live]
    callers += [ops.scale_a, ops.scale_b, ops.zero_b, *(() if ops.fused is None else ops.fused.tensors())]
    spans = [(x.data_ptr(), x.data_ptr() + reach_bytes(x)) for x in callers if isinstance(x, Tensor)]
    movable = hasattr(launch, "move") and not launch.stays_behind(spans)  # type: ignore[attr-defined]
    if movable and launch.workspace_bytes() <= WORKSPACE // 16:  # type: ignore[attr-defined]
        if not counted:
            return _MovingEntry(problem, ops, choice, launch, kind)
        if _resizes(launch, _tokens_of(problem)):
            own = bind(choice, problem, allocate(problem))  # the other entry's launch moves and is resized by itself
            return _MovingEntry(problem, own.ops, choice, own.launch, kind, counted=True)
    return None if counted and problem.quantisation is not None else _BindingEntry(problem, ops, choice, kind, counted)


def relaunches(bound: Bound) -> bool:
    """Whether a warm call launches what was bound before, rather than binds anew."""
    return hasattr(bound.launch, "move") or hasattr(bound.steps[-1], "on_tensors")


OnTensors = Callable[[Tensor, Tensor, Any, Tensor | None], Tensor | None]
"""A launch as a function of a, b, the group boundaries, and the caller's `out` or None. Returns the result, or None for
boundaries that must be refused."""


def _on_tensors(problem: GroupedGemmProblem, bound: Bound, kind: str, counted: bool) -> OnTensors | None:
    """The backend's launch of tensors. None if the launch has no method `on_tensors`, or the problem does not fit
    it."""
    form, cut = getattr(bound.steps[-1], "on_tensors", None), problem.cut
    live = None if cut is None else cut.live
    special = problem.quantisation is not None or problem.fused is not None
    if form is None or (counted and live is None) or special:
        return None
    found: OnTensors | None = form(kind, live)
    return found


def _with_sizes(problem: GroupedGemmProblem, bound: Bound, choice: Choice) -> WithSizes | None:
    """The backend's launch of any sizes on the host; None if it has none for such operands."""
    bind_sizes = choice.recipe.bind_sizes
    plain = len(bound.steps) == 1 and problem.quantisation is None and problem.fused is None
    return bind_sizes(bound.ops) if plain and bind_sizes is not None else None


def _placed(with_sizes: WithSizes, host: _HostCut, axis: int) -> OnTensors:
    """A launch of any sizes on the host; tokens lie along this axis of a. A call with an `out` of the caller has none
    (`launch_key.class_key_of`)."""

    def on_tensors(a: Tensor, b: Tensor, cut: Any, out: Tensor | None) -> Tensor | None:
        return None if host.offsets(cut, a.shape[axis], may_fall=True) is None else with_sizes(a, b)

    return on_tensors


def _tokens_of(problem: GroupedGemmProblem) -> int:
    """The number of tokens of a problem that cuts them: rows of a, or columns of a for jagged k."""
    return int(problem.each("a")[0].shape[problem.form == "jagged_k"])


def _resizes(launch: Any, tokens: int) -> bool:
    """Whether a launch can be resized to every token count of a class. Tried with two counts far apart, at which all
    tensor maps differ."""
    return tokens > 0 and hasattr(launch, "can_resize") and bool(launch.can_resize(tokens, 2 * tokens + 1))


def solve(choice: Choice, problem: GroupedGemmProblem) -> Any:
    """Solves a problem with a choice that was made for its spec."""
    if problem.kind != "torch" or problem.form == "per_group":
        return LAUNCHES.run((None, None), choice, problem)
    grouping, cut = problem.grouping, problem.cut
    kind = "" if grouping is None else grouping.kind if grouping.live is not None else "offsets"
    values = None if cut is None else cut.host if cut.live is None else cut.live
    a, b, c = (x[0] if problem.squeezed and isinstance(x, Tensor) else x for x in (problem.a, problem.b, problem.c))
    masked = problem.valid_rows is not None
    cuts = (None, values) if masked else (values, None)
    q = problem.quantisation
    more: tuple[Any, ...] = () if q is None else (problem.scale_a, problem.scale_b, problem.zero_b)
    options: Key = (id(choice), problem.alpha, problem.beta, problem.squeezed)
    if (fused := problem.fused) is not None:
        index = fused.combine or fused.out_rows
        at = (None if x is None else x.values for x in (fused.a_rows, fused.b_rows))
        tensors = (*at, fused.given_preact, fused.row_scale, None if index is None else index.values, fused.weights)
        more = (*(more or NO_SCALES), *tensors)
        options = (*options, fused.gate, fused.combine is None, fused.rows)
    call: Any = (problem.form[-1], a, b, kind, *cuts, c, problem.bias, problem.given_out, *more)
    key = key_of(call, options)
    found, class_key = (None, None) if key is None else LAUNCHES.recall(key, call)
    return LAUNCHES.run((key, class_key), choice, problem) if found is None else found


LAUNCHES = LaunchCache()
"""The cache of this process."""
clear = LAUNCHES.clear


def _begin_anew() -> None:
    """Runs in a forked child: drops the parent's entries, and replaces the lock, which another thread might hold."""
    LAUNCHES.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_begin_anew)
