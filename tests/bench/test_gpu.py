"""On a GPU: one command benchmarks, one tunes, and auto goes by what both have measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import multigemm as mg
from multigemm.__main__ import main
from multigemm.bench import reports
from multigemm.select import table as tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_tunings"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"),
]
SHAPE = "5,96,384,320"
BACKENDS = "cublas,triton"


def posed() -> mg.GroupedGemmProblem:
    a, b = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((480, 320), (5, 320, 384)))
    return mg.GroupedGemmProblem(a, b, sizes=torch.tensor([96] * 5, device="cuda"))


def test_one_command_benchmarks_backends_beside_peers(tmp_path: Path) -> None:
    words = ["--backend", f"{BACKENDS},auto", "--device", "cuda:0", "--budget-ms", "20", "--reps", "15"]
    assert main(["bench", "--shape", SHAPE, *words, "--out", str(tmp_path), "--quiet"]) == 0
    report = reports.read(tmp_path)
    timed = {row.entry: row for row in report.timed()}
    assert {"triton", "cublas", "cublas[host sizes]", "auto", "torch_grouped", "torch_loop", "dense"} <= set(timed)
    for name in ("triton", "cublas"):
        row = timed[name]
        assert row.graph is not None
        assert row.hot_us
        assert row.host_us
        assert row.problem_class.startswith("jagged_m g8 m* n384 k320 t512 bfloat16/row")
    assert report.rates["bf16"]["tflops"] > 20
    assert (tmp_path / "report.md").exists()


def test_tuning_keeps_what_auto_then_goes_by(tmp_path: Path) -> None:
    words = ["--backend", BACKENDS, "--configs", "2", "--time-budget", "60", "--no-record", "--quiet"]
    assert main(["tune", "--shape", SHAPE, *words, "--out", str(tmp_path / "t.json")]) == 0
    entries = json.loads((tmp_path / "t.json").read_text())["entries"]
    kinds = {entry["key"].split()[-1]: set(entry["backends"]) for entry in entries}
    assert kinds == {"device-sizes": {"cublas", "triton"}, "equal-sizes": {"cublas", "triton"}}
    tuning.table().keep([tuning.decoded(entry, "here") for entry in entries])
    told = mg.explain(posed())
    assert "the fastest in the table" in told.why
    assert told.chosen == min(entries[0]["backends"].items(), key=lambda item: item[1]["us"])[0]


def test_whole_layers_and_the_static_order_are_measured(tmp_path: Path) -> None:
    words = ["--device", "cuda:0", "--budget-ms", "20", "--reps", "15", "--json-only", "--quiet", "--floor", "770,3.0"]
    words += ["--backends", "triton,auto,auto-static", "--peers", "none", "--out", str(tmp_path)]
    assert main(["bench", "--suite", "layers,small", "--only", "Qwen3-30B:512/,small_g16", *words]) == 0
    timed = {(row.case, row.entry): row for row in reports.read(tmp_path).timed()}
    for case in ("Qwen3-30B:512/forward/bf16", "Qwen3-30B:512/training/bf16"):
        for entry in ("fused", "steps", "fused[triton]", "steps[triton]"):
            assert timed[case, entry].graph is not None, timed[case, entry].notes
    assert timed["small_g16/uniform/bf16", "auto-static"].kernel.partition(": ")[0] in (
        "cupy",
        "triton",
        "numba",
        "cublas",
    )
