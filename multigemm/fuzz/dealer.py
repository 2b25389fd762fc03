"""Which problems a worker gets next, so that nobody waits for another's compiler.

Problem numbers come in batches of one slot: a kind of problem under one of its configs. The first batch
of every slot is handed out first, for it compiles; what follows of a slot is handed out once one of its
problems has come back, to whoever has nothing to do, and rather to one who has run the slot before. So
compilers run side by side from the start, none is begun late, and a slow one holds up nobody but the
worker that waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from multigemm.fuzz.plan import Options

LEAD = 8
"""Batches by which a slot may be ahead of the others where its kernels are loaded: another process takes as long to
load them as to run a batch or more."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Problems `first` up to, not including, `stop`; the first runs one backend at a time from `alone_from`
    on, where that is not -1."""

    first: int
    stop: int
    alone_from: int = -1


class Dealer:
    """Hands out batches until `examples` problems are with workers (0: without end)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.left = options.examples or 1 << 60
        self.warm: set[int] = set()
        self._laps: Counter[int] = Counter()

    @property
    def slots(self) -> int:
        """How many slots there are; 0 where every problem is of a kind of its own."""
        return self.options.slots

    def cold(self) -> list[int]:
        """Slots of which no problem has come back."""
        return [slot for slot in range(self.slots) if slot not in self.warm]

    def is_cold(self, number: int) -> bool:
        """Whether a problem's slot still has to be compiled."""
        return bool(self.slots) and self.options.slot_of(number) not in self.warm

    def seen(self, number: int) -> bool:
        """A problem has come back; whether it was the last slot's first."""
        before = len(self.warm)
        if self.slots:
            self.warm.add(self.options.slot_of(number))
        return before < len(self.warm) == self.slots

    def more(self, count: int) -> None:
        """So many problems are to be handed out beside those that are with a worker that is stuck."""
        self.left += count

    def deal(self, *, fresh: bool = True, loaded: Collection[int] = ()) -> Batch | None:
        """The next batch; None when enough are out. Not `fresh`: of a slot that is compiled, if there is one.
        A worker that asks has the kernels of `loaded` slots in its process: those go on for some laps."""
        if self.left <= 0:
            return None
        size = min(self.options.burst, self.left)
        self.left -= size
        slot = self._slot(fresh or not self.warm, loaded)
        number = (self._laps[slot] * max(self.slots, 1) + slot) * self.options.burst
        self._laps[slot] += 1
        return Batch(number, number + size)

    def _slot(self, fresh: bool, loaded: Collection[int]) -> int:
        """One that nobody has begun; else the warm one that was handed out least, with a lead for the loaded; else
        any."""
        if not self.slots:
            return 0
        if fresh and (new := [slot for slot in range(self.slots) if slot not in self._laps]):
            return new[0]
        return min(sorted(self.warm) or range(self.slots), key=lambda slot: self._laps[slot] - LEAD * (slot in loaded))
