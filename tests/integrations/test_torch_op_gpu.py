"""The torch operator on a GPU: results and gradients of every form, and torch's own checks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from multigemm.integrations import grouped_gemm
from tests.support.torch_op_cases import FORMS, bias_shapes, operands, result_shape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_gradients_are_those_of_the_cpu(form: str) -> None:
    a, b, cut = operands(form)
    bias = torch.linspace(-1, 1, bias_shapes(form)[-1][-1], dtype=torch.float64).expand(bias_shapes(form)[-1])
    inputs = [a, b, torch.ones(result_shape(form), dtype=torch.float64), bias]
    results = []
    for device in ("cpu", "cuda"):
        x, y, c, v = (t.detach().to(device).requires_grad_() for t in inputs)
        there = {k: t.to(device) if isinstance(t, Tensor) else t for k, t in cut.items()}
        out = grouped_gemm(x, y, c=c, bias=v, beta=0.5, activation="silu", **there)
        results.append([out, *torch.autograd.grad(out.sum(), (x, y, c, v))])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.cpu(), want)


def test_opcheck_on_the_device() -> None:
    a, b = torch.randn(7, 8, device="cuda", requires_grad=True), torch.randn(3, 8, 4, device="cuda", requires_grad=True)
    ends = torch.tensor([2, 2, 6], device="cuda")
    torch.library.opcheck(torch.ops.multigemm.grouped_gemm.default, (a, b, None, None, ends), {"activation": "gelu"})


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_on_the_device(form: str) -> None:
    a, b, cut = operands(form)
    inputs = [x.detach().cuda().requires_grad_() for x in (a, b)]
    there = {k: t.cuda() if isinstance(t, Tensor) else t for k, t in cut.items()}
    assert gradcheck(lambda x, y: grouped_gemm(x, y, activation="silu", **there), inputs, fast_mode=True)
