"""The exact overlap test against the definition: two index tuples, one address."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multigemm.problem.overlap import first_shared_pair, meetings, overlaps_itself, same_view

MEMORY = torch.zeros(4000)


def addresses(x: torch.Tensor) -> list[int]:
    base = (x.data_ptr() - MEMORY.data_ptr()) // 4
    steps = zip(x.shape, x.stride(), strict=True)
    return [base + sum(c) for c in product(*([i * s for i in range(n)] for n, s in steps))]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    rank = draw(st.sampled_from([3, 2, 1]))
    extent = st.one_of(st.integers(2, 6), st.integers(0, 6))
    shape = draw(st.lists(extent, min_size=rank, max_size=rank))
    stride = draw(st.lists(st.one_of(st.integers(1, 30), st.integers(0, 3)), min_size=rank, max_size=rank))
    return MEMORY.as_strided(shape, stride, draw(st.integers(0, 60)))


@settings(max_examples=400)
@given(views())
def test_overlaps_itself_is_exact(x: torch.Tensor) -> None:
    seen = addresses(x)
    assert overlaps_itself(x) == (len(set(seen)) < len(seen))


@settings(max_examples=400)
@given(views(), views())
def test_a_meeting_is_exact(x: torch.Tensor, y: torch.Tensor) -> None:
    assert any(meetings([x], [y])) == bool(set(addresses(x)) & set(addresses(y)))


@settings(max_examples=400)
@given(st.lists(views(), max_size=5))
def test_first_shared_pair_finds_one_where_there_is_one(tensors: list[torch.Tensor]) -> None:
    sets = [set(addresses(t)) for t in tensors]
    clash = {(i, j) for j in range(len(sets)) for i in range(j) if sets[i] & sets[j]}
    found = first_shared_pair(tensors)
    assert found in clash if clash else found is None


def test_same_view() -> None:
    x = MEMORY.view(40, 100)
    assert same_view(x, MEMORY.view(40, 100))
    assert not same_view(x, x[1:])
