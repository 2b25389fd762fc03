"""`multigemm.quantize` gives the bits of the NumPy reference, and what the contract of its scales says."""

from __future__ import annotations

import importlib
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import multigemm as mg
from multigemm import quantize as torch_side
from multigemm.reference.dtypes import decode, decode_scale, to_numpy
from tests.support import quantised_by_loop as reference

OFFSETS = [3, 3, 40, 41, 170]
SCALE_DTYPES = {
    torch.float32: np.float32, torch.float8_e8m0fnu: ml_dtypes.float8_e8m0fnu, torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
}  # fmt: skip
EDGES = [
    0.0,
    -0.0,
    1e-45,
    -1e-38,
    448.0,
    449.0,
    464.0,
    465.0,
    3e38,
    -3.4e38,
    2.0**-9,
    2.0**-10,
    1.0625,
    1.1875,
    -2.5,
    5.0,
]


def operand(shape: tuple[int, ...], kind: str, seed: int = 0) -> torch.Tensor:
    """Values of one kind: ordinary, of many magnitudes, edges, or with NaN and infinities."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    if kind == "wide":
        return x * torch.exp2(torch.randint(-120, 100, shape, generator=g).float())
    if kind == "edges":
        picked = torch.randint(len(EDGES), shape, generator=g)
        return torch.tensor(EDGES)[picked]
    if kind == "zeros":
        return x * (torch.rand(shape[:-1], generator=g)[..., None] > 0.7)
    if kind == "special":
        where = torch.rand(shape, generator=g)
        return torch.where(where > 0.995, torch.nan, torch.where(where < 0.005, -torch.inf, x))
    return x


def bits(x: Any) -> np.ndarray:
    array = np.ascontiguousarray(to_numpy(x))
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])


def same(found: torch_side.Quantized, wanted: reference.Quantized) -> None:
    for name, x, y in zip(found._fields, found, wanted, strict=True):
        if x is None or y is None:
            assert x is y is None, name
            continue
        assert tuple(x.shape) == y.shape, name
        left, right = bits(x), bits(y)
        nan = np.isnan(to_numpy(x).astype(np.float32)) & np.isnan(y.astype(np.float32)) if name == "scale" else False
        assert ((left == right) | nan).all(), name


KINDS = ("normal", "wide", "edges", "zeros", "special")
LAYOUTS = (
    ("b", (2, 140, 9), "m", ""), ("a", (5, 171), "k", "k"), ("a", (171, 40), "m", "rows"),
    ("b", (40, 171), "n", "rows"), ("b", (171, 5), "k", "k"), ("a", (2, 130, 140), "m", ""), ("a", (5, 0), "m", ""),
    ("b", (33, 40), "m", ""),
)  # fmt: skip
"""Sides, shapes, and how they are cut: values of most kinds are judged in the first two."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", torch_side.GRANULARITIES)
def test_float8_gives_the_bits_of_the_reference(scale: str, format: Any, kind: str) -> None:
    for dtype in (torch.float32, torch.float8_e8m0fnu):
        for side, shape, jagged, axis in LAYOUTS if kind in ("normal", "special") else LAYOUTS[:2]:
            cut = OFFSETS if axis else None
            if axis == "rows" and scale == "128x128":
                continue
            x = operand(shape, kind, len(shape))
            found = torch_side.quantize(x, format, scale, side=side, scale_dtype=dtype, offsets=cut, jagged=jagged)  # type: ignore[arg-type]
            wanted = reference.quantize(
                x.numpy(), format, scale, side=side, scale_dtype=SCALE_DTYPES[dtype], offsets=cut, axis=axis
            )
            same(found, wanted)


@pytest.mark.usefixtures("interpreter")
def test_the_kernel_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: stacks and matrices, of every dtype and layout, with tails along both axes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels: Any = importlib.import_module("multigemm.quantize_kernels")
    pairs = (("e4m3", torch.float32), ("e5m2", torch.float8_e8m0fnu))
    wide = operand((2, 131, 140), "wide").mul(2.0**10).to(torch.bfloat16)  # subnormal ones the interpreter gets wrong
    halves = operand((1, 3, 257), "edges").clamp(-6e4, 6e4).to(torch.float16)
    given = (torch.cat([operand((1, 9, 171), kind) for kind in KINDS]), wide, wide[:1].mT, halves)
    for scale, (format, dtype), x in product(("row", "1x32", "1x128", "128x128"), pairs, given):
        wanted = torch_side.quantize(x, format, scale, scale_dtype=dtype)  # type: ignore[arg-type]
        assert kernels.takes(x, scale)
        data, grid = torch_side.blockwise(x, format, scale, "a", dtype, kernels)  # type: ignore[arg-type]
        assert torch.equal(data.view(torch.uint8), wanted.data.view(torch.uint8)), (scale, format, dtype, x.dtype)
        assert torch.equal(grid.view(torch.uint8), wanted.scale.view(torch.uint8)), (scale, format, dtype, x.dtype)
        assert data.is_contiguous()
        assert grid.is_contiguous()
    of_b = operand((2, 40, 9), "normal")
    _, grid = torch_side.blockwise(of_b.mT, "e4m3", "1x32", "b", torch.float32, kernels)
    assert torch.equal(grid.mT, torch_side.quantize(of_b, "e4m3", "1x32", side="b").scale)
    assert grid.mT.is_contiguous()


class DivisionOfCuda(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """On a GPU torch divides by a number of Python as it multiplies by the reciprocal of that number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar) and not isinstance(args[1], torch.Tensor):
            return args[0] * float(np.float32(1) / np.float32(args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "int8", "int4", "uint4", "e2m1"])
def test_a_gpu_gives_the_bits_of_the_cpu(format: Any) -> None:
    x = operand((200, 40), "normal")
    for scale in ("row", "1x32"):
        wanted = torch_side.quantize(x, format, scale, side="b", zero=format == "uint4")
        with DivisionOfCuda():  # type: ignore[no-untyped-call]
            found = torch_side.quantize(x, format, scale, side="b", zero=format == "uint4")
        assert torch.equal(found.scale, wanted.scale), scale
        assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8)), scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("format", "zero"),
    [("int8", False), ("int4", False), ("e2m1", False), ("uint4", True), ("int8", True), ("int4", True)],
)
@pytest.mark.parametrize("dtype", SCALE_DTYPES)
def test_weights_give_the_bits_of_the_reference(dtype: torch.dtype, format: Any, zero: bool, kind: str) -> None:
    for scale in torch_side.GRANULARITIES:
        x = operand((2, 140, 9), kind)
        found = torch_side.quantize(x, format, scale, side="b", scale_dtype=dtype, zero=zero)
        same(found, reference.quantize(x.numpy(), format, scale, side="b", scale_dtype=SCALE_DTYPES[dtype], zero=zero))


@pytest.mark.parametrize(("side", "shape", "jagged", "axis"), LAYOUTS)
@pytest.mark.parametrize("format", ["int8", "int4", "uint4", "e2m1"])
def test_formats_of_weights_on_both_sides(format: Any, side: Any, shape: Any, jagged: str, axis: str) -> None:
    """The bits of the reference, and back within a step, with zero points and without."""
    packs = format != "int8"
    if packs and axis == "k":
        return
    shape = tuple(n + n % 2 for n in shape) if packs else shape
    x, cut = operand(shape, "normal") + 0.5, {"offsets": OFFSETS if axis else None}
    for scale, zero in product(torch_side.GRANULARITIES, (False, True)):
        if zero != (format == "uint4") and (zero is False or format == "e2m1"):
            continue
        if axis == "rows" and scale == "128x128":
            continue
        q = torch_side.quantize(x, format, scale, side=side, zero=zero, jagged=jagged, **cut)
        same(q, reference.quantize(x.numpy(), format, scale, side=side, zero=zero, axis=axis, **cut))
        back = torch_side.dequantize(q, side=side, format=format, jagged=jagged, **cut)
        assert back.shape == x.shape
        if not axis and x.numel():
            step = 2 * q.scale.max() if format == "e2m1" else 0.501 * q.scale.max()
            assert (back - x).abs().max() <= step


def test_zero_points_use_all_codes() -> None:
    """Of values on one side of zero, and the products are those of NumPy."""
    w, a = torch.rand(3, 64, 40) + 1, torch.randn(9, 64).bfloat16()
    for format, least, most, packed in (("int8", -128, 127, None), ("int4", -8, 7, "int4"), ("uint4", 0, 15, "uint4")):
        q = torch_side.quantize(w, format, "row", side="b", zero=True)  # type: ignore[arg-type]
        codes = torch_side.decode(q.data, packed or "")
        assert (codes.amax(1) == most).all() and (q.zero == least).all()
        assert q.zero.dtype is (torch.uint8 if format == "uint4" else torch.int8)
        exact = (decode(q.data, packed or "") - q.zero.double().numpy()) * q.scale.double().numpy()
        np.testing.assert_allclose(torch_side.dequantize(q, side="b", format=format), exact, rtol=1e-6)  # type: ignore[arg-type]
        y = mg.grouped_gemm(
            a, q.data, sizes=[2, 0, 7], scale_b=q.scale, zero_b=q.zero, b_format=packed, out_dtype=torch.float32
        )
        wide = a.double().numpy()
        wanted = np.concatenate([wide[:2] @ exact[0], wide[2:] @ exact[2]])
        np.testing.assert_allclose(y.numpy(), wanted, rtol=2**-8, atol=0.1)


def test_scales_end_at_the_smallest_normal_number() -> None:
    tiny = 2.0**-126
    x = torch.tensor([[100.0, 1.0, 0.51, 0.5, -0.49]]) * tiny
    q = torch_side.quantize(x, "int8", "row")
    assert q.scale.item() == tiny and q.data.tolist() == [[100, 1, 1, 0, 0]]


def test_sizes_on_the_device_are_as_good_as_offsets() -> None:
    x = operand((20, 301), "normal")
    wanted = torch_side.quantize(x, "e4m3", "1x32", offsets=[0, 40, 40, 300], jagged="k")
    ends = torch.tensor([40, 40, 300], dtype=torch.int32)
    cuts: tuple[dict[str, Any], ...] = ({"sizes": torch.tensor([40, 0, 260])}, {"ends": ends})
    for cut in cuts:
        found = torch_side.quantize(x, "e4m3", "1x32", jagged="k", **cut)
        assert torch.equal(found.scale, wanted.scale)
        assert torch.equal(found.data.view(torch.uint8), wanted.data.view(torch.uint8))


def test_every_code_means_the_same_on_both_sides() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        np.testing.assert_array_equal(torch_side.decode(codes.view(dtype)).numpy(), decode(codes.view(dtype)))
    scales = codes.view(torch.float8_e8m0fnu)
    found = torch_side.decode_scale(scales)
    np.testing.assert_array_equal(found.numpy(), decode_scale(scales))
    assert found[0] == 2.0**-127
    assert found.view(torch.int32)[255] == 0x7FC00000
    pairs = codes[:, None]
    for packed in ("int4", "uint4", "e2m1"):
        np.testing.assert_array_equal(torch_side.decode(pairs, packed).numpy(), decode(pairs, packed))
    assert torch_side.decode(torch.tensor([[0x8F]], dtype=torch.uint8), "int4").flatten().tolist() == [-1, -8]
    assert torch_side.decode(torch.tensor([[0x7A]], dtype=torch.uint8), "e2m1").flatten().tolist() == [-1, 6]


def test_what_no_format_holds() -> None:
    x = torch.tensor([[1.0, torch.nan, -torch.inf, 2.0]])
    q = torch_side.quantize(x, "e4m3", "row")
    assert q.data.float()[0, 1:3].isnan().all()
    assert torch.equal(torch_side.dequantize(q, side="a")[0, [0, 3]], torch.tensor([1.0, 2.0]))
    packed = torch_side.quantize(torch.cat([x, torch.ones(1, 4)]), "int4", "row", side="b")
    assert packed.scale.isnan().tolist() == [[False, True, True, False]]
    assert torch_side.dequantize(packed, side="b", format="int4").isnan().any(0).tolist() == [False, True, True, False]


def test_a_block_of_zeros_has_the_scale_one() -> None:
    q = torch_side.quantize(torch.zeros(3, 64), "e5m2", "1x32")
    assert q.scale.tolist() == [[1.0, 1.0]] * 3
    assert not q.data.view(torch.uint8).any()


@pytest.mark.parametrize("scale", ["row", "1x32", "128x128"])
def test_e8m0_never_saturates(scale: str) -> None:
    x = operand((130, 140), "wide")
    q = torch_side.quantize(x, "e4m3", scale, scale_dtype=torch.float8_e8m0fnu)
    assert torch.equal(torch_side.dequantize(q, side="a").sign().abs() > 0, q.data.float() != 0)
    assert (q.data.float().abs() <= 448).all()
    quotient = x / (x / torch_side.dequantize(q, side="a")).nan_to_num(1)
    assert quotient.isfinite().all()


@pytest.mark.parametrize("packed", ["int4", "uint4", "e2m1"])
def test_data_are_what_a_problem_takes(packed: Any) -> None:
    w, a = torch.randn(3, 64, 40), torch.randn(9, 64).bfloat16()
    q = torch_side.quantize(w, packed, "1x32", side="b", zero=packed == "uint4")
    assert q.data.mT.is_contiguous()
    y = mg.grouped_gemm(
        a,
        q.data,
        sizes=[2, 0, 7],
        scale_b=q.scale,
        zero_b=q.zero,
        b_format=packed,
        out_dtype=torch.float32,
        backend="cpu",
    )
    wanted = mg.grouped_gemm(a.float(), torch_side.dequantize(q, side="b", format=packed), sizes=[2, 0, 7])
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


def test_numpy_in_numpy_out() -> None:
    q = torch_side.quantize(np.ones((4, 64), np.float32), "e4m3", "1x32")
    assert q.data.dtype == ml_dtypes.float8_e4m3fn
    assert q.scale.dtype == np.float32


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        (("e3m4", "row"), {}, "format='e3m4' is unknown: use one of 'e4m3'"),
        (("e4m3", "1x16"), {}, "scale='1x16' is unknown"),
        (("uint4", "row"), {"side": "b"}, "format='uint4' with zero=False: .*: pass zero=True"),
        (("e2m1", "row"), {"zero": True}, "zero points belong to integers: leave zero out, or use 'uint4'"),
        (("e4m3", "1x32"), {"jagged": "k"}, "scale='1x32' of a jagged K: pass offsets, sizes or ends"),
        (("e4m3", "128x128"), {"sizes": [5]}, "scale='128x128' of rows that jagged='m' cuts: use '1x128'"),
        (("e4m3", "row"), {"scale_dtype": torch.float64}, "scale_dtype is float64"),
        (("e4m3", "row"), {"scale_dtype": torch.float16}, "scale_dtype is float16 with side='a'.* use float32"),
        (("int4", "row"), {"side": "b"}, "K = 5 is odd"),
        (("int4", "row"), {"jagged": "k", "sizes": [6]}, "jagged='k' cuts K, where bytes hold two"),
        (("int4", "row"), {"side": "b", "jagged": "k", "sizes": [5]}, "jagged='k' cuts K, where bytes hold two"),
        (("e4m3", "group"), {"jagged": "n", "sizes": [5]}, "an operand that all groups share: use 'tensor'"),
    ],
)
def test_refusals(args: Any, options: Any, match: str) -> None:
    with pytest.raises(mg.InvalidProblem, match=match):
        torch_side.quantize(torch.ones(5, 6), *args, **options)


X, W = torch.ones(5, 64), torch.ones(3, 64, 4)
Q = torch_side.quantize(X, "e4m3", "row")
BYTES = torch_side.quantize(W, "uint4", "row", side="b", zero=True)


def test_dequantize_takes_any_data_scale_and_zero() -> None:
    assert torch.equal(torch_side.dequantize((Q.data, Q.scale), side="a"), X)
    assert torch.equal(torch_side.dequantize([Q.data, None], side="a"), Q.data.float())
    assert torch.equal(torch_side.dequantize(tuple(BYTES), side="b", format="uint4"), W)
    for dtype in (torch.bfloat16, torch.float16):
        q = torch_side.quantize(W, "int8", "row", side="b", scale_dtype=dtype)
        torch.testing.assert_close(torch_side.dequantize(q, side="b"), W, rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("q", "options", "match"),
    [
        (Q.data, {"side": "a"}, "q is a Tensor: pass what quantize returned"),
        ((Q.data,), {"side": "a"}, r"q is a tuple: pass what quantize returned, or \(data, scale"),
        ((X, Q.scale), {"side": "a"}, "data has dtype float32; it must be float8, int8 or bytes"),
        ((X, Q.scale), {"side": "b"}, "data has dtype float32; it must be float8, int8 or bytes"),
        (BYTES, {"side": "a"}, "data has dtype uint8: say what it holds with format= 'int4' or"),
        (BYTES, {"side": "b"}, "data has dtype uint8: say what it holds with format= 'int4' or"),
        (Q, {"side": "a", "format": "e5m2"}, "data has dtype float8_e4m3fn, which can hold 'e4m3', and format='e5m2'"),
        (BYTES, {"side": "b", "format": "int8"}, "data has dtype uint8, which can hold 'int4' or"),
        ((Q.data, Q.scale.double()), {"side": "a"}, "scale_a has dtype float64; it must be float32 or"),
        ((Q.data, Q.scale.byte()), {"side": "a"}, "scale_a has dtype uint8; .*: view them as torch.float8_e8m0fnu"),
        ((Q.data, Q.scale[:3]), {"side": "a"}, r"scale_a has shape \(3, 1\) for a of shape \(5, 64\)"),
        ((Q.data, Q.scale, Q.scale.byte()), {"side": "a"}, "zero_a belongs to integer weights .* a is float8"),
        ((BYTES.data, None, BYTES.zero), {"side": "b", "format": "uint4"}, "zero_b without scale_b"),
        ((BYTES.data, BYTES.scale, BYTES.zero[:1]), {"side": "b", "format": "uint4"}, "zero_b has shape .* as scale_b"),
        ((BYTES.data, BYTES.scale, BYTES.zero.float()), {"side": "b", "format": "uint4"}, "zero_b has dtype float32"),
    ],
)
def test_what_dequantize_refuses(q: Any, options: Any, match: str) -> None:
    with pytest.raises(mg.InvalidProblem, match=match):
        torch_side.dequantize(q, **options)
