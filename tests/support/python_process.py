"""Programs in a Python of their own, and backends as `pip install` would leave them behind for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
Environment = Mapping[str, str]
NOTHING: Environment = {}
NO_GPU: Environment = {"CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_python(
    *words: str | Path,
    cwd: Path = ROOT,
    timeout: float = 280.0,
    code: int | None = 0,
    environment: Environment = NOTHING,
) -> subprocess.CompletedProcess[str]:
    """What `python WORDS` printed. It has the repository on its path, one thread, and no emulator but one that
    `environment` asks for; it has to end with `code`, or as it likes if that is None."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "NUMBA_"))}
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env={**inherited, **own, **environment}, cwd=cwd, timeout=timeout, capture_output=True, text=True,
    )  # fmt: skip
    if code is not None:
        assert done.returncode == code, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def install_backends(folder: Path, source: str, *names: str) -> dict[str, str]:
    """Writes a package whose module has a backend under each name; the environment in which Python finds it."""
    (folder / "multigemm_planted.py").write_text(source)
    info = folder / "multigemm_planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multigemm-planted\nVersion: 1.0\n")
    points = "".join(f"{name} = multigemm_planted:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[multigemm.backends]\n{points}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
