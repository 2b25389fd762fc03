"""Backends as `pip install` would leave them behind: a module, and metadata with an entry point for each."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install_backends(folder: Path, source: str, *names: str) -> dict[str, str]:
    """Writes a package whose module has a backend under each name; the environment in which Python finds it."""
    (folder / "multigemm_planted.py").write_text(source)
    info = folder / "multigemm_planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multigemm-planted\nVersion: 1.0\n")
    points = "".join(f"{name} = multigemm_planted:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[multigemm.backends]\n{points}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
