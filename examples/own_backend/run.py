"""A backend of one's own, found by its entry point.

    pip install ./examples/own_backend    # registers it for good; optional for this script
    python examples/own_backend/run.py

Without the installation, this script puts the entry point where pip would have put it, in a
temporary folder. Shows the new name in the list, what it refuses and why, and its answers checked
against the reference.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import torch

import multigemm as mg

HERE = Path(__file__).parent


def register(folder: Path) -> None:
    """Writes the metadata of `pip install` into `folder` and puts it on the path."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("".join(lines))
    sys.path[:0] = [str(folder), str(HERE)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not entry_points(group="multigemm.backends", name="padded"):
            register(Path(folder))
        print("backends:", ", ".join(b.name for b in mg.list_backends()))
        torch.manual_seed(0)
        tokens, matrices = torch.randn(40, 32), torch.randn(4, 32, 16)
        for sizes in ([10, 0, 25, 5], [40, 0, 0, 0], [0, 0, 0, 3]):
            problem = mg.GroupedGemmProblem(tokens, matrices, sizes=sizes)
            plan = mg.plan(problem, backend="padded", config={"multiple": 4})
            verdict = mg.verify(problem, plan())
            print(f"sizes {sizes}: {plan}\n  {verdict}")
            assert verdict.ok
        try:
            mg.grouped_gemm(tokens, matrices, sizes=sizes, activation="silu", backend="padded")
        except mg.BackendUnsupported as refusal:
            print(refusal)


if __name__ == "__main__":
    main()
