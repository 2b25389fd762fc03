"""Odd input at every door of the core: refused by name, and never by a traceback from below."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import multigemm as mg
from multigemm.backends.cpu.config import Config as CpuConfig
from multigemm.planning.staging import stage, staged_spec
from multigemm.problem.overlap import meetings
from tests.support.fake_backends import Fake, Tile

A, B = torch.ones(10, 4), torch.ones(3, 4, 5)
CUT = [0, 2, 5, 10]
UNTYPED: Any = CpuConfig
UNTYPED_TILE: Any = Tile


def refuse(match: str, call: Callable[[], object]) -> None:
    with pytest.raises(mg.InvalidProblem, match=match):
        call()


class Foreign:
    """An array of a library whose interface fails."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


class FailingDlpack:
    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("it is read-only")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _on_no_device() -> Foreign:
    return Foreign(__cuda_array_interface__={"shape": (10, 4), "typestr": "<f4", "data": (4096, False), "version": 3})


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (FailingDlpack(), "BufferError: it is read-only"),
        (Foreign(__dlpack__=None), "whose __dlpack__ torch cannot take"),
        (torch.Tensor, "not an array"),
        (np.ma.masked_array(A.numpy(), mask=True), "masked array"),
        (np.zeros((10, 4), "V0"), "torch cannot hold"),
    ],
)
def test_arrays_that_are_none_for_a_product(x: Any, match: str) -> None:
    refuse(match, lambda: mg.GroupedGemmProblem(x, B, offsets=CUT))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([A, A], layout=layout)
    refuse("a is a nested tensor: pass its matrices as a list", lambda: mg.grouped_gemm(nested, B, offsets=CUT))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_a_device_array_without_a_device() -> None:
    refuse("torch sees no CUDA device here", lambda: mg.GroupedGemmProblem(_on_no_device(), B, offsets=CUT))


def test_tensors_without_memory() -> None:
    with FakeTensorMode():
        fake = torch.empty(10, 4)
    refuse("FakeTensor without memory", lambda: mg.grouped_gemm(fake, B, offsets=CUT))
    refuse("under vmap", lambda: torch.vmap(lambda x: mg.grouped_gemm(x, B, offsets=CUT))(A.expand(2, 10, 4)))


@pytest.mark.parametrize("first", [0, 1])
def test_tensors_whose_memory_was_freed(first: int) -> None:
    """As sharded training does with the weights that a layer does not need now."""
    whole = torch.ones(41)
    freed, row, none = whole[first:][:40].view(10, 4), whole[first:][:5], whole[first:][:0].view(0, 4)
    whole.untyped_storage().resize_(0)
    refuse("a has 40 elements and its memory was freed", lambda: mg.grouped_gemm(freed, B, offsets=CUT))
    refuse("bias has 5 elements", lambda: mg.grouped_gemm(A, B, offsets=CUT, bias=row))
    refuse(r"b\[0\] has 40 elements", lambda: mg.grouped_gemm([A.T], [freed]))
    assert mg.grouped_gemm(none, B, sizes=[0, 0, 0]).shape == (0, 5)


def test_forward_mode_tangents_are_not_lost_silently() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(B, torch.ones_like(B))  # type: ignore[no-untyped-call]
        refuse("b carries a forward-mode tangent", lambda: mg.grouped_gemm(A, dual, offsets=CUT))
        refuse(r"a\[0\] carries", lambda: mg.plan(mg.GroupedGemmProblem([dual[0]], [A.T])))
        assert mg.grouped_gemm(A, B, offsets=CUT).shape == (10, 5)


@pytest.mark.parametrize("alpha", [10**400, Fraction(10**400)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_numbers_beyond_float64(alpha: Any, dtype: torch.dtype) -> None:
    refuse(
        "alpha is a .* beyond the range", lambda: mg.grouped_gemm(A.to(dtype), B.to(dtype), offsets=CUT, alpha=alpha)
    )


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("x", [3.5e38, -1e300, 10**39])
def test_numbers_beyond_the_accumulator(name: str, x: float) -> None:
    """In float32 they would be infinite, and 0 times them NaN."""
    a, c = torch.zeros(10, 4), torch.zeros(10, 5)
    keywords: Any = {name: x}
    refuse(f"{name}=.* multiplies in float32", lambda: mg.grouped_gemm(a, B, offsets=CUT, c=c, **keywords))
    exact = mg.grouped_gemm(a.double(), B.double(), offsets=CUT, c=c.double(), **keywords)
    assert (exact == 0).all()


@pytest.mark.parametrize("word", ["activation", "precision", "check", "jagged"])
@pytest.mark.parametrize("x", [np.array([1, 2]), ["m"], {}, 3, b"relu"])
def test_words_that_are_no_text(word: str, x: Any) -> None:
    keywords: Any = {word: x}
    refuse(f"{word}=", lambda: mg.GroupedGemmProblem(A, B, offsets=CUT, **keywords))


def test_a_direction_needs_a_cut() -> None:
    refuse("jagged='k' without a cut", lambda: mg.grouped_gemm(A, torch.ones(4, 5), jagged="k"))
    refuse("jagged='n' without", lambda: mg.grouped_gemm(B, B.mT, jagged="n", valid_rows=[1, 1, 1]))


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        (memoryview(bytes(32)).cast("q", [2, 2]), "2 dimensions"),
        (bytearray(CUT), "is text"),
        ([torch.tensor(False), 2, 5, 10], r"holds tensor\(False\)"),
        (np.ma.masked_array(np.array(CUT), mask=False), "masked array"),
    ],
)
def test_offsets_of_other_kinds(offsets: Any, match: str) -> None:
    refuse(match, lambda: mg.GroupedGemmProblem(A, B, offsets=offsets))


@pytest.mark.parametrize("x", [torch.ones(1), {}, ("f4", (2,)), object])
def test_out_dtypes_that_are_none(x: Any) -> None:
    refuse("is not a dtype", lambda: mg.GroupedGemmProblem(A, B, offsets=CUT, out_dtype=x))


# --- outputs ----------------------------------------------------------------------------------------


def test_out_that_requires_grad_is_refused() -> None:
    out = torch.zeros(10, 5, requires_grad=True)
    refuse("out requires grad", lambda: mg.grouped_gemm(A, B, offsets=CUT, out=out))
    assert not out.any()
    with torch.no_grad():
        assert mg.grouped_gemm(A, B, offsets=CUT, out=out) is out
    assert out.eq(4).all()


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
    assert mg.grouped_gemm(A.numpy(), B.numpy(), offsets=CUT, c=out[::-1], out=out) is out  # beta=0 reads no c
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


MEMORY = torch.zeros(400)
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


# --- plans and choice -------------------------------------------------------------------------------


def test_a_plan_does_not_lose_a_gradient_of_another_problem() -> None:
    plan = mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT))
    other = mg.GroupedGemmProblem(A.clone().requires_grad_(), B, offsets=CUT)
    refuse("a plan has no gradient", lambda: plan.run(other))


def test_a_plan_is_for_one_device() -> None:
    plan, other = (mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT)), mg.GroupedGemmProblem(A, B, offsets=CUT))
    other.device = torch.device("cuda", 1)
    refuse("this plan is for cpu and the problem is on cuda:1", lambda: plan.run(other))


@pytest.mark.parametrize("call", [mg.solve, mg.plan, mg.explain, mg.expected, lambda x: mg.verify(x, A)])
@pytest.mark.parametrize("x", [None, A, "text"])
def test_what_is_no_problem(call: Any, x: Any) -> None:
    refuse("problem is a", lambda: call(x))
    refuse("problem is a", lambda: mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT)).run(x))


@pytest.mark.parametrize(
    "name", [None, 5, [], [1], [["cpu"]], b"cpu", "cpuu", "", ["nope", "cpu"], {"cpu"}, torch.ones(1)]
)
def test_backends_that_do_not_exist_are_bad_input_and_bad_settings(name: Any) -> None:
    with pytest.raises(mg.UnknownBackend) as caught:
        mg.grouped_gemm(A, B, offsets=CUT, backend=name)
    assert isinstance(caught.value, mg.InvalidProblem)
    assert isinstance(caught.value, mg.InvalidSetting)


@pytest.mark.parametrize(
    "config",
    [
        [1], {"kernel": ["x"]}, {1: 2, "a": 3}, 3, "x", {"kernel": "nonsense"}, {"kernel": 5}, UNTYPED(5),
        {"size": "2"}, {"size": 2.0}, {"size": True}, UNTYPED_TILE("2"), UNTYPED_TILE(2.5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["cpu", "fake"])
def test_configs_of_a_wrong_kind(backend: str, config: Any, install: Callable[..., None]) -> None:
    if backend == "fake":
        install(Fake("fake"))
    with pytest.raises(mg.InvalidSetting, match=r"config|Config"):
        mg.grouped_gemm(A, B, offsets=CUT, backend=backend, config=config)


@pytest.mark.parametrize(
    "error",
    [
        mg.BackendUnsupported({"x": ["K is 3", "N is 4"]}),
        mg.BackendUnavailable("x", "no GPU"),
        mg.UnknownBackend("unknown backend 'y'"),
        mg.InvalidProblem("a is bad"),
    ],
)
def test_exceptions_travel_between_processes(error: mg.MultigemmError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_cast_of_repeated_elements_is_as_wide_as_its_copy() -> None:
    a = torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(2, 2**15, 2**16)
    problem = mg.GroupedGemmProblem(a, torch.zeros(1, 1, 1, dtype=torch.float16).expand(2, 2**16, 1))
    assert not problem.spec.a.wide
    assert staged_spec(problem).a.wide


def test_an_index_beyond_32_bits_is_wide_without_a_distance() -> None:
    ones = torch.ones(1, 1).expand(1, 2**31)
    problem = mg.GroupedGemmProblem(ones, ones.T, sizes=[3, 5], jagged="k")
    assert problem.spec.a.wide
    assert problem.spec.b.wide
    assert not mg.GroupedGemmProblem(ones[:, 1:], ones.T[1:], sizes=[3, 5], jagged="k").spec.a.wide


@pytest.mark.parametrize(("last", "index"), [(10, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64)])
def test_host_sizes_are_of_the_type_that_device_sizes_are_as_a_rule(last: int, index: torch.dtype) -> None:
    """A kernel is compiled for one type: that of the sizes on a device serves those of the host too."""
    rows, weights = torch.ones(1, 4).expand(2**31 + 5, 4), torch.ones(2, 4, 5)
    for cut in ({"offsets": [1, 3, last]}, {"sizes": [3, last - 3]}, {"ends": np.array([3, last])}):
        problem = mg.GroupedGemmProblem(rows, weights, **cut)
        staged = stage(problem, problem.spec, torch.empty(0)).ops
        assert isinstance(staged.ends, torch.Tensor) and staged.host_offsets is not None
        assert problem.spec.index is staged.ends.dtype is index
        assert staged.host_offsets.dtype == np.int64 and staged.ends[-1] == staged.host_offsets[-1] == last
    masked = mg.GroupedGemmProblem(torch.ones(2, 3, 4), weights, valid_rows=[0, 3])
    valid = stage(masked, masked.spec, torch.empty(0)).ops.valid_rows
    assert isinstance(valid, torch.Tensor) and valid.dtype is masked.spec.index is torch.int32


# --- text and views ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        mg.GroupedGemmProblem(A, B, offsets=CUT, alpha=-1e-30, c=torch.ones(10, 5), beta=float(np.float32(0.1))),
        mg.GroupedGemmProblem(A, B, offsets=torch.tensor(CUT)),
        mg.GroupedGemmProblem(A, B, ends=torch.tensor([2, 9, 5, 9, 10, 9], dtype=torch.int32)[::2]),
        mg.GroupedGemmProblem(torch.ones(3, 2, 4), B, valid_rows=torch.tensor([0, 2, 1])),
        mg.GroupedGemmProblem(torch.ones(41)[1:].view(10, 4), B, offsets=CUT),
        mg.GroupedGemmProblem(torch.ones(0, 4, 6)[:, :, :3], torch.ones(0, 5, 3).mT),
        mg.GroupedGemmProblem([torch.ones(49)[3:].view(2, 23)[:, :4]], [torch.ones(14)[2:].view(4, 3)[:, :2]]),
    ],
)  # fmt: skip
def test_repr_can_be_pasted_back_whatever_it_holds(problem: mg.GroupedGemmProblem) -> None:
    again = eval(f"mg.{problem!r}", {"mg": mg, "torch": torch})
    assert again.spec == problem.spec
    assert repr(again) == repr(problem)


def test_views_of_mirrored_arrays_are_fresh() -> None:
    a = np.ones((10, 4))
    problem = mg.GroupedGemmProblem(a[::-1], np.ones((3, 4, 5)), offsets=CUT)
    a[...] = 2
    assert (mg.expected(problem) == 8).all()
    assert mg.verify(problem, mg.solve(problem)).ok


# --- plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_plan_cannot_be_copied_and_says_so(copied: Callable[[Any], Any]) -> None:
    plan = mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT))
    with pytest.raises(mg.MultigemmError, match="bound to memory and cannot be copied: make another"):
        copied(plan)
