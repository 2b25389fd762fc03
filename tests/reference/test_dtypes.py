"""The reference's rounding: once, to nearest, ties to even, in every format."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multigemm.reference import dtypes
from tests.support.numpy_tensors import to_torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def round_slowly(x: float, dtype: torch.dtype) -> float:
    """The textbook definition in rational arithmetic."""
    if not np.isfinite(x) or x == 0:
        return x
    p, low = dtypes.SIGNIFICAND[dtype], {torch.float16: -14}.get(dtype, -126)
    exponent = max(int(np.frexp(x)[1]) - 1, low)
    quantum = Fraction(2) ** (exponent - p + 1)
    rounded = round(Fraction(x) / quantum) * quantum  # Python rounds halves to even
    return float(rounded) if abs(rounded) <= dtypes.largest(dtype) else float(np.copysign(np.inf, x))


@pytest.mark.parametrize("dtype", FLOATS)
@given(x=st.one_of(st.floats(width=64), st.floats(-70000, 70000), st.floats(-1e-4, 1e-4)))
def test_one_rounding_is_the_textbook_one(dtype: Any, x: Any) -> None:
    got = float(dtypes.round_once(np.array([x]), dtype)[0])
    wanted = round_slowly(x, dtype)
    assert got == wanted or (np.isnan(got) and np.isnan(wanted))


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_and_their_neighbours(dtype: Any) -> None:
    p = dtypes.SIGNIFICAND[dtype]
    bases = np.array([1.0, 1.5, 3.0, 2.0**-14, 2.0**-20, 1000.0])
    tie = bases * (1 + 2.0**-p)
    values = np.concatenate([tie, tie * (1 + 2.0**-50), tie * (1 - 2.0**-50), -tie])
    got = dtypes.round_once(values, dtype).astype(np.float64)
    np.testing.assert_array_equal(got, [round_slowly(float(v), dtype) for v in values])


def test_the_trap_that_double_rounding_falls_into() -> None:
    value = np.array([1 + 2.0**-8 + 2.0**-40])
    assert float(dtypes.round_once(value, torch.bfloat16)[0]) == 1.0078125
    assert float(torch.from_numpy(value).to(torch.bfloat16)) == 1.0, (
        "torch rounds once now: the module's reason is gone"
    )


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 60, reason="longdouble is no wider than float64 here")
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_longdouble_is_rounded_once_too(dtype: Any) -> None:
    p = dtypes.SIGNIFICAND[dtype]
    just_above = np.array([1], np.longdouble) + np.longdouble(2.0) ** -p + np.longdouble(2.0) ** -62
    assert float(dtypes.round_once(just_above, dtype)[0]) == 1 + 2.0 ** (1 - p)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_value_survives_the_way_there_and_back(dtype: Any) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    if dtype == torch.float32:
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        values = bits.view(dtypes.numpy_dtype(dtype))
    with np.errstate(invalid="ignore"):
        exact = values.astype(np.float64)
        again = dtypes.round_once(exact, dtype).astype(np.float64)
    np.testing.assert_array_equal(again, exact)
    kept = dtypes.to_numpy(to_torch(values))
    np.testing.assert_array_equal(kept.view(np.uint8), values.view(np.uint8))


def test_ulp_is_the_distance_of_neighbours() -> None:
    for dtype, kind in ((torch.float16, np.float16), (torch.float32, np.float32), (torch.float64, np.float64)):
        values = np.array([1.0, 1.9, 2.0, 1e-3, 0.0, 6e-8, -5.0, 60000.0]).astype(kind)
        np.testing.assert_array_equal(dtypes.ulp(values, dtype), np.spacing(np.abs(values)).astype(np.float64))
    assert dtypes.ulp(np.array([1.0]), torch.bfloat16)[0] == 2.0**-7


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[:1].expand(3, 6)])
def test_strided_tensors_become_the_same_values(view: Any) -> None:
    tensor = view(torch.arange(18.0).reshape(3, 6).to(torch.bfloat16))
    np.testing.assert_array_equal(dtypes.to_numpy(tensor).astype(np.float32), tensor.float().numpy())


def test_integers_wrap() -> None:
    assert dtypes.round_once(np.array([2**31 + 5]), torch.int32)[0] == -(2**31) + 5


def test_units_and_largest_numbers() -> None:
    assert dtypes.unit(torch.int8) == 0.0 and dtypes.unit(torch.float16) == 2.0**-11
    assert dtypes.largest(torch.int8) == 127
