"""Threads of which one runs at a time: until it waits for others, and then hands its turn to the next one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class Turns:
    """Threads that run in turns: in the order in which they became ready, or as `choose` says.

    Handing on takes one switch of threads. Threads that all run at once hold each other up for the interpreter's lock.
    """

    def __init__(self, count: int, choose: Callable[[], int | None] | None = None) -> None:
        """`choose` returns the number of the thread whose turn is next; None where no thread can go on."""
        self._gates: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(count)]
        self._ready, self._running = deque(range(count)), set(range(count))
        self._choose = choose or (lambda: self._ready.popleft() if self._ready else None)
        self._waiting: dict[range, list[int]] = {}
        self._missing: dict[range, int] = {}
        """How many threads of a meeting still run and do not wait yet."""
        self.number = -1
        """The thread that runs."""

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of all threads. Raises the first error of one of them, once all have ended."""
        results: list[Any] = [None] * len(works)
        errors: list[BaseException] = []

        def one(number: int) -> None:
            self._gates[number].get()
            try:
                results[number] = works[number]()
            except BaseException as error:
                errors.append(error)
            self._leave()

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(works))]
        for thread in threads:
            thread.start()
        self._give(self._choose())
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def hand_on(self) -> None:
        """Lets others run until it is this thread's turn again."""
        mine, chosen = self.number, self._choose()
        assert chosen is not None, "all threads wait for each other"
        if chosen != mine:
            self._give(chosen)
            self._gates[mine].get()

    def meet(self, members: range) -> None:
        """Waits until all members that still run wait here."""
        if members not in self._waiting:
            self._waiting[members], self._missing[members] = [], sum(x in self._running for x in members)
        self._waiting[members].append(self.number)
        self._count(members)
        self.hand_on()

    def _give(self, chosen: int | None) -> None:
        if chosen is not None:
            self.number = chosen
            self._gates[chosen].put(None)

    def _leave(self) -> None:
        self._running.discard(self.number)
        for members in self._waiting:
            if self.number in members:
                self._count(members)
        self._give(self._choose())

    def _count(self, members: range) -> None:
        """Counts one thread that is no longer missing; the last one lets all that wait go on."""
        self._missing[members] -= 1
        waiting = self._waiting[members]
        if not self._missing[members]:
            self._ready.extend(waiting)
            self._missing[members] = len(waiting)
            waiting.clear()
