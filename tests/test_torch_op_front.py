"""The short way before torch's dispatcher: taken where a call comes again, and by nothing that means more than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import multigemm as mg
from multigemm.integrations import op_call, op_front, op_route
from multigemm.select import table as tuning
from tests.torch_op_cases import count_entries

OP = torch.ops.multigemm.grouped_gemm


@pytest.fixture(autouse=True)
def keep_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same way as on a GPU, with the CPU's memory; there, no values on the host are checked either."""
    found = op_route._route

    def unchecked(*args: Any) -> op_route.Route | None:
        route = found(*args)
        return None if route is None else replace(route, checked=False)

    monkeypatch.setattr(op_route, "_route", unchecked)
    monkeypatch.setattr(op_call, "KEEPING", ("cpu", "cuda"))
    monkeypatch.setattr(op_front, "current_device", lambda: -1)
    monkeypatch.setattr(op_call, "current_device", lambda: None)  # a CUDA build of torch would look for a driver
    monkeypatch.setattr(op_call, "empty_cuda", buffer)
    monkeypatch.setattr(op_call, "_empty", buffer)
    monkeypatch.setattr(op_call, "ends_of", lambda sizes: torch.cumsum(sizes, 0, out=_buffer(sizes.shape, torch.int64)))
    monkeypatch.setattr(op_call, "capturing_now", lambda: False)
    op_call.forget()
    yield
    op_call.forget()


@cache
def _buffer(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def buffer(shape: tuple[int, ...], strides: Any, dtype: torch.dtype, device: Any = None) -> Tensor:
    """The same memory each time, as torch's allocator has it where results are dropped."""
    return _buffer(shape, dtype).view(shape)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What came through the dispatcher."""
    return count_entries(monkeypatch)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(9, 4).to(dtype), torch.randn(3, 4, 5).to(dtype), torch.tensor([2, 2, 7])


def known(entered: list[str], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose next call takes the short way."""
    a, b, ends = operands()
    for _ in range(4):
        OP(a, b, ends=ends, **options)
    del entered[:]
    return a, b, ends


@pytest.mark.parametrize(
    "options", [{}, {"backend": "cpu"}, {"activation": "relu", "alpha": 2.0}, {"backend": "auto", "beta": 0.0}]
)
def test_a_call_that_comes_again_crosses_no_dispatcher(entered: list[str], options: dict[str, Any]) -> None:
    a, b, ends = known(entered, **options)
    for step in range(5):
        a.copy_(torch.randn(9, 4))
        ends[-1] = 3 + step
        want = mg.grouped_gemm(a, b, ends=ends.tolist(), **options)
        assert torch.equal(OP(a, b, ends=ends, **options), want)
    assert not entered


@pytest.mark.parametrize("form", ["offsets", "sizes", "batched", "masked", "jagged k", "c"])
def test_other_forms_come_again(entered: list[str], form: str) -> None:
    a, b, cut = torch.randn(3, 6, 4), torch.randn(3, 4, 5), {}
    keywords: dict[str, Any] = {}
    if form == "offsets":
        a, cut = torch.randn(9, 4), {"offsets": torch.tensor([1, 2, 2, 7])}
    elif form == "sizes":
        a, cut = torch.randn(9, 4), {"sizes": torch.tensor([1, 0, 5], dtype=torch.int32)}
    elif form == "masked":
        cut = {"valid_rows": torch.tensor([2, 0, 6])}
    elif form == "c":
        a, cut, keywords = torch.randn(9, 4), {"ends": torch.tensor([1, 2, 7])}, {"c": torch.randn(9, 5), "beta": 0.5}
    elif form == "jagged k":
        a, b, keywords = torch.randn(4, 9), torch.randn(9, 5), {"jagged": "k"}
        cut = {"ends": torch.tensor([1, 2, 2, 7])}
    for bias in (None, torch.randn(5)):
        for step in range(8):
            a.normal_()
            if step == 4:
                del entered[:]
            got = OP(a, b, bias=bias, **cut, **keywords)
            given: Any = {name: x.tolist() for name, x in cut.items()}
            assert torch.equal(got, mg.grouped_gemm(a, b, bias=bias, **given, **keywords))
        assert not entered


def test_a_bias_is_an_operand(entered: list[str]) -> None:
    a, b, ends = operands()
    for bias in (torch.ones(5), torch.ones(3, 5), torch.full((5,), 2.0), None):
        for _ in range(5):
            assert torch.equal(OP(a, b, ends=ends, bias=bias), mg.grouped_gemm(a, b, ends=[2, 2, 7], bias=bias))
        del entered[:]
        OP(a, b, ends=ends, bias=bias)
        assert not entered


def test_other_views_of_the_same_memory_are_other_calls(entered: list[str]) -> None:
    _, b, ends = operands()
    memory = torch.randn(64)
    views = [memory[:36].view(9, 4), memory[:36].view(4, 9).T, memory[:45].view(9, 5)[:, :4], memory[:32].view(8, 4)]
    for view in views * 6:
        assert torch.equal(OP(view, b, ends=ends), mg.grouped_gemm(view.clone(), b, ends=[2, 2, 7]))
    columns = b.view(3, 5, 4).transpose(1, 2)
    for other in [b, columns] * 6:
        assert torch.equal(OP(views[0], other, ends=ends), mg.grouped_gemm(views[0], other.clone(), ends=[2, 2, 7]))
    for index in [ends, ends.view(torch.int32)[::2][:3]] * 6:
        assert torch.equal(OP(views[0], b, ends=index), mg.grouped_gemm(views[0], b, ends=[2, 2, 7]))


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))


class _Dispatches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))


seen: list[Any] = []


@pytest.mark.parametrize("mode", [_Functions, _Dispatches])
def test_modes_see_the_call(entered: list[str], mode: Callable[[], AbstractContextManager[Any]]) -> None:
    a, b, ends = known(entered)
    for _ in range(5):
        del seen[:]
        with mode():
            OP(a, b, ends=ends)
        assert any(x in (OP, OP.default) for x in seen)
    del entered[:]
    OP(a, b, ends=ends)
    assert not entered


def test_gradients_flow(entered: list[str]) -> None:
    a, b, ends = operands()
    b.requires_grad_()
    for _ in range(5):
        with torch.no_grad():
            assert not OP(a, b, ends=ends).requires_grad
    del entered[:]
    with torch.no_grad():
        OP(a, b, ends=ends)
    assert not entered
    for _ in range(5):
        assert OP(a, b, ends=ends).requires_grad
        assert torch.autograd.grad(OP(a, b, ends=ends).sum(), b)[0].abs().sum() > 0


def test_autocast_casts(entered: list[str]) -> None:
    a, b, ends = known(entered)
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert OP(a, b, ends=ends).dtype is torch.bfloat16
    assert OP(a, b, ends=ends).dtype is torch.float32


def test_transforms_and_tangents_are_refused(entered: list[str]) -> None:
    a, b, ends = known(entered)
    with pytest.raises(mg.InvalidProblem, match="put the mapped dimension into the groups"):
        torch.vmap(lambda x: OP(x, b, ends=ends))(a.expand(2, 9, 4))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.ones_like(a))  # type: ignore[no-untyped-call]
        for operator in (OP, OP.default):
            with pytest.raises(mg.InvalidProblem, match="forward-mode tangent"):
                operator(dual, b, ends=ends)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: OP(x, b, ends=ends).sum())(a)


def test_tensors_without_memory_pass(entered: list[str]) -> None:
    a, b, ends = known(entered)
    assert OP(a.to("meta"), b.to("meta"), ends=ends.to("meta")).shape == (9, 5)
    with FakeTensorMode() as mode:
        assert OP(*(mode.from_tensor(x) for x in (a, b)), ends=mode.from_tensor(ends)).shape == (9, 5)
    assert torch.equal(OP(torch._neg_view(a), b, ends=ends), mg.grouped_gemm(-a, b, ends=[2, 2, 7]))


def test_profiles_name_the_operator(entered: list[str]) -> None:
    a, b, ends = known(entered)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        OP(a, b, ends=ends)
    assert any("multigemm::grouped_gemm" in event.key for event in profile.key_averages())


def test_a_new_measurement_chooses_anew(entered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, ends = known(entered)
    monkeypatch.setattr(tuning, "generation", tuning.generation + 1)
    for _ in range(4):
        OP(a, b, ends=ends)
    assert entered
    del entered[:]
    OP(a, b, ends=ends)
    assert not entered


@pytest.mark.parametrize(
    ("arguments", "keywords", "error"),
    [
        (("a", "b"), {"ends": [2, 2, 7]}, RuntimeError),
        ((None, "b"), {"ends": "ends"}, mg.InvalidProblem),
        (("a",), {}, TypeError),
        (("a", "b"), {"ends": "ends", "alpha": [1.0]}, RuntimeError),
        (("a", "b"), {"ends": "ends", "colour": "red"}, RuntimeError),
        (("a", "b"), {"ends": "ends", "offsets": "ends"}, mg.InvalidProblem),
        (("a", "b"), {"ends": "ends", "sizes": "ends"}, mg.InvalidProblem),
    ],
)
def test_bad_calls_are_refused_by_torch_or_by_the_operator(
    entered: list[str], arguments: tuple[Any, ...], keywords: dict[str, Any], error: type[Exception]
) -> None:
    given = dict(zip(["a", "b", "ends"], known(entered), strict=True))
    with pytest.raises(error):
        OP(
            *(given.get(x, x) for x in arguments),
            **{k: given.get(v, v) if type(v) is str else v for k, v in keywords.items()},
        )


def scripted(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.multigemm.grouped_gemm(a, b, ends=ends)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_scripts_know_the_operator() -> None:
    a, b, ends = operands()
    script: Any = torch.jit.script(scripted)
    assert torch.equal(script(a, b, ends), mg.grouped_gemm(a, b, ends=[2, 2, 7]))


def test_what_is_seen_is_bounded_and_forgotten(entered: list[str]) -> None:
    known(entered)
    assert op_front._seen
    op_call.launches.clear()
    assert not op_front._seen
