"""The suite of whole layers: cases, floors, what is right, what is kept, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multigemm.__main__ import main
from multigemm.bench import layers
from multigemm.bench.layers import LAYERS, Layer, LayerCase
from multigemm.bench.workloads import Rates

CPU, H200 = torch.device("cpu"), Rates(770.0, 4.2)
SMALL = LayerCase(Layer("small", 4, 2, 32, 16), 12, True)


@pytest.mark.parametrize(
    ("name", "tokens", "active", "floor"),
    [("Mixtral", 1, 2, 168), ("Mixtral", 4096, 8, 3748), ("Qwen3-30B", 1, 8, 18), ("DeepSeek-V3", 16384, 256, 14993),
     ("gpt-oss-20b", 4096, 32, 1059)],
)  # fmt: skip
def test_floors_of_forward_passes(name: str, tokens: int, active: int, floor: float) -> None:
    layer = next(x for x in LAYERS if x.name == name)
    assert LayerCase(layer, tokens, False).floor_us(active, H200) == pytest.approx(floor, rel=0.01)


def test_a_training_step_has_three_times_the_products() -> None:
    layer = LAYERS[1]
    assert LayerCase(layer, 16384, True).floor_us(128, H200) == pytest.approx(4819, rel=0.01)


@pytest.mark.parametrize("training", [False, True])
def test_a_wrong_layer_is_told_from_a_right_one(training: bool) -> None:
    given = layers.operands(SMALL, CPU)
    forward, _ = layers.ours(given, "cpu", True)
    assert layers.wrong(forward, given, training) == ""

    def without_a_weight(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return forward(x, index, torch.where(torch.arange(len(weights))[:, None] == 3, 0, weights))

    def without_a_gradient(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return forward(torch.cat([x[:3].detach(), x[3:]]), index, weights)

    assert "the result" in layers.wrong(without_a_weight, given, training)
    assert ("the gradient" in layers.wrong(without_a_gradient, given, training)) is training


def test_what_backward_keeps() -> None:
    """4 k I bytes and the indices, where steps keep rows and gated values too."""
    given = layers.operands(SMALL, CPU)
    kept = {fused: layers.kept_per_token(*reordered(given, fused)) for fused in (True, False)}
    top_k, inner = SMALL.layer.top_k, SMALL.layer.inner
    assert 4 * top_k * inner <= kept[True] <= 4 * top_k * inner + 16 * top_k + 4 * 4
    assert kept[False] > 2 * kept[True]


def reordered(given: Any, fused: bool) -> tuple[Any, Any, Any]:
    forward, parameters = layers.ours(given, "cpu", fused)
    return forward, given, parameters


def test_a_contender_that_raises_says_why() -> None:
    def broken(given: Any) -> Any:
        raise RuntimeError("no such kernel")

    rows = list(layers.measured(SMALL, {"broken": broken}, CPU, H200, 10.0))
    assert [row.error for row in rows] == ["RuntimeError: no such kernel"]
    assert "no such kernel" in layers.line(rows[0])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--suite", "layers", "--device", "cpu", "--only", "Mixtral/512", "--floor", "1,0.1"]
    assert main([*words, "--backends", "cpu", "--peers", "none", "--budget-ms", "5", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "cpu, fused" in told and "of the floor" in told and "keeps" in told
    report = json.loads((tmp_path / "layers.json").read_text())
    assert {row["contender"] for row in report["rows"]} == {"cpu, fused", "cpu, in steps"}
    assert not any(row["error"] for row in report["rows"])


def test_what_the_command_refuses_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "layers,moe", "--device", "cpu"]) == 2
    assert main(["bench", "--suite", "layers", "--device", "cpu", "--only", "nobody"]) == 2
    assert main(["bench", "--list", "--suite", "layers"]) == 0
    assert "DeepSeek-V3/16384/training" in capsys.readouterr().out
