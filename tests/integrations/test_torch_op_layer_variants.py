"""Every variant of a layer, bound on a GPU: the bits that its steps give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multigemm.integrations import layer_call
from tests.support.layer_cases import EXPERTS, HIDDEN, TOKENS, VARIANTS, layer_of


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "dtype", "bias"), VARIANTS)
@pytest.mark.parametrize("tokens", [3, TOKENS, 700])
def test_every_variant_is_bound_with_the_bits_of_its_steps(
    activation: str, dtype: torch.dtype, bias: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _, _ = layer_of(activation, dtype, bias, "cuda")
    x = torch.randn(tokens, HIDDEN, dtype=dtype, device="cuda")
    index, weights = torch.rand(tokens, EXPERTS, device="cuda").topk(2).indices, torch.rand(tokens, 2, device="cuda")
    bound: Any = layer_call.call
    met: list[bool] = []

    def counted(*args: Any) -> Tensor | None:
        y: Tensor | None = bound(*args)
        met.append(y is not None)
        return y

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(layer_call, "call", lambda *_: None)
            want = [layer(x, index, weights) for _ in range(2)][1]
        monkeypatch.setattr(layer_call, "call", counted)
        assert all(torch.equal(layer(x, index, weights), want) for _ in range(4))
    assert met == [True] * 4
