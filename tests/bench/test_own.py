"""A problem of one's own: every form and epilogue, nothing of the user's written, from Python and from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.__main__ import main
from multigemm.bench.own import own_tensors
from tests.support.bench_entries import FAST, measured


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


PROBLEMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "rows": (r(12, 8), r(3, 8, 4), {"sizes": [5, 0, 7]}),
    "rows in part": (r(15, 8), r(3, 8, 4), {"offsets": [2, 5, 5, 12]}),
    "columns": (r(3, 6, 8), r(8, 10), {"sizes": [5, 0, 5], "jagged": "n"}),
    "columns with a bias": (r(3, 6, 8), r(8, 10), {"sizes": [5, 0, 5], "jagged": "n", "bias": r(10)}),
    "gradients": (r(6, 12).T.contiguous().T, r(12, 4), {"sizes": [5, 0, 7], "jagged": "k"}),
    "list": ([r(3, 8), r(5, 6)], [r(8, 4), r(6, 7)], {"activation": "silu"}),
    "list with biases": ([r(3, 8), r(5, 6)], [r(8, 4), r(6, 7)], {"bias": [r(4), r(7)]}),
    "whole numbers with a bias": (
        torch.ones(6, 8, dtype=torch.int8),
        torch.ones(8, 4, dtype=torch.int8),
        {"bias": torch.ones(4, dtype=torch.int32)},
    ),
    "batch": (r(3, 6, 8), r(3, 8, 4), {"bias": r(3, 4)}),
    "masked": (r(3, 6, 8), r(3, 8, 4), {"valid_rows": [2, 0, 6]}),
    "one": (r(6, 8), r(8, 4), {"alpha": 2.0}),
    "mixed": (r(12, 8, dtype=torch.bfloat16), r(3, 8, 4), {"sizes": [5, 0, 7]}),
    "tf32": (r(12, 8), r(3, 8, 4), {"sizes": [5, 0, 7], "precision": "tf32"}),
    "numpy": (np.ones((12, 8), np.float32), np.ones((3, 8, 4), np.float32), {"sizes": [5, 0, 7]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_of_ones_own_is_checked_and_timed(name: str) -> None:
    a, b, keywords = PROBLEMS[name]
    posed = mg.GroupedGemmProblem(a, b, **keywords)
    report = mg.benchmark(posed, ["cpu"], ["torch_loop"], FAST)
    rows = {row.entry: row for row in report.rows}
    assert rows["cpu"].status == "ok", rows["cpu"].reason
    assert (rows["cpu"].flops, rows["cpu"].dtype) == (posed.flops, "tf32" if name == "tf32" else rows["cpu"].dtype)
    assert rows["torch_loop"].status == (
        "ok" if name in ("rows", "columns", "gradients", "masked", "numpy") else "refused"
    )
    assert "microseconds" in str(report)


def test_nothing_of_the_users_is_written_and_c_stays_what_it_was() -> None:
    a, b, out = r(12, 8), r(3, 8, 4), r(12, 4)
    before = out.clone()
    posed = mg.GroupedGemmProblem(a, b, sizes=[5, 0, 7], c=out, beta=1.0, out=out)
    report = mg.benchmark(posed, ["cpu"], ["torch_loop"], FAST)
    assert {row.entry: row.status for row in report.rows}["cpu"] == "ok"
    assert torch.equal(out, before)


def test_a_wrong_answer_to_a_problem_with_an_epilogue_is_found() -> None:
    tensors = own_tensors(mg.GroupedGemmProblem(r(6, 8), r(2, 8, 4), sizes=[2, 4], activation="relu"), "own")
    truth = tensors.reference()
    assert "wrong answer" in truth.verdict(tensors.out)
    mg.solve(tensors.problem, "cpu")
    assert truth.verdict(tensors.out) == ""
    tensors.products()[1][2][3, 3] += 1
    assert "1 of" in truth.verdict(tensors.out)


@pytest.mark.parametrize(
    "text",
    [
        "problem = mg.GroupedGemmProblem(a, b, sizes=[3, 5])",
        "def problem():\n    return mg.GroupedGemmProblem(a, b, sizes=[3, 5])",
    ],
    ids=["value", "function"],
)
def test_the_command_takes_a_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import torch\nimport multigemm as mg\na, b = torch.ones(8, 4), torch.ones(2, 4, 6)\n{text}\n"
    )
    rows = measured(tmp_path, f"--problem {tmp_path / 'mine.py'}").rows
    assert {row.case for row in rows} == {"mine/given/fp32"}
    assert {row.entry: row.status for row in rows}["cpu"] == "ok"


def test_a_file_without_a_problem_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("problem = 3\n")
    assert main(["bench", "--problem", str(tmp_path / "mine.py"), "--device", "cpu"]) == 2
    assert "it has to define `problem`" in capsys.readouterr().err


def test_what_is_fused_is_refused_by_name() -> None:
    problem = mg.GroupedGemmProblem(r(12, 8), r(3, 8, 4), sizes=[5, 0, 7], row_scale=r(12), activation="swiglu")
    with pytest.raises(mg.InvalidProblem, match="benchmarks of row_scale, gate come later"):
        mg.benchmark(problem)
