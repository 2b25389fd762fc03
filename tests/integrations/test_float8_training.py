"""`float8_grouped_mm`: forward and backward are the products of the operands that its recipe says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import multigemm as mg
from multigemm.nn import float8_grouped_mm
from multigemm.quantize import dequantize, quantize

T, K, N, G = 300, 256, 192, 3
SIZES = [130, 0, 170]
WAYS: list[tuple[str, Any]] = [
    ("sizes", SIZES),
    ("sizes", torch.tensor(SIZES)),
    ("ends", torch.tensor([130, 130, 300])),
]


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and the incoming gradient."""
    torch.manual_seed(0)
    x, w = torch.randn(T, K, dtype=dtype).requires_grad_(), torch.randn(G, K, N, dtype=dtype).requires_grad_()
    return x, w, torch.randn(T, N, dtype=dtype)


def meant(x: Tensor, format: Any, scale: str, side: Any = "a", **cut: Any) -> Tensor:
    """The numbers that a quantised operand stands for."""
    found: Tensor = dequantize(quantize(x, format, scale, side=side, **cut), side=side, **cut).double()
    return found


def expected(x: Tensor, w: Tensor, dy: Tensor, recipe: str, wgrad: str) -> tuple[Tensor, Tensor, Tensor]:
    """y, dX and dW as products in float64 of what the recipe quantises to."""
    x, w = x.detach(), w.detach()
    k: dict[str, Any] = {"sizes": SIZES, "jagged": "k"}
    if recipe == "rows":
        forward = meant(x, "e4m3", "row"), meant(w, "e4m3", "row", "b")
        back = meant(dy, "e5m2", "row"), meant(w.mT, "e4m3", "row", "b")
        along = meant(x.mT, "e4m3", "row", **k), meant(dy, "e5m2", "row", "b", **k)
    else:
        forward = meant(x, "e4m3", "1x128"), meant(w, "e4m3", "128x128", "b")
        back = meant(dy, "e4m3", "1x128"), forward[1].mT
        along = meant(x.mT, "e4m3", "1x128", **k), meant(dy, "e4m3", "1x128", "b", **k)
    if wgrad == "bfloat16":
        along = x.mT.double(), dy.double()
    products = [mg.grouped_gemm(*pair, sizes=SIZES, backend="cpu") for pair in (forward, back)]
    return products[0], products[1], mg.grouped_gemm(*along, **k, backend="cpu")


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.004 * float(want.abs().max()))


@pytest.mark.parametrize("cut", WAYS, ids=["host", "live sizes", "live ends"])
@pytest.mark.parametrize("wgrad", ["bfloat16", "float8"])
@pytest.mark.parametrize("recipe", ["rows", "blocks"])
def test_forward_and_backward_by_the_recipe(recipe: Any, wgrad: Any, cut: tuple[str, Any]) -> None:
    x, w, dy = operands()
    keywords: dict[str, Any] = {cut[0]: cut[1]}
    y = float8_grouped_mm(x, w, recipe=recipe, wgrad=wgrad, backend="cpu", **keywords)
    found = (y, *grad(y, (x, w), dy))
    for got, want in zip(found, expected(x, w, dy, recipe, wgrad), strict=True):
        assert got.dtype is torch.bfloat16
        close(got, want)
    assert not found[2][1].any()  # an expert without tokens


@pytest.mark.parametrize("recipe", ["rows", "blocks"])
def test_near_the_product_of_the_operands(recipe: Any) -> None:
    x, w, dy = operands()
    plain = [t.detach().double().requires_grad_() for t in (x, w)]
    want = mg.grouped_gemm(*plain, sizes=SIZES, backend="cpu")
    wanted = (want.detach(), *grad(want, plain, dy.double()))
    y = float8_grouped_mm(x, w, sizes=SIZES, recipe=recipe, wgrad="float8")
    for got, exact in zip((y, *grad(y, (x, w), dy)), wanted, strict=True):
        assert float((got.detach().double() - exact).norm() / exact.norm()) < 0.08  # e5m2 has steps of an eighth


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_powers_of_two(dtype: torch.dtype) -> None:
    x, w, dy = operands(dtype)
    y = float8_grouped_mm(x, w, sizes=SIZES, scale_dtype=torch.float8_e8m0fnu, wgrad="float8")
    dx, dw = grad(y, (x, w), dy)
    assert y.dtype is dx.dtype is dw.dtype is dtype
    exact = mg.grouped_gemm(x.detach(), w.detach(), sizes=SIZES)
    assert float((y.detach() - exact).norm() / exact.norm()) < 0.08


def test_only_what_is_asked_for() -> None:
    x, w, dy = operands()
    both = grad(float8_grouped_mm(x, w, sizes=SIZES), (x, w), dy)
    for one, want, keywords in ((x, both[0], {"w": w.detach()}), (w, both[1], {"x": x.detach()})):
        given: dict[str, Any] = {"x": x, "w": w} | keywords
        y = float8_grouped_mm(**given, sizes=SIZES)
        assert torch.equal(grad(y, one, dy)[0], want)
    with torch.no_grad():
        assert not float8_grouped_mm(x, w, sizes=SIZES).requires_grad


def test_rows_that_no_group_owns() -> None:
    x, w, dy = operands()
    with torch.no_grad():
        x[130:] = torch.nan
        dy[130:] = torch.nan
    for wgrad in ("bfloat16", "float8"):
        y = float8_grouped_mm(x, w, sizes=[130, 0, 0], wgrad=wgrad)
        found = (y, *grad(y, (x, w), dy))
        assert all(t.isfinite().all() for t in found)
        assert not y[130:].any()
        assert not found[1][130:].any()


def test_gradients_are_taken_once_and_saved_tensors_are_watched() -> None:
    x, w, dy = operands()
    first = grad(float8_grouped_mm(x, w, sizes=SIZES), x, dy.requires_grad_(), create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(first.float().sum())
    sizes = torch.tensor(SIZES)
    y = float8_grouped_mm(x, w, sizes=sizes)
    sizes.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(y.sum(), x)


def test_refusals() -> None:
    x, w, _ = operands()
    cases: list[tuple[str, tuple[Any, Any], dict[str, Any]]] = [
        ("recipe='row' is unknown", (x, w), {"sizes": SIZES, "recipe": "row"}),
        ("wgrad='bf16' is unknown", (x, w), {"sizes": SIZES, "wgrad": "bf16"}),
        ("scale_dtype=torch.bfloat16", (x, w), {"sizes": SIZES, "scale_dtype": torch.bfloat16}),
        ("nothing cuts the rows of x", (x, w), {}),
        (r"w is \(256, 192\)", (x, w[0]), {"sizes": SIZES}),
        ("w is torch.float16: both must be", (x, w.half()), {"sizes": SIZES}),
        ("3 groups", (x, w), {"sizes": [130, 170]}),
    ]
    for text, (a, b), keywords in cases:
        with pytest.raises(mg.InvalidProblem, match=text):
            float8_grouped_mm(a, b, **keywords)


@pytest.mark.slow
def test_inside_torch_compile() -> None:
    x, w, dy = operands()
    want = grad(float8_grouped_mm(x, w, sizes=SIZES), (x, w), dy)
    torch._dynamo.reset()

    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return float8_grouped_mm(x * 1, w, sizes=SIZES) * 1

    found = grad(torch.compile(scaled, backend="aot_eager")(x, w), (x, w), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
