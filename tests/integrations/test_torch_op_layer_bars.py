"""What a layer of experts promises beyond its values: exact zeros where nothing flows, and no NaN of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multigemm.nn import Experts
from tests.support.layer_cases import EXPERTS, TOKENS, VARIANTS, layer_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def gradients(layer: Experts, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {"x": x.detach().requires_grad_(), "weights": weights.detach().requires_grad_()}
    y = layer(leaves["x"], index, leaves["weights"])
    named = {**leaves, **dict(layer.named_parameters())}
    found = torch.autograd.grad(y, list(named.values()), torch.ones_like(y))
    return y.detach(), dict(zip(named, found, strict=True))


def without_gradients(layer: Experts, *given: Tensor) -> Tensor:
    """The layer's result; on a GPU, the one of a bound layer that was met before."""
    with torch.no_grad():
        results: list[Tensor] = [layer(*given) for _ in range(4)]
    assert all(torch.equal(y.nan_to_num(), results[0].nan_to_num()) for y in results)
    return results[-1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "dtype", "bias"), VARIANTS)
@pytest.mark.parametrize("used", [(0, 3), (5, 5)])
def test_experts_without_tokens_have_gradients_of_zero(
    activation: str, dtype: torch.dtype, bias: bool, used: tuple[int, int], device: str
) -> None:
    layer, x, weights = layer_of(activation, dtype, bias, device)
    index = torch.tensor(used, device=device).expand(TOKENS, 2).contiguous()
    index[7] = EXPERTS  # a token that nobody here serves
    y, found = gradients(layer, x, index, weights)
    assert torch.equal(without_gradients(layer, x, index, weights), y)
    assert all(g.isfinite().all() for g in (y, *found.values()))
    idle = [e for e in range(EXPERTS) if e not in used]
    for name, gradient in found.items():
        if name in ("x", "weights"):
            assert not gradient[7].any()
            assert gradient.any()
        else:
            assert not gradient[idle].any()
            assert all(gradient[e].any() for e in used)
    assert not y[7].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("activation", "dtype", "bias"), VARIANTS)
def test_a_nan_stays_with_its_token_and_its_experts(
    activation: str, dtype: torch.dtype, bias: bool, device: str
) -> None:
    layer, x, weights = layer_of(activation, dtype, bias, device)
    index = torch.rand(TOKENS, EXPERTS - 1, device=device).topk(2).indices
    index[11] = torch.tensor([0, 1], device=device)
    clean, found = gradients(layer, x, index, weights)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter[EXPERTS - 1] = torch.nan  # of an expert that serves nobody
    x[11] = torch.nan
    dirty, after = gradients(layer, x, index, weights)
    assert torch.equal(without_gradients(layer, x, index, weights).nan_to_num(), dirty.nan_to_num())
    others = torch.arange(TOKENS, device=device) != 11
    assert dirty[11].isnan().all()
    assert torch.equal(dirty[others], clean[others])
    for name in ("x", "weights"):
        assert torch.equal(after[name][others], found[name][others])
    for name, _ in layer.named_parameters():
        assert torch.equal(after[name][2:], found[name][2:])
        assert not after[name][EXPERTS - 1].any()
