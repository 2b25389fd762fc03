"""Programs in a Python of their own, and backends as `pip install` would leave them behind for one."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
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
    given = [str(word) for word in words]
    if anew:
        command = [sys.executable, "-W", "ignore", *given]
        done = subprocess.run(command, env=variables, cwd=cwd, timeout=timeout, capture_output=True, text=True)
    else:
        [done] = forked(given, [variables], cwd, timeout)
    if code is not None:
        assert done.returncode == code, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def run_ranks(*words: str | Path, cwd: Path, ranks: int = 2, timeout: float = 280.0) -> str:
    """What the first rank of `torchrun python WORDS` printed; all have to end well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    counts = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    numbers = (dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(ranks))
    all_variables = [{**inherited(), **OWN, **NO_GPU, **meeting, **counts, **number} for number in numbers]
    ended = forked([str(word) for word in words], all_variables, cwd, timeout)
    assert not any(done.returncode for done in ended), [(done.returncode, done.stderr[-3000:]) for done in ended]
    return ended[0].stdout


def forked(words: list[str], all_variables: list[dict[str, str]], cwd: Path, timeout: float) -> list[Ended]:
    """A program in a child of the server for each of the environments."""
    to, answers = server().stdin, server().stdout
    assert to is not None and answers is not None
    with TemporaryDirectory() as top:
        folders = [Path(top, str(number)) for number in range(len(all_variables))]
        asked: list[dict[str, Any]] = []
        for variables, folder in zip(all_variables, folders, strict=True):
            folder.mkdir()
            places = {"cwd": str(cwd), "folder": str(folder)}
            asked.append({"words": words, "environment": variables, "limit_s": math.ceil(timeout), **places})
        print(json.dumps(asked), file=to, flush=True)
        codes = json.loads(answers.readline())
        said = [[(folder / name).read_text() for name in ("out", "err")] for folder in folders]
    if -signal.SIGALRM in codes:
        raise subprocess.TimeoutExpired(words, timeout, *said[codes.index(-signal.SIGALRM)])
    return [subprocess.CompletedProcess(words, code, *texts) for code, texts in zip(codes, said, strict=True)]


def install_backends(folder: Path, source: str, *names: str) -> dict[str, str]:
    """Writes a package whose module has a backend under each name; the environment in which Python finds it."""
    (folder / "multigemm_planted.py").write_text(source)
    info = folder / "multigemm_planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multigemm-planted\nVersion: 1.0\n")
    points = "".join(f"{name} = multigemm_planted:{name}\n" for name in names)
    (info / "entry_points.txt").write_text(f"[multigemm.backends]\n{points}")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
