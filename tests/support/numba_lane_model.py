"""A warp in plain Python: copies fill a byte array, fragment loads read it lane by lane, as the PTX manual has it.

A register is the bytes it holds: elements along k, the lowest first. `ldmatrix` needs all lanes'
addresses, so its result stays a name until the warp has asked.
"""

from __future__ import annotations

from collections import Counter
from types import CellType, FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
LANES = 32
BANKS = 32


def plain(function: Any) -> Any:
    """A device function as plain Python, with the device functions in its closure made plain too."""
    made = getattr(function, "py_func", function)
    cells = tuple(
        CellType(plain(cell.cell_contents)) if hasattr(cell.cell_contents, "py_func") else cell
        for cell in made.__closure__ or ()
    )
    return FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, cells)


class Warp:
    """Shared and global memory, and what each lane has asked `ldmatrix` for; stands in for the module `ptx`."""

    def __init__(self, memory: Bytes) -> None:
        self.memory, self.shared = memory, np.full(1 << 16, 255, np.uint8)
        self.asked = [0] * LANES
        self.lane = 0
        self.read: list[tuple[int, int]] = []

    def _copy(self, width: int, target: int, source: int, left: int) -> None:
        self.shared[target : target + width] = 0
        if left > 0:
            self.shared[target : target + left] = self.memory[source : source + left]

    def cp_async_16(self, target: int, source: int, left: int) -> None:
        assert left <= 0 or source % 16 == 0, "16 bytes are copied from aligned addresses only"
        self._copy(16, target, source, left)

    def cp_async_8(self, target: int, source: int, left: int) -> None:
        self._copy(8, target, source, left)

    def cp_async_4(self, target: int, source: int, left: int) -> None:
        self._copy(4, target, source, left)

    def store_shared_u8(self, target: int, value: int) -> None:
        self.shared[target] = value & 255

    def load_u8(self, source: int) -> int:
        return int(self.memory[source])

    def _load(self, at: int, width: int) -> Bytes:
        self.read.append((int(at), width))
        return self.shared[at : at + width].copy()

    def load_shared_f64(self, at: int) -> Bytes:
        return self._load(at, 8)

    def load_shared_u32(self, at: int) -> Bytes:
        return self._load(at, 4)

    def vectors(self, places: list[tuple[int, int]]) -> Any:
        """As `mma_fragments._make_loads`."""
        return lambda even, odd: [x for which, at in places for x in self._load((even, odd)[which] + at, 16).view("f4")]

    def ldmatrix(self, at: int) -> list[tuple[str, Any, Any]]:
        self.asked[self.lane] = int(at)
        return [("word", number, None) for number in range(4)]

    def settle(self, register: Any, lane: int, transposed: bool) -> Bytes:
        """The bytes of a register, now that all lanes have asked."""
        if isinstance(register, np.ndarray):
            return register
        name, first, second = register
        if name != "word":
            pair = [self.settle(x, lane, transposed) for x in (first, second)]
            return np.concatenate(pair)[[0, 2, 4, 6] if name == "even" else [1, 3, 5, 7]]
        row, quad = lane // 4, lane % 4
        if not transposed:
            at = self.asked[first * 8 + row] + quad * 4
            return self.shared[at : at + 4]
        starts = [self.asked[first * 8 + 2 * quad + x] + 2 * row for x in range(2)]
        return np.concatenate([self.shared[at : at + 2] for at in starts])

    def ways(self, reads: list[list[tuple[int, int]]]) -> int:
        """The most words that one bank has to give at once, over the reads of all lanes."""
        worst = 1
        for number, (_, width) in enumerate(reads[0]):
            together = LANES * 4 // width
            for first in range(0, LANES, together):
                places = {reads[lane][number][0] for lane in range(first, first + together)}
                words = Counter((at // 4 + x) % BANKS for at in places for x in range(width // 4))
                worst = max(worst, *words.values())
        return worst

    def matrix_ways(self) -> int:
        """The same for `ldmatrix`: 8 rows of 16 bytes at once."""
        chunks = [Counter(at // 16 % 8 for at in self.asked[first : first + 8]) for first in range(0, LANES, 8)]
        return max(max(count.values()) for count in chunks)
