"""The exact overlap test against the definition, two index tuples and one address; and what is refused by it."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import multigemm as mg
from multigemm.problem.overlap import first_shared_pair, meetings, overlaps_itself, same_view
from tests.support.problem_cases import CUT, A, B, refuse, refuse_problem

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


@pytest.mark.slow
@settings(max_examples=150)
@given(views())
def test_overlaps_itself_is_exact(x: torch.Tensor) -> None:
    seen = addresses(x)
    assert overlaps_itself(x) == (len(set(seen)) < len(seen))


@pytest.mark.slow
@settings(max_examples=150)
@given(views(), views())
def test_a_meeting_is_exact(x: torch.Tensor, y: torch.Tensor) -> None:
    assert any(meetings([x], [y])) == bool(set(addresses(x)) & set(addresses(y)))


@pytest.mark.slow
@settings(max_examples=150)
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


def test_outputs_that_meet_inputs() -> None:
    memory = torch.ones(200)
    a, out = memory[:40].view(10, 4), memory[30:80].view(10, 5)
    refuse_problem("out shares memory with a", a, B, offsets=CUT, out=out)
    refuse_problem("out shares memory with bias", A, B, offsets=CUT, out=out, bias=memory[79:84])
    refuse_problem("out shares memory with c", A, B, offsets=CUT, out=out, c=memory[31:81].view(10, 5), beta=1.0)
    assert memory.eq(1).all()


def test_out_must_not_lie_over_sizes_that_are_followed() -> None:
    memory = torch.zeros(90)
    cut = memory.view(torch.int32)[:4]
    cut.copy_(torch.tensor(CUT))
    refuse("out shares memory with offsets", lambda: mg.grouped_gemm(A, B, offsets=cut, out=memory[:50].view(10, 5)))
    rows = memory.view(torch.int32)[:3]
    stack = torch.ones(3, 6, 4)
    refuse(
        "out shares memory with valid_rows",
        lambda: mg.grouped_gemm(stack, B, valid_rows=rows, out=memory.view(3, 6, 5)),
    )
    assert cut.tolist() == CUT


def test_out_must_not_lie_over_an_array_that_is_mirrored() -> None:
    memory = np.ones(100, np.float32)
    a, out = memory[:40].reshape(10, 4)[::-1], memory[30:80].reshape(10, 5)
    refuse("out shares memory with a", lambda: mg.grouped_gemm(a, B.numpy(), offsets=CUT, out=out))
    assert mg.grouped_gemm(A.numpy(), B.numpy(), offsets=CUT, c=out[::-1], beta=0, out=out) is out  # reads no c
    refuse("with c", lambda: mg.grouped_gemm(A.numpy(), B.numpy(), offsets=CUT, c=out[::-1], out=out, beta=1.0))


def test_many_outputs_are_compared_in_reasonable_time() -> None:
    count = 400
    mats = [torch.ones(4, 4) for _ in range(count)]
    outs = list(torch.ones(4, 4 * count).tensor_split(count, 1))
    start = time.process_time()
    mg.GroupedGemmProblem(mats, mats, out=outs, c=outs, beta=1.0)
    mg.GroupedGemmProblem(mats, [torch.ones(4, 4)] * count, out=[x.clone() for x in mats])
    assert time.process_time() - start < 2  # it took 8 s when each output met each input


def test_one_c_for_two_outputs_in_place() -> None:
    c = [torch.ones(10, 10), torch.ones(10, 10)]
    refuse(
        r"out\[0\] shares memory with c\[1\]", lambda: mg.grouped_gemm([A] * 2, [A.T] * 2, c=[c[0]] * 2, out=c, beta=1)
    )


BLOCKS = st.builds(
    lambda rows, cols, pitch, at: MEMORY.as_strided((rows, cols), (pitch, 1), at),
    st.integers(0, 5), st.integers(0, 6), st.sampled_from([7, 8, 8, 8]), st.integers(0, 40),
)  # fmt: skip


def _cells(x: torch.Tensor) -> set[int]:
    first = (x.data_ptr() - MEMORY.data_ptr()) // 4
    return {first + i * x.stride(0) + j for i, j in product(range(x.shape[0]), range(x.shape[1]))}


@given(st.lists(BLOCKS, max_size=5), st.lists(BLOCKS, max_size=5))
def test_meetings_are_exact_for_blocks_of_one_matrix(outs: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    want = {(i, j) for i, x in enumerate(outs) for j, y in enumerate(others) if _cells(x) & _cells(y)}
    assert set(meetings(outs, others)) == want
