"""Every example runs, quickly, and shows what it promises."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.python_process import NO_GPU, TORCHRUN, run_python

ROOT = Path(__file__).parents[2]
SHOWS = {
    "jagged_batch.py": ["8 products in one call", "chosen:", "gradient (the empty sentence's is exactly 0)"],
    "batch_invariant.py": ["the same logits, bit for bit, and the same tokens", "without it:"],
    "moe_language_model.py": ["apart: fused from plain", "another seed"],
    "moe_training.py": ["one network", "columns: inputs that each expert got", "times smaller"],
    "transformers_switch.py": ["logits: largest difference", "generated tokens equal: True", "one training step"],
    "expert_parallel.py": ["rank 0 of 2", "rank 1 of 2", "rank 0: loss", "rank 1: loss"],
    "own_backend/run.py": ["null, padded", "one padded bmm", "there is no epilogue here"],
}
LIMIT = 60
ABORT_AT_EXIT = "terminate called without an active exception"
"""What PyTorch 2.13 says in one of a dozen runs on a busy machine: after `DTensor.from_local` a gloo group outlives
`destroy_process_group`, and the end of its process may abort (pytorch issue 190489)."""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "why"), [("host_time.py", "no CUDA GPU"), ("before_hopper.py", "no Hopper GPU")])
def test_a_measurement_that_cannot_run_here_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    assert end.value.code == 2
    assert f"torch sees {why}" in capsys.readouterr().err


def test_no_example_is_forgotten() -> None:
    scripts = {str(p.relative_to(ROOT / "examples")) for p in (ROOT / "examples").rglob("*.py")}
    assert scripts == {*SHOWS, "own_backend/multigemm_padded.py"}


IN_THIS_PROCESS = ("jagged_batch.py", "batch_invariant.py", "moe_training.py")
"""Examples that start no process, and change nothing that lasts."""


@pytest.mark.slow
@pytest.mark.parametrize("script", IN_THIS_PROCESS)
def test_example(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    start = time.perf_counter()
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    shown = capsys.readouterr().out
    for words in SHOWS[script]:
        assert words in shown
    assert time.perf_counter() - start < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("script", [name for name in SHOWS if name not in IN_THIS_PROCESS])
def test_example_of_several_processes_or_plugins(script: str) -> None:
    if "transformers" in script and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install transformers")
    start = time.perf_counter()
    launcher = TORCHRUN if script == "expert_parallel.py" else ()
    code = None if launcher else 0
    done = run_python(*launcher, f"examples/{script}", timeout=4 * LIMIT, environment=NO_GPU, code=code)
    assert done.returncode == 0 or ABORT_AT_EXIT in done.stderr, done.stderr[-3000:]
    for words in SHOWS[script]:
        assert words in done.stdout, done.stdout[-2000:]
    assert time.perf_counter() - start < LIMIT


NOTEBOOK = ROOT / "examples" / "grouped_gemm.ipynb"


def test_the_notebook_holds_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """As plain code, in its own process: Triton and Numba run in their emulators there."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    parts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = tmp_path / "notebook.py"
    program.write_text("import matplotlib\n\nmatplotlib.use('Agg')\n\n" + "\n\n".join(parts))
    done = run_python(program, cwd=tmp_path, timeout=4 * LIMIT, environment=NO_GPU)
    assert "triton   emulated" in done.stdout
    assert "elements are right" in done.stdout


def test_the_readme_does_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for elsewhere, here in (('device="cuda"', 'device="cpu"'), ('backend="triton"', 'backend="cpu"')):
        assert elsewhere in code
        code = code.replace(elsewhere, here)
    exec(code.replace('backend="cupy"', 'backend="cpu"'), {})
    shown = capsys.readouterr().out
    assert "chosen: cpu" in shown
    assert "elements are right" in shown
