"""Experts on several processes give what one process gives, and never hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.expert_parallel_worker import TIMEOUT

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def start(ranks: int, scenario: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """All ranks of a scenario, to their ends."""
    path = folder / "rendezvous"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.expert_parallel_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(path), scenario],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    done = []
    for process in processes:
        out, err = process.communicate(timeout=200)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


@pytest.mark.parametrize(("ranks", "scenario"), [(2, "agree"), (4, "agree"), (2, "dtensor")])
def test_all_ranks_agree_with_one_process(ranks: int, scenario: str, tmp_path: Path) -> None:
    """Uneven tokens, ranks without tokens, all tokens on one expert; with and without chunks."""
    for result in start(ranks, scenario, tmp_path):
        assert result.returncode == 0, result.stderr[-3000:]
        assert "fine" in result.stdout


def test_a_rank_that_dies_ends_the_others_with_a_clear_error(tmp_path: Path) -> None:
    began = time.monotonic()
    results = start(2, "die", tmp_path)
    assert results[-1].returncode == 7
    for result in results[:-1]:
        assert result.returncode == 3, result.stderr[-3000:]
        assert "one of them has probably died or hangs" in result.stdout
    assert time.monotonic() - began < TIMEOUT + 60
