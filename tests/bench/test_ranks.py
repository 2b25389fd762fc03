"""`multigemm bench ranks`: a layer over several processes, what is told of it, and the picture of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.__main__ import main
from multigemm.bench import ranks
from multigemm.bench.workloads import LAYERS

ROOT = Path(__file__).parents[2]


def kernel(name: str, start: float, us: float) -> dict[str, Any]:
    return {"kind": ranks.kind(name), "name": name, "start": start, "us": us}


STEP = [
    kernel("_move_kernel", 0, 50),
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
    names = ("vectorized_gather_kernel", "radixSortKVInPlace", "nvjet_hsh_128x256", "sum_rows", "Memcpy PtoP")
    assert [ranks.kind(name) for name in names] == ["sorting", "sorting", "products", "rest", "exchange"]
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


def test_more_ranks_wait_longer_for_more_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run: dict[str, Any] = {
        "layer": "qwen3-30b", "scaling": "weak", "pass": "training", "routing": "uniform", "ranks": 2, "way": "fused",
        "chunks": 1, "tokens": 16384, "ms": 10.0, "host_ms": 7.0, "alone_ms": 7.5, "split_ms": {"products": 5.5},
    }  # fmt: skip
    assert ranks.forecast(run, 2)["ms"] == run["ms"]
    steps = [ranks.forecast(run, count) for count in (2, 4, 8)]
    assert steps[0]["ms"] < steps[1]["ms"] < steps[2]["ms"] < 20.0
    assert steps[0]["speedup"] < steps[1]["speedup"] < steps[2]["speedup"] < 8
    (tmp_path / "all.json").write_text(json.dumps({"runs": [run, {**run, "way": "plain"}]}))
    assert main(["bench", "ranks", "--forecast", str(tmp_path / "all.json")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2 and "4 ranks" in told[0] and f"x{steps[2]['speedup']:.2f} of one" in told[1]


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


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_over_processes(count: int, tmp_path: Path) -> None:
    """Every way gives the result of one process, or the run would end with an error."""
    words = ["--device", "cpu", "--scale", "128", "--rounds", "1", "--layers", "deepseek-v3,gpt-oss-20b"]
    words += ["--passes", "training", "--chunks", "1,2", "--routing", "skewed", "--json", str(tmp_path / "all.json")]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launch, "-m", "multigemm", "bench", "ranks", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads((tmp_path / "all.json").read_text())["runs"]
    assert len(runs) == 2 * 2 * 5 == len(done.stdout.splitlines())
    for run in runs:
        assert run["ms"] > 0 and run["ranks"] == count
        assert ("speedup" in run) == (run["way"] != "plain") == ("of_plain" in run)
        layer = LAYERS[run["layer"]].scaled(128)
        assert run["tokens"] == layer.tokens // (count if run["scaling"] == "strong" else 1)


def test_skewed_tokens_go_to_few_experts() -> None:
    layer = LAYERS["qwen3-30b"]
    busiest = [
        int(torch.bincount(ranks.Batch(layer, 500, routing, 0, torch.device("cpu")).index.flatten()).max())
        for routing in ranks.ROUTINGS
    ]
    assert busiest[1] > 5 * busiest[0]
