"""Experts spread over several processes: they agree with one process, and end together where one cannot go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
TIMEOUT = 20
"""Seconds after which a rank gives up on another one."""
SHORT = 3
"""The same where one of them will not answer."""
LIMIT = 90
"""Seconds after which the ranks of a test are killed."""
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


class Launcher:
    """A process that forks the ranks of one scenario after the other."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tests.support.expert_parallel_worker"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        self.folder, self.runs = folder, 0

    def run(self, ranks: int, scenario: str, timeout: int) -> list[tuple[int, str]]:
        """Exit code and words of each rank."""
        self.runs += 1
        folder = self.folder / str(self.runs)
        folder.mkdir()
        asked = {"ranks": ranks, "scenario": scenario, "folder": str(folder), "timeout": timeout, "limit": LIMIT}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        codes = json.loads(self.process.stdout.readline())
        said = [(folder / f"{scenario}-{rank}").read_text() for rank in range(ranks)]
        return list(zip(codes, said, strict=True))


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    found = Launcher(tmp_path_factory.mktemp("ranks"))
    yield found
    found.process.kill()
    found.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "scenario"), [(2, "agree"), (4, "agree"), (2, "dtensor")])
def test_all_ranks_agree_with_one_process(ranks: int, scenario: str, launcher: Launcher) -> None:
    """Uneven tokens, ranks without tokens or experts, all tokens on one expert; with and without chunks; fused."""
    for code, said in launcher.run(ranks, scenario, TIMEOUT):
        assert code == 0 and "fine" in said, said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "read"), [(4, [2]), (2, [4, 1])])
def test_a_checkpoint_is_read_by_another_number_of_ranks(wrote: int, read: list[int], launcher: Launcher) -> None:
    """Weights and the optimizer's moments, by torch.distributed.checkpoint."""
    for ranks, scenario in ((wrote, "save"), *((number, "load") for number in read)):
        for code, said in launcher.run(ranks, scenario, TIMEOUT):
            assert code == 0 and "fine" in said, said[-3000:]


@pytest.mark.slow
def test_data_parallel_copies_are_sharded_round_spread_experts(launcher: Launcher) -> None:
    for code, said in launcher.run(4, "sharded", TIMEOUT):
        assert code == 0 and "fine" in said, said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bad_input_or_silence_of_one_rank_ends_all_of_them(ranks: int, launcher: Launcher) -> None:
    """A wrong shape, dtype, or expert on one rank raises on every rank; one that hangs ends the others in time."""
    for code, said in launcher.run(ranks, "faults", SHORT):
        assert code == 0 and "ended" in said, said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_dies_ends_the_others_with_a_clear_error(ranks: int, launcher: Launcher) -> None:
    *others, last = launcher.run(ranks, "die", SHORT)
    assert last[0] == 7
    for code, said in others:
        assert code == 0 and "ended" in said, said[-3000:]
