"""The suites of whole layers: floors, what is right, what backward keeps, and the way through the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multigemm.__main__ import main
from multigemm.bench import layers
from multigemm.bench.entries import Refused
from multigemm.bench.layers import layer_case
from multigemm.bench.workloads import LAYERS, Layer, Rates, with_dtype
from multigemm.errors import LibraryError
from tests.support.bench_entries import measured

CPU, H200 = torch.device("cpu"), Rates(770.0, 4.2)
SMALL = Layer("small", 4, 2, 32, 16, 12)


@pytest.mark.parametrize(
    ("name", "tokens", "distribution", "active", "floor"),
    [("Mixtral", 1, "forward", 2, 168), ("Mixtral", 4096, "forward", 8, 3748), ("Qwen3-30B", 1, "forward", 8, 18),
     ("DeepSeek-V3", 16384, "forward", 256, 14993), ("gpt-oss-20b", 4096, "forward", 32, 1059),
     ("Qwen3-30B", 16384, "training", 128, 4819)],
)  # fmt: skip
def test_floors_count_active_experts_and_in_training_all_gradients(
    name: str, tokens: int, distribution: str, active: int, floor: float
) -> None:
    case = layer_case("layers", LAYERS[name.lower()], tokens, distribution)
    assert case.active == active and case.floor_us(H200) == pytest.approx(floor, rel=0.01)


@pytest.mark.parametrize("distribution", ["forward", "training"])
def test_a_wrong_layer_is_told_from_a_right_one(distribution: str) -> None:
    given = layers.make_layer(layer_case("layers", SMALL, 12, distribution), CPU)
    truth, (right, _) = given.reference(), layers.experts_of(given, "cpu", True)
    assert truth.verdict(given.checked(right)) == ""

    def without_a_weight(x: Tensor, index: Tensor, weights: Tensor) -> Any:
        return right(x, index, torch.where(torch.arange(len(weights))[:, None] == 3, 0, weights))

    def without_a_gradient(x: Tensor, index: Tensor, weights: Tensor) -> Any:
        return right(torch.cat([x[:3].detach(), x[3:]]), index, weights)

    assert "the result" in truth.verdict(given.checked(without_a_weight))
    assert ("the gradient" in truth.verdict(given.checked(without_a_gradient))) is (distribution == "training")


@pytest.mark.parametrize(("name", "least", "most"), [("fp8-blocks", 0.04, 0.08), ("mxfp4-weights", 0.1, 0.3)])
def test_a_quantised_layer_tells_its_error(
    name: str, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = layers.make_layer(layer_case(layers.QUANTISED, Layer("q", 3, 2, 256, 128, 5), 5, "forward"), CPU)
    entry = next(entry for entry in layers.layer_entries([]) if entry.name == name)
    assert entry.takes(given.workload) and not entry.takes(layers.whole_layers()[0])
    assert least < float(entry.prepare(given).why.removeprefix("error ")) < most
    monkeypatch.setitem(layers.FORMATS, name, (*layers.FORMATS[name][:3], least))
    with pytest.raises(LibraryError, match="wrong: the result is off by"):
        entry.prepare(given)


def test_what_backward_keeps() -> None:
    """4 k I bytes and the indices, where steps keep rows and gated values too."""
    given = layers.make_layer(layer_case("layers", SMALL, 12, "training"), CPU)
    fused, steps = (
        layers.kept_per_token(forward, given, parameters)
        for forward, parameters in (layers.experts_of(given, "cpu", fused) for fused in (True, False))
    )
    assert 4 * 2 * 16 <= fused <= 4 * 2 * 16 + 16 * 2 + 4 * 4
    assert steps > 2 * fused


def test_the_command_measures_layers_as_it_measures_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU extents and tokens are divided."""
    monkeypatch.setattr(layers, "CPU_SCALE", 256)
    words = "--suite layers,small --only Mixtral:2/,small_cube_64 --backends cpu --peers none --modes graph"
    rows = {(row.case, row.entry): row for row in measured(tmp_path, words).rows}
    training = rows["Mixtral:2/training/bf16", "fused[cpu]"]
    assert training.status == "ok" and training.why.endswith(" bytes a token for backward") and training.us
    assert rows["Mixtral:2/forward/bf16", "steps[cpu]"].status == "ok"
    assert rows["small_cube_64/list/bf16", "cpu"].status == "ok"
    assert "Mixtral:2/forward/bf16" in capsys.readouterr().out


def test_what_a_layer_has_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Refused, match="has no int8"):
        layers.make_layer(with_dtype(layer_case("layers", SMALL, 12, "forward"), "int8"), CPU)  # type: ignore[arg-type]
    assert main(["bench", "--suite", "layers", "--device", "cpu", "--only", "nobody"]) == 2
    assert main(["tune", "--suite", "layers", "--device", "cpu"]) == 2
    assert "whose products are tuned: --suite layer-products" in capsys.readouterr().err
    assert main(["bench", "--list", "--suite", "layers"]) == 0
    assert "DeepSeek-V3:16384/training/bf16" in capsys.readouterr().out
