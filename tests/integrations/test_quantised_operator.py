"""Quantised operands through the torch operator and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import quantize as q
from multigemm.integrations.torch_op import grouped_gemm as operator
from multigemm.integrations.torch_op import overload
from multigemm.planning.launch_cache import LAUNCHES

SIZES = torch.tensor([4, 0, 8])
CASES = ("blocks", "rows", "packed", "jagged k", "single")


def call(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """a, b and the keywords of one call."""
    torch.manual_seed(0)
    x, w = torch.randn(12, 256), torch.randn(3, 256, 40)
    if name == "jagged k":
        cut: dict[str, Any] = {"sizes": SIZES, "jagged": "k"}
        a, b = q.quantize(x.t(), "e4m3", "1x32", **cut), q.quantize(x, "e5m2", "1x32", side="b", **cut)
        return a.data, b.data, {**cut, "scale_a": a.scale, "scale_b": b.scale}
    if name == "packed":
        b = q.quantize(w, "uint4", "1x64", side="b", zero=True)
        return x.bfloat16(), b.data, {"sizes": SIZES, "scale_b": b.scale, "zero_b": b.zero, "b_format": "uint4"}
    grain: Any = "row" if name == "rows" else "1x128"
    a, b = q.quantize(x, "e4m3", grain), q.quantize(w, "e4m3", "row" if name == "rows" else "128x128", side="b")
    if name == "single":
        return a.data, b.data[0], {"scale_a": a.scale, "scale_b": b.scale[0]}
    return a.data, b.data, {"sizes": SIZES, "scale_a": a.scale, "scale_b": b.scale}


@pytest.mark.parametrize("name", CASES)
def test_the_operator_gives_what_the_front_door_gives(name: str) -> None:
    a, b, keywords = call(name)
    want = mg.grouped_gemm(a, b, backend="cpu", **keywords)
    served = LAUNCHES.served
    for _ in range(4):
        assert torch.equal(operator(a, b, **keywords), want)
    assert LAUNCHES.served == served + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    a, b, keywords = call(name)
    cuts = [keywords.pop(cut, None) for cut in ("offsets", "sizes", "ends", "valid_rows")]
    tests = ["test_faketensor", "test_aot_dispatch_dynamic"]
    if name == "packed":  # torch compares no tensors of float8 there
        tests.append("test_schema")
    scaled = [keywords.pop(name, None) for name in ("scale_a", "scale_b", "zero_b")]
    torch.library.opcheck(overload, (a, b, *cuts, None, None, *scaled), keywords, test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compile(name: str) -> None:
    a, b, keywords = call(name)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(mg.grouped_gemm, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        assert torch.equal(compiled(a, b, **keywords), mg.grouped_gemm(a, b, **keywords))


def test_scales_change_between_calls() -> None:
    a, b, keywords = call("blocks")
    first = operator(a, b, **keywords)
    for _ in range(4):
        assert torch.equal(operator(a, b, **keywords | {"scale_a": keywords["scale_a"] * 2}), first * 2)
        plain = operator(a, b, sizes=SIZES, out_dtype=torch.float32)
        assert torch.equal(plain, mg.grouped_gemm(a, b, sizes=SIZES, out_dtype=torch.float32))


def test_fake_kernels_check_shapes() -> None:
    from torch._subclasses import FakeTensorMode

    a, b, keywords = call("blocks")
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
        a, b = mode.from_tensor(a), mode.from_tensor(b)
        assert overload(a, b, **fake).shape == (12, 40)
        assert overload(a, b, **fake).dtype is torch.bfloat16
        with pytest.raises(mg.InvalidProblem, match="along K it takes 1, 2"):
            overload(a, b, **fake | {"scale_a": fake["scale_a"][:, :1].expand(12, 3)})
        with pytest.raises(mg.InvalidProblem, match="cannot be torch"):
            overload(a, b, **fake, out_dtype=torch.float64)


def test_gradients_of_scales_are_refused() -> None:
    a8, b8, keywords = call("blocks")
    with pytest.raises(mg.InvalidProblem, match="scale_a asks for a gradient"):
        operator(a8, b8, **keywords | {"scale_a": keywords["scale_a"].requires_grad_()})


def test_autocast_leaves_float8_as_it_is() -> None:
    a, b, keywords = call("blocks")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(operator(a, b, **keywords), mg.grouped_gemm(a, b, **keywords))
