"""Gradients of products with quantised operands: those of the same products with dequantised operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import multigemm as mg
from multigemm.integrations import grouped_gemm as operator
from multigemm.quantize import dequantize, quantize

T, K, N, G = 12, 160, 72, 3
SIZES = torch.tensor([5, 0, 7])
WAYS: dict[str, Any] = {"operator": operator, "front door": mg.grouped_gemm}
WEIGHTS = {
    "e4m3 tensor": ("e4m3", "tensor", {}),
    "e5m2 group": ("e5m2", "group", {}),
    "e4m3 blocks": ("e4m3", "128x128", {}),
    "int8 row": ("int8", "row", {}),
    "e4m3 1x32 e8m0": ("e4m3", "1x32", {"scale_dtype": torch.float8_e8m0fnu}),
    "int4 1x32": ("int4", "1x32", {"scale_dtype": torch.bfloat16}),
    "uint4 row": ("uint4", "row", {"zero": True}),
    "mxfp4": ("e2m1", "1x32", {"scale_dtype": torch.float8_e8m0fnu}),
}


def weights(name: str, w: Tensor, **cut: Any) -> tuple[dict[str, Any], Tensor]:
    """The keywords of quantised weights, and what they stand for."""
    format, scale, options = WEIGHTS[name]
    q: Any = quantize(w, format, scale, side="b", **options, **cut)  # type: ignore[arg-type]
    keywords = {"b": q.data, "scale_b": q.scale, "zero_b": q.zero}
    if format in ("int4", "uint4", "e2m1"):
        keywords["b_format"] = format
    return keywords, dequantize(q, side="b", format=format, **cut)  # type: ignore[arg-type]


def close(got: Tensor, want: Tensor) -> None:
    """Within the rounding of a product to bfloat16, whose weights may be rounded as well."""
    want = want.detach().double()
    largest = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02 * largest)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_activations_of_quantised_weights_have_gradients(name: str, way: str, activation: str | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(G, N, dtype=torch.bfloat16, requires_grad=True)
    incoming = torch.randn(T, N, dtype=torch.bfloat16)
    keywords, meant = weights(name, torch.randn(G, K, N))
    y = WAYS[way](x, sizes=SIZES, bias=bias, alpha=0.5, activation=activation, **keywords)
    dx, dbias = grad(y, (x, bias), incoming)
    plain, row = x.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    want = mg.grouped_gemm(
        plain, meant.double(), sizes=SIZES, bias=row, alpha=0.5, activation=activation, backend="cpu"
    )
    dx_want, dbias_want = grad(want, (plain, row), incoming.double())
    close(y, want)
    close(dx, dx_want)
    close(dbias, dbias_want)
    assert dx.dtype is dbias.dtype is torch.bfloat16


FORMS = ("batched", "single", "masked", "shared", "jagged_n", "jagged_k")


@pytest.mark.parametrize("scale", ["group", "row", "1x128"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, way: str, scale: str) -> None:
    if scale == "group" and form == "single":
        pytest.skip("a group that the caller does not know")
    torch.manual_seed(1)
    cut: dict[str, Any] = {}
    x, w = torch.randn(G, T, K), torch.randn(G, K, N)
    if form == "single":
        x, w = x[0], w[0]
    elif form == "masked":
        cut = {"valid_rows": torch.tensor([4, 0, 12])}
    elif form == "shared":
        x, w, cut = x[0], w[0], {"sizes": SIZES}
    elif form == "jagged_n":
        w, cut = torch.randn(K, T), {"sizes": SIZES, "jagged": "n"}
        x = torch.randn(G, 6, K)
    elif form == "jagged_k":
        x, w, cut = torch.randn(8, T), torch.randn(T, N), {"sizes": SIZES, "jagged": "k"}
    own = cut if form.startswith("jagged") else {}
    grain: Any = "tensor" if scale == "group" and form == "shared" else scale
    q: Any = quantize(w, "e4m3", grain, side="b", **own)
    meant = dequantize(q, side="b", **own)
    scale_b = q.scale.expand(G).contiguous() if grain != scale else q.scale
    x = x.bfloat16().requires_grad_()
    y = WAYS[way](x, q.data, scale_b=scale_b, **cut)
    incoming = torch.randn(y.shape).bfloat16()
    dx = grad(y, x, incoming)[0]
    plain = x.detach().double().requires_grad_()
    want = mg.grouped_gemm(plain, meant.double(), backend="cpu", **cut)
    close(dx, grad(want, plain, incoming.double())[0])


def test_lists() -> None:
    torch.manual_seed(2)
    x = [torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True) for m, k in ((3, 160), (0, 64), (4, 96))]
    bias = [torch.randn(N, dtype=torch.bfloat16, requires_grad=True) for _ in x]
    q: list[Any] = [quantize(torch.randn(t.shape[1], N), "int4", "1x32", side="b") for t in x]
    data = [one.data for one in q]
    scale = [one.scale for one in q]
    ys = mg.grouped_gemm(x, data, scale_b=scale, b_format="int4", bias=bias, activation="gelu")
    summed: Any = sum(y.float().square().sum() for y in ys)
    found = grad(summed, (*x, *bias))
    plain = [t.detach().double().requires_grad_() for t in (*x, *bias)]
    meant = [dequantize(one, side="b", format="int4").double() for one in q]
    want = mg.grouped_gemm(plain[:3], meant, bias=plain[3:], activation="gelu", backend="cpu")
    total: Any = sum(y.square().sum() for y in want)
    for got, expected in zip(found, grad(total, plain), strict=True):
        close(got, expected)


@pytest.mark.parametrize("way", WAYS)
def test_float8_products_give_gradients_of_bias_and_c(way: str) -> None:
    torch.manual_seed(3)
    a, b = quantize(torch.randn(T, K), "e4m3", "1x128"), quantize(torch.randn(G, K, N), "e4m3", "128x128", side="b")
    bias = torch.randn(G, N, dtype=torch.bfloat16, requires_grad=True)
    c = torch.randn(T, N, dtype=torch.bfloat16, requires_grad=True)
    call: dict[str, Any] = {"sizes": SIZES, "bias": bias, "c": c, "beta": 0.5, "activation": "silu"}
    y = WAYS[way](a.data, b.data, scale_a=a.scale, scale_b=b.scale, **call)
    dbias, dc = grad(y, (bias, c), torch.ones_like(y))
    plain = [t.detach().double().requires_grad_() for t in (bias, c)]
    operands = dequantize(a, side="a").double(), dequantize(b, side="b").double()
    want = mg.grouped_gemm(*operands, **call | {"bias": plain[0], "c": plain[1], "backend": "cpu"})
    for got, expected in zip((dbias, dc), grad(want, plain, torch.ones_like(want)), strict=True):
        close(got, expected)


def test_rows_that_no_group_owns_are_constants() -> None:
    x = torch.full((T, K), float("nan"), dtype=torch.bfloat16)
    x[:5] = 1
    x.requires_grad_()
    q: Any = quantize(torch.randn(G, K, N), "e4m3", "128x128", side="b")
    y = mg.grouped_gemm(x, q.data, scale_b=q.scale, sizes=torch.tensor([5, 0, 0]))
    incoming = torch.ones_like(y)
    incoming[5:] = torch.nan
    dx = grad(y, x, incoming)[0]
    assert torch.isfinite(dx).all()
    assert not dx[5:].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e4m3 blocks", "mxfp4"])
def test_compiled_backward(name: str) -> None:
    torch.manual_seed(4)
    x = torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True)
    keywords, _ = weights(name, torch.randn(G, K, N))

    def loss(x: Tensor) -> Tensor:
        return operator(x, sizes=SIZES, **keywords).float().square().sum()

    torch._dynamo.reset()
    want = grad(loss(x), x)[0]
    assert torch.equal(grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(x), x)[0], want)


def test_what_still_has_no_gradient() -> None:
    q: Any = quantize(torch.randn(G, K, N), "e4m3", "row", side="b")
    a: Any = quantize(torch.randn(T, K), "e4m3", "row")
    x = torch.randn(T, K, dtype=torch.bfloat16, requires_grad=True)
    for way in WAYS.values():
        with pytest.raises(mg.InvalidProblem, match="scale_b asks for a gradient"):
            way(x, q.data, scale_b=q.scale.clone().requires_grad_(), sizes=SIZES)
        with pytest.raises(mg.InvalidProblem, match="b asks for a gradient, and float8_e4m3fn operands give none"):
            way(x, q.data.clone().requires_grad_(), scale_b=q.scale, sizes=SIZES)
        with pytest.raises(mg.InvalidProblem, match="a asks for a gradient, and float8_e4m3fn operands give none"):
            way(a.data.clone().requires_grad_(), q.data, scale_a=a.scale, scale_b=q.scale, sizes=SIZES)
    with pytest.raises(mg.InvalidProblem, match="fused products with quantised operands come later"):
        mg.grouped_gemm(x, q.data, scale_b=q.scale, sizes=SIZES, activation="swiglu")
