"""A warp of the Hopper kernel for float8 in plain Python: one thread for each lane, that meet where lanes shuffle.

`Model` stands in for the modules `ptx` and `cuda` of the kernel's source, and `Builder` for LLVM's: what device
functions emit is computed at once. Numbers in shared memory are whole, one byte each; tensor cores read them as the PTX
manual has it, through the 128-byte swizzle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.turns import Turns

LANES = 32
EVERY_LANE = range(LANES)
Values = list[float]


class Builder:
    """Computes what an LLVM builder would emit; of a switch, the one case that is taken."""

    def __init__(self) -> None:
        self.taken, self.cases = True, dict[Any, bool]()

    def extract_value(self, values: Values, i: int) -> float:
        return values[i]

    def insert_value(self, values: Values, value: float, i: int) -> Values:
        return [*values[:i], value, *values[i + 1 :]]

    def fma(self, x: float, y: float, z: float) -> float:
        return x * y + z

    def fadd(self, x: float, y: float) -> float:
        return x + y

    def fmul(self, x: float, y: float) -> float:
        return x * y

    def add(self, x: Any, y: Any) -> int:
        return int(number(x) + number(y))

    def mul(self, x: Any, y: Any) -> int:
        return int(number(x) * number(y))

    def xor(self, x: Any, y: Any) -> int:
        return int(number(x)) ^ int(number(y))

    def sext(self, x: Any, _type: Any) -> int:
        return int(number(x))

    def icmp_signed(self, _less: str, x: Any, y: Any) -> bool:
        return bool(number(x) < number(y))

    def select(self, condition: bool, x: Any, y: Any) -> Any:
        return x if condition else y

    def load(self, value: float) -> float:
        return value

    def append_basic_block(self, name: str) -> str:
        return name

    def switch(self, which: Any, _done: str) -> Builder:
        self.which = int(number(which))
        return self

    def add_case(self, value: Any, block: str) -> None:
        self.cases[block] = int(number(value)) == self.which

    @contextmanager
    def goto_block(self, block: str) -> Iterator[None]:
        before, self.taken = self.taken, self.cases[block]
        yield
        self.taken = before

    def branch(self, _block: str) -> None:
        pass

    def position_at_end(self, _block: str) -> None:
        pass


def number(value: Any) -> Any:
    """The number of an LLVM constant, or the number itself."""
    return getattr(value, "constant", value)


def emitted(generate: Callable[..., Any], *_types: Any) -> Callable[..., Any]:
    """As `ptx.emitted`: what `generate` emits, computed."""
    return lambda *values: generate(Builder(), *values)


class Model:
    """Shared memory, scales at their addresses, and which lane of which warp runs."""

    def __init__(self, shared: npt.NDArray[np.int8], scales: npt.NDArray[np.float32], records: dict[int, int]) -> None:
        self.shared, self.scales, self.records = shared, scales, records
        self.staged = np.full(1 << 14, np.nan, np.float32)
        self._warp, self._told = 0, [0.0] * LANES
        self._turns = Turns(LANES)

    def run(self, warp: int, function: Callable[[], Any]) -> list[Any]:
        """The results of all lanes of a warp."""
        self._warp, self._turns = warp, Turns(LANES)
        return self._turns.run([function] * LANES)

    # What the kernel calls in `ptx` and `cuda`.

    def thread_again(self) -> int:
        return self._warp * LANES + self._turns.number

    def load_shared_u32x4(self, at: int) -> tuple[np.int32, ...]:
        return tuple(np.int32(self.records[int(at) + 4 * i]) for i in range(4))

    def cluster_rank(self) -> int:
        return 0

    def shfl_sync(self, _mask: int, value: float, source: int) -> float:
        return self._all_told(value)[int(source)]

    def _all_told(self, value: float) -> list[float]:
        """The values of all lanes, once each has told its own."""
        told = self._told
        told[self._turns.number] = value
        self._turns.meet(EVERY_LANE)
        if told is self._told:
            self._told = [0.0] * LANES
        return told

    def load_scale(self, address: int, _index: int) -> float:
        return float(self.scales[int(address) // 4])

    def nothing(self, *_arguments: Any) -> None:
        """Barriers and fences: the stages are full."""

    mbarrier_wait = wgmma_fence = wgmma_commit = nothing

    def same(self, *_arguments: Any) -> Callable[[Values], Values]:
        return lambda values: values

    make_wgmma_result = make_settled = same

    def descriptor_half(self, address: int) -> int:
        return (int(address) >> 4) & 0x3FFF

    def _rows(self, half: int, k: int, rows: Sequence[int]) -> npt.NDArray[np.float64]:
        """[rows, 32] of an operand: rows of 128 bytes, swizzled."""
        plain = (half + k) * 16 + np.array(rows)[:, None] * 128 + np.arange(32)
        found: npt.NDArray[np.int8] = self.shared[plain ^ (plain >> 7 & 7) << 4]
        return found.astype(np.float64)

    def make_wgmma_of_bytes(self, _a: str, _b: str, n: int, k: int, fresh: bool) -> Callable[..., Values]:
        @cache  # nobody fills a stage anew, and four lanes hold parts of the same rows
        def multiplied(a: int, b: int, row: int) -> npt.NDArray[np.float64]:
            found: npt.NDArray[np.float64] = self._rows(a, k, [row, row + 8]) @ columns(b)
            return found

        @cache
        def columns(b: int) -> npt.NDArray[np.float64]:
            return self._rows(b, k, range(n)).T

        def wgmma(acc: Values, a: int, b: int, _never: int) -> Values:
            lane, warp = self.thread_again() % 32, self.thread_again() // 32 % 4
            found = multiplied(a, b, warp * 16 + lane // 4)
            mine = found.reshape(2, n // 8, 8)[:, :, lane % 4 * 2 : lane % 4 * 2 + 2].transpose(1, 0, 2).reshape(-1)
            return mine.tolist() if fresh else [x + y for x, y in zip(acc, mine, strict=True)]

        return wgmma

    def assembly(self, builder: Builder, text: str, values: Sequence[float]) -> None:
        """Stores to staging: of two float32, or four matrices of pairs by `stmatrix`, to places that all lanes name."""
        if not builder.taken:
            return
        if found := re.fullmatch(r"st\.shared\.v2\.f32 \[\$0\+(\d+)\], \{\$1, \$2\};", text):
            at = (int(values[0]) + int(found.group(1))) // 4
            self.staged[at : at + 2] = values[1:]
            return
        packed = re.findall(r"cvt\.rn\.bf16x2\.f32 ([abcd]), \$(\d), \$(\d);", text)
        assert packed == [(name, str(2 * i + 2), str(2 * i + 1)) for i, name in enumerate("abcd")], text
        assert "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+0], {a, b, c, d};" in text
        lane = self.thread_again() % LANES
        places = self._all_told(values[0])
        for matrix in range(4):
            at = (int(places[matrix * 8 + lane // 4]) + lane % 4 * 4) // 2
            self.staged[at : at + 2] = values[1 + matrix * 2 : 3 + matrix * 2]
