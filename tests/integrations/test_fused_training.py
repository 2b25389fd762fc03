"""A language model learns with fused experts what it learns with a plain loop over them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.nn import MoE

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe_language_model.py"
STEPS = 40


@pytest.fixture(scope="module")
def model() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("moe_language_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    """Loss curves of the plain layer, of two seeds."""
    return [model.curve(model.PlainMoE, STEPS, seed) for seed in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"backend": "cpu"}], ids=str)
def test_the_loss_curve_is_that_of_a_plain_layer(options: dict[str, Any], model: Any, plain: Any) -> None:
    fused, (same, other) = model.curve(MoE, STEPS, fused=True, **options), plain
    assert fused[-1] < 0.6 * fused[0]
    assert model.apart(fused, same) < 0.01 * model.apart(other, same), "within the noise of two seeds, by far"


@pytest.mark.slow
def test_a_lost_gradient_is_seen(model: Any, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance of two seeds is no blind measure: routers that do not learn give another curve."""
    from multigemm.integrations import fused_experts

    monkeypatch.setattr(fused_experts._Backward, "_of_weights", lambda self, dots: torch.zeros_like(self._weights))
    wrong = model.curve(MoE, STEPS, fused=True)
    assert model.apart(wrong, plain[0]) > 0.01 * model.apart(plain[1], plain[0])


@pytest.mark.gpu
def test_the_loss_curve_on_a_gpu(model: Any) -> None:
    asked = {"device": "cuda", "width": 128, "experts": 16}
    fused, same = model.curve(MoE, STEPS, fused=True, **asked), model.curve(model.PlainMoE, STEPS, **asked)
    assert model.apart(fused, same) < 0.2 * model.apart(model.curve(model.PlainMoE, STEPS, seed=1, **asked), same)
