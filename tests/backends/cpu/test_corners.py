"""The corners of the contract on the cpu backend: what must be zero, untouched, or right all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backend import Backend
from multigemm.backends.cpu import BACKEND
from multigemm.backends.cpu.epilogue import store
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import Operands
from multigemm.problem.spec import FORMS
from tests.support.cpu_cases import CPU, Case, assert_right, build, filler, groups_of, kernels, run


def every(case: Case) -> Iterator[tuple[Operands, Any]]:
    """Fresh operands for each config that this spec has."""
    for config in kernels(build(case)):
        yield build(case), config


def outs(ops: Operands) -> list[torch.Tensor]:
    return ops.out if isinstance(ops.out, list) else [ops.out]


def test_it_is_a_backend_that_refuses_other_devices() -> None:
    spec = build(Case("batched")).spec
    assert isinstance(BACKEND, Backend)
    assert BACKEND.availability().ok
    assert BACKEND.not_supported_reasons(spec, CPU) == []
    assert "cuda:0" in BACKEND.not_supported_reasons(spec, torch.device("cuda", 0))[0]
    with pytest.raises(InvalidSetting, match="Config"):
        BACKEND.plan(spec, 3, CPU)


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_unowned_elements(form: str, dtype: torch.dtype) -> None:
    for zero in (True, False):
        for ops, config in every(Case(form, dtype, head=4, tail=3, zero_unowned=zero)):
            run(ops, config)
            assert_right(ops)
            owned = torch.zeros(ops.out.shape, dtype=torch.bool)  # type: ignore[union-attr]
            for *_, out, _, _ in groups_of(replace(ops, out=owned)):
                out[...] = True
            out = outs(ops)[0]
            assert bool(out[~owned].eq(0 if zero else filler(out.dtype)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
@pytest.mark.parametrize("form", FORMS)
def test_zero_sizes(form: str, dtype: torch.dtype) -> None:
    for change in ({"k": 0}, {"m": 0}, {"n": 0}, {"sizes": ()}, {"sizes": (0, 0)}, {"sizes": (0, 3, 0)}):
        for epilogue in ({}, {"beta": 2.0, "bias": "group", "activation": "relu"}):
            for ops, config in every(Case(form, dtype, head=1, tail=1, **change, **epilogue)):  # type: ignore[arg-type]
                run(ops, config)
                assert_right(ops)
                assert not any(bool((out == filler(out.dtype)).any()) for out in outs(ops))


@pytest.mark.parametrize("ends", [[5, 3, 8], [99, -4, 7], [-9, -9, -9], [9, 1, 3], [4, 4, 4], [2**31 - 1, 0, 1]])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k"])
def test_offsets_that_lie_stay_inside(form: str, ends: list[int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for ops, config in every(Case(form, dtype, sizes=(3, 2, 4), alpha=2.0, bias="row")):
            assert ops.ends is not None
            ops.ends.copy_(torch.tensor(ends))
            run(ops, config)
            assert not any(bool((out == filler(out.dtype)).any()) for out in outs(ops))


def test_valid_rows_that_lie_are_clamped() -> None:
    for ops, config in every(Case("masked", sizes=(3, 2, 4))):
        assert ops.valid_rows is not None
        ops.valid_rows.copy_(torch.tensor([-5, 1000, 2]))
        run(ops, config)
        ops.valid_rows.copy_(torch.tensor([0, 6, 2]))
        assert_right(ops)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "masked"])
def test_contents_changed_in_place_are_seen(form: str, dtype: torch.dtype) -> None:
    for ops, config in every(Case(form, dtype, sizes=(3, 20, 4, 9), bias="group")):
        launch = BACKEND.plan(ops.spec, config, CPU).bind(ops)
        for sizes in ((3, 20, 4, 9), (0, 0, 30, 1), (36, 0, 0, 0), (3, 20, 4, 9)):
            for operand in (ops.a, ops.b):
                operand.copy_(torch.randn(operand.shape))  # type: ignore[union-attr]
            _resize(ops, sizes)
            launch()
            assert_right(ops)


def _resize(ops: Operands, sizes: tuple[int, ...]) -> None:
    if ops.valid_rows is not None:
        ops.valid_rows.copy_(torch.tensor(sizes).clamp(max=22))
    else:
        assert ops.ends is not None
        ops.ends.copy_(torch.tensor(sizes).cumsum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_strides_of_every_kind(form: str, dtype: torch.dtype) -> None:
    for kind in ("zero", "sliced", "odd_base", "size_one"):
        case = Case(form, dtype, n=1, k=1) if kind == "size_one" else Case(form, dtype)
        for ops, config in every(case):
            for name in ("a", "b", "out"):
                operand = getattr(ops, name)
                change = [_restrided(x, kind, name) for x in operand] if isinstance(operand, list) else None
                setattr(ops, name, change or _restrided(operand, kind, name))
            assert_right(run(ops, config))


def _restrided(x: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    if kind == "zero" and name != "out":
        return x[..., :1].expand(x.shape) if name == "a" else x[..., :1, :].expand(x.shape)
    if kind == "sliced":
        return torch.zeros((*x.shape[:-1], 2 * x.shape[-1] + 3), dtype=x.dtype)[..., 1 : 1 + 2 * x.shape[-1] : 2].copy_(
            x
        )
    if kind == "odd_base":
        return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    if kind == "size_one" and x.numel() and x.shape[-1] == 1:
        return x.as_strided(x.shape, (*x.stride()[:-1], 2**40))
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_accumulates_in_place(form: str, dtype: torch.dtype) -> None:
    for ops, config in every(Case(form, dtype, beta=1.0, zero_unowned=False)):
        before = build(Case(form, dtype, beta=1.0, zero_unowned=False))
        ops.out = ops.c  # type: ignore[assignment]
        run(ops, config)
        before.out = ops.out
        assert_right(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("k", [20, 33, 100])
def test_special_values_stay_in_their_rows_and_columns(dtype: torch.dtype, value: float, k: int) -> None:
    for sizes in ((5, 0, 17, 1, 8), tuple([3, 1, 0, 7] * 20), (40, 50, 33)):
        for ops, config in every(Case("jagged_m", dtype, sizes=sizes, head=2, tail=2, k=k, n=40)):
            for row in (4, 0, -1):
                ops.a[row].fill_(value)
            ops.b[2][0, 5], ops.b[1][...] = value, value
            run(ops, config)
            _assert_finite_where_due(ops)


def _among_nans(x: torch.Tensor) -> torch.Tensor:
    """The same matrix as part of a larger one that holds NaN everywhere else."""
    rows, cols = x.shape[-2:]
    column_major = x.stride(-2) == 1
    shape = (*x.shape[:-2], cols, rows + 40) if column_major else (*x.shape[:-1], cols + 40)
    wide = torch.full(shape, float("nan"), dtype=x.dtype)
    part = wide[..., :rows].transpose(-1, -2) if column_major else wide[..., :cols]
    return part.copy_(x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab", "o"])
def test_rows_and_columns_never_meet(form: str, transposed: str) -> None:
    """A vector unit that reads K in steps may read into the next row: its infinities must not get out."""
    for shared in (False, True) if form in ("jagged_m", "jagged_n") else (False,):
        sizes = (40, 50, 33)
        case = Case(form, torch.bfloat16, sizes=sizes, m=40, n=40, k=33, transposed=transposed, shared=shared)
        for ops, config in every(case):
            for g, (a, *_) in enumerate(groups_of(ops)):
                a[7 + g].fill_(float("inf"))
            run(ops, config)
            _assert_finite_where_due(ops)
        for ops, config in every(case):
            for name in ("a", "b"):
                x = getattr(ops, name)
                setattr(ops, name, [_among_nans(y) for y in x] if isinstance(x, list) else _among_nans(x))
            run(ops, config)
            _assert_finite_where_due(ops)


def _assert_finite_where_due(ops: Operands) -> None:
    for g, (a, b, out, _, _) in enumerate(groups_of(ops)):
        finite = a.isfinite().all(1)[:, None] & b.isfinite().all(0)[None]
        assert bool(out.isfinite().eq(finite).all()), f"group {g}"


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_of_special_values(activation: str) -> None:
    specials = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e30, -1e30])
    ops = build(Case("batched", sizes=(1,), m=1, n=7, k=0, bias="row", activation=activation))
    ops.bias.copy_(specials)  # type: ignore[union-attr]
    run(ops)
    f = torch.nn.functional
    want = f.gelu(specials, approximate="tanh") if activation == "gelu_tanh" else getattr(f, activation)(specials)
    want[1] = float("inf")
    torch.testing.assert_close(outs(ops)[0][0, 0], want, rtol=0, atol=0, equal_nan=True)


def test_beta_zero_and_alpha_zero_read_nothing() -> None:
    for ops, config in every(Case("jagged_m", alpha=0.0, bias="row")):
        ops.a.fill_(float("nan"))  # type: ignore[union-attr]
        ops.b.fill_(float("inf"))  # type: ignore[union-attr]
        assert_right(run(ops, config))


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_float64_rounds_once(narrow: torch.dtype) -> None:
    bits = -8 if narrow == torch.bfloat16 else -11
    above, below = 1 + 2.0**bits + 2.0**-40, 1 + 3 * 2.0**bits - 2.0**-40
    x = torch.tensor([above, below, -above, 1e300, -1e300, 1e-300, 0.0, float("inf"), float("nan"), 1 + 2.0**bits],
                     dtype=torch.float64)  # fmt: skip
    out = torch.empty(10, dtype=narrow)
    store(x, out)
    inf, step = float("inf"), 2 * 2.0**bits
    want = [1 + step, 1 + step, -1 - step, inf, -inf, 0.0, 0.0, inf, float("nan"), 1.0]
    torch.testing.assert_close(out.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)
    gen = torch.Generator().manual_seed(0)
    many = torch.randn(4096, generator=gen, dtype=torch.float64) * torch.logspace(-9, 5, 4096, dtype=torch.float64)
    rounded = torch.empty(4096, dtype=torch.float16)
    store(many, rounded)
    with np.errstate(over="ignore"):
        assert np.array_equal(rounded.numpy(), many.numpy().astype(np.float16))


GLOBAL_SWITCHES: dict[str, Callable[[], object]] = {
    "matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
}


@contextmanager
def switched(switch: str) -> Iterator[None]:
    GLOBAL_SWITCHES[switch]()
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("switch", GLOBAL_SWITCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_global_switches_change_nothing(switch: str, dtype: torch.dtype) -> None:
    for sizes in ((64, 64, 64), (100, 7, 61)):
        case = Case("jagged_m", dtype, sizes=sizes, n=64, k=128)
        for (ops, config), (other, _) in zip(every(case), every(case), strict=True):
            run(ops, config)
            launch = BACKEND.plan(other.spec, config, CPU).bind(other)
            with switched(switch):
                BACKEND.plan(other.spec, config, CPU).bind(other)()
                launch()
            if switch == "matmul_precision" and config.kernel == "blas":
                assert_right(other)  # by the loop, which may add up in another order
            else:
                assert torch.equal(ops.out, other.out)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_operands_beyond_31_bits_are_not_copied_for_a_few_of_their_elements(dtype: torch.dtype) -> None:
    """A copy would take 8 to 34 GB; these operands hold one element."""
    total = 2**31 + 5
    one = torch.ones(1, 1, dtype=dtype)
    a, b = one.expand(2, total), one.expand(total, 3)
    out = mg.grouped_gemm(a, b, offsets=[total - 7, total - 3, total], jagged="k", backend="cpu")
    assert out[:, 0, 0].tolist() == [4, 3]


def test_autocast_and_gradients_are_left_alone() -> None:
    for ops, config in every(Case("jagged_m", sizes=(64, 64), n=64, k=64, bias="group", activation="silu")):
        for operand in (ops.a, ops.b, ops.bias):
            operand.requires_grad_()  # type: ignore[union-attr]
        with torch.autocast("cpu", torch.bfloat16):
            run(ops, config)
        assert not ops.out.requires_grad  # type: ignore[union-attr]
        for operand in (ops.a, ops.b, ops.bias):
            operand.requires_grad_(False)  # type: ignore[union-attr]
        assert_right(ops)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        made = [(build(Case("jagged_m", dtype)), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for ops, _ in made:
        assert_right(run(ops))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_call_same_bits(dtype: torch.dtype) -> None:
    case = Case("jagged_m", dtype, sizes=(70, 3, 129, 16), n=96, k=200, bias="row", activation="gelu")
    for ops, config in every(case):
        first = run(ops, config).out.clone()  # type: ignore[union-attr]
        for _ in range(3):
            assert torch.equal(run(build(case), config).out, first)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_two_bound_problems_share_nothing(dtype: torch.dtype) -> None:
    for (one, config), (two, _) in zip(every(Case("jagged_m", dtype, beta=1.0)),
                                       every(Case("jagged_m", dtype, beta=1.0, seed=9)), strict=True):  # fmt: skip
        recipe = BACKEND.plan(one.spec, config, CPU)
        launch_one, launch_two = recipe.bind(one), recipe.bind(two)
        for launch in (launch_one, launch_two, launch_one):
            launch()
        assert_right(one)
        assert_right(two)


def test_threads() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for dtype in (torch.float32, torch.bfloat16):
                for ops, config in every(Case("jagged_m", dtype, sizes=(30, 0, 2, 64, 5) * 4, n=40, seed=seed)):
                    launch = BACKEND.plan(ops.spec, config, CPU).bind(ops)
                    for _ in range(10):
                        outs(ops)[0].fill_(filler(outs(ops)[0].dtype))
                        launch()
                        assert_right(ops)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_threads_of_torch_are_left_alone() -> None:
    before = torch.get_num_threads()
    for ops, config in every(Case("jagged_m", sizes=(9,) * 70)):
        run(ops, config)
    assert torch.get_num_threads() == before
