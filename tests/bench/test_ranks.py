"""`multigemm bench ranks`: a layer over several processes, what is told of it, and the picture of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.__main__ import main
from multigemm.bench import ranks
from multigemm.bench.workloads import LAYERS
from tests.support.python_process import run_ranks


def kernel(name: str, start: float, us: float) -> dict[str, Any]:
    return {"kind": ranks.kind(name), "name": name, "start": start, "us": us}


STEP = [
    kernel("_sort_kernel", 0, 50),
    kernel("ncclDevKernel_SendRecv", 50, 400),
    kernel("hopper_kernel", 100, 200),
    kernel("_pair_backward_kernel", 350, 50),
    kernel("ncclDevKernel_SendRecv", 600, 100),
    kernel("fused_kernel", 650, 150),
]


def test_a_step_is_split_by_what_its_kernels_are_for() -> None:
    assert ranks.split(STEP) == {
        "products": 0.35, "exchange": 0.5, "hidden": 0.3, "sorting": 0.05, "rest": 0.05, "idle": 0.15,
    }  # fmt: skip
    sorting = ("vectorized_gather_kernel", "radixSortKVInPlace", "_spread_kernel")
    names = (*sorting, "nvjet_hsh_128x256", "sum_rows", "Memcpy PtoP")
    assert [ranks.kind(name) for name in names] == ["sorting"] * 3 + ["products", "rest", "exchange"]
    assert ranks.split([])["idle"] == 0.0


def test_spans_that_overlap_count_once() -> None:
    assert ranks.union([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert ranks.union([]) == 0


@pytest.mark.parametrize("name", ["step.svg", "step.png"])
def test_the_picture_is_drawn_again_from_what_was_kept(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = {"layer": "mixtral", "ranks": 2, "tokens": 7, "kernels": STEP}
    (tmp_path / "all.json").write_text(json.dumps({"runs": [run, {**run, "layer": "qwen3-30b"}, {"layer": "x"}]}))
    words = ["bench", "ranks", "--draw", str(tmp_path / "all.json"), "--picture", str(tmp_path / name)]
    assert main(words) == 0
    assert (tmp_path / name).stat().st_size > 1000
    if name.endswith("svg"):
        text = (tmp_path / name).read_text()
        assert text.count("http") == 1 and "mixtral: a training step" in text, "no other host is named"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "mixtrel"], "--layers mixtrel: known are mixtral, qwen3-30b, deepseek-v3, gpt-oss-20b"),
        (["--ways", "fused,other"], "--ways other: known are fused, steps, plain"),
        (["--draw", "x.json"], "--draw needs --picture"),
    ],
)
def test_words_without_a_meaning_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ranks", *words]) == 2
    assert said in capsys.readouterr().err


WORDS = ("bench", "ranks", "--device", "cpu", "--scale", "128", "--rounds", "1", "--passes", "training")


def kept_runs(path: Path, count: int, told: str) -> list[dict[str, Any]]:
    """The runs that a command kept and printed, each with all that it promises."""
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    assert len(runs) == sum("ranks" in line for line in told.splitlines())
    for run in runs:
        assert run["ms"] > 0 and run["ranks"] == count
        assert ("speedup" in run) == (run["way"] != "plain") == ("of_plain" in run)
        tokens = LAYERS[run["layer"]].scaled(128).tokens
        assert run["tokens"] == tokens // (count if run["scaling"] == "strong" else 1)
    return runs


@pytest.mark.slow
def test_a_run_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "WARM_UP", 0)
    words = ["--layers", "gpt-oss-20b", "--chunks", "1,2", "--routing", "uniform", "--json", str(tmp_path / "all.json")]
    assert main([*WORDS, *words]) == 0
    runs = kept_runs(tmp_path / "all.json", 1, capsys.readouterr().out)
    assert len(runs) == 2 * 5, "scalings, and ways with their chunks"


@pytest.mark.slow
def test_a_run_over_processes(tmp_path: Path) -> None:
    """Every way gives the result of one process, or the run would end with an error."""
    words = ["--layers", "deepseek-v3,gpt-oss-20b", "--chunks", "2", "--scaling", "strong", "--routing", "skewed"]
    told = run_ranks("-m", "multigemm", *WORDS, *words, "--json", "all.json", cwd=tmp_path)
    runs = kept_runs(tmp_path / "all.json", 2, told)
    assert len(runs) == 2 * 3, "layers, and ways"


def test_skewed_tokens_go_to_few_experts() -> None:
    layer = LAYERS["qwen3-30b"]
    busiest = [
        int(torch.bincount(ranks.Batch(layer, 500, routing, 0, torch.device("cpu")).index.flatten()).max())
        for routing in ranks.ROUTINGS
    ]
    assert busiest[1] > 5 * busiest[0]
