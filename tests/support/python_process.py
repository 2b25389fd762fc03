"""Programs in a Python of their own, and backends as `pip install` would leave them behind for one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
Environment = Mapping[str, str]
NOTHING: Environment = {}
NO_GPU: Environment = {"CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OWN: Environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
Ended = subprocess.CompletedProcess[str]


def inherited() -> dict[str, str]:
    """The variables of this process but those that choose emulators."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "NUMBA_"))}


@cache
def server() -> subprocess.Popen[str]:
    """The `python_server` of this process, which ends with it."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("python_server.py"))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**inherited(), **OWN}, cwd=ROOT, **pipes)


def run_python(
    *words: str | Path,
    cwd: Path = ROOT,
    timeout: float = 280.0,
    code: int | None = 0,
    environment: Environment = NOTHING,
    anew: bool = False,
) -> Ended:
    """What `python WORDS` printed. It has the repository on its path, one thread, and no emulator but one that
    `environment` asks for; it has to end with `code`, or as it likes if that is None. It has imported torch, and
    nothing else, unless it starts `anew`."""
    variables = {**inherited(), **OWN, **environment}
    run = started if anew else forked
    done = run([str(word) for word in words], variables, cwd, timeout)
    if code is not None:
        assert done.returncode == code, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def started(words: list[str], variables: Environment, cwd: Path, timeout: float) -> Ended:
    """A program in a process of its own from the start."""
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, env=variables, cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False)


def forked(words: list[str], variables: Environment, cwd: Path, timeout: float) -> Ended:
    """A program in a child of the server."""
    to, answers = server().stdin, server().stdout
    assert to is not None and answers is not None
    with TemporaryDirectory() as folder:
        asked = {
            "words": words, "environment": variables, "cwd": str(cwd), "folder": folder, "limit_s": math.ceil(timeout)
        }  # fmt: skip
        print(json.dumps(asked), file=to, flush=True)
        returned, said = int(answers.readline()), [(Path(folder) / name).read_text() for name in ("out", "err")]
    if returned == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(words, timeout, *said)
    return subprocess.CompletedProcess(words, returned, *said)


def install_backends(folder: Path, source: str, *names: str) -> dict[str, str]:
    """Writes a package whose module has a backend under each name; the environment in which Python finds it."""
    (folder / "multigemm_planted.py").write_text(source)
    info = folder / "multigemm_planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multigemm-planted\nVersion: 1.0\n")
    points = "".join(f"{name} = multigemm_planted:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[multigemm.backends]\n{points}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
