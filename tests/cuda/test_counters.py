"""Zeroed words that bound problems borrow: they come back, run out, and stay with a graph that holds them."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
import torch

from multigemm.cuda import counters
from multigemm.cuda.counters import SLOTS, Words


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dict[int, deque[int]]:
    """Two slots of each size, in host memory."""
    memory = {size: torch.zeros(2 * size, dtype=torch.int32) for size in SLOTS}
    free = {size: deque(range(2)) for size in SLOTS}
    monkeypatch.setattr(counters, "pool", lambda index, size: (memory[size], free[size]))
    monkeypatch.setattr(Words, "_own", staticmethod(lambda index, words: torch.zeros(words, dtype=torch.int32)))
    return free


def test_words_come_back_behind_all_others(few: dict[int, deque[int]]) -> None:
    first = Words(0, 3)
    assert first.tensor.numel() == 8
    assert list(few[8]) == [1]
    del first
    assert list(few[8]) == [1, 0]


def test_two_that_live_at_once_share_nothing(few: dict[int, deque[int]]) -> None:
    held = [Words(0, words) for words in (8, 8, 8, 9, 256, 4096, 5000)]
    ranges = sorted((x.address, x.address + 4 * x.tensor.numel()) for x in held)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert [x.pin is None for x in held] == [False, False, True, False, False, False, True], "own words need no pin"
    assert not any(x.tensor.any() for x in held)


def test_captured_words_never_come_back(few: dict[int, deque[int]]) -> None:
    words = Words(0, 8)
    assert words.pin is not None
    words.pin()
    words.pin()
    del words
    assert list(few[8]) == [1]
