"""Operands against pages that are not mapped: right kernels do not notice, a read past the end does not survive."""

import subprocess
import sys

import pytest
import torch

from multigemm.testing.case import Case, Layout
from multigemm.testing.cliff import Cliffs, on_a_cliff
from multigemm.testing.memory import Arena
from multigemm.testing.oracles import check
from multigemm.testing.strategies import EMULATED, random_case
from multigemm.testing.subject import Subject
from multigemm.testing.world import Stand, World

CPU = torch.device("cpu")


@pytest.mark.parametrize("behind", [True, False])
def test_a_tensor_keeps_its_contents_and_its_alignment(behind: bool) -> None:
    arena = Arena()
    region = arena.add(torch.float16, (5, 7), Layout("col", pad=1, shift=3))
    memory = arena.random_bytes(1)
    cliffs = Cliffs(CPU)
    moved = cliffs.place(region, memory, behind=behind)
    assert torch.equal(moved.view(torch.int16), region.bits(memory))
    assert moved.stride() == region.strides
    assert (moved.data_ptr() - region.view(memory).data_ptr()) % 16 == 0
    block = cliffs.blocks[0]
    last = moved.data_ptr() + 2 * (sum((n - 1) * s for n, s in zip(moved.shape, moved.stride(), strict=True)) + 1)
    gap = block.end - last if behind else moved.data_ptr() - block.begin
    assert 0 <= gap < 16


def test_right_kernels_do_not_notice() -> None:
    ran = 0
    for seed in range(60):
        stand, subject = Stand.build(World.build(random_case(seed, EMULATED)), CPU), Subject("cpu")
        outcome = check(stand, subject)
        if outcome.ran:
            ran += on_a_cliff(stand, subject, outcome, seed)
            assert outcome.ok, outcome.findings
    assert ran > 40


def test_a_read_past_the_end_ends_the_process() -> None:
    code = (
        "import ctypes, torch\n"
        "from multigemm.testing.cliff import Cliffs\n"
        "from multigemm.testing.memory import Arena\n"
        "arena = Arena()\n"
        "region = arena.add(torch.float32, (4, 8))\n"
        "moved = Cliffs(torch.device('cpu')).place(region, arena.random_bytes(1), behind=True)\n"
        "ctypes.c_float.from_address(moved.data_ptr() + 4 * 31).value\n"
        "print('the last element', flush=True)\n"
        "ctypes.c_float.from_address(moved.data_ptr() + 4 * 32).value\n"
        "print('the next one', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode < 0, done
    assert done.stdout == "the last element\n"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cublas", "triton", "cupy", "numba"])
def test_right_kernels_do_not_notice_on_a_gpu(backend: str) -> None:
    subject, device = Subject(backend), torch.device("cuda")
    for dtype in ("bfloat16", "float32"):
        case = Case(dtype=dtype, n=40, k=24, lengths=(17, 0, 30, 5), head=3, tail=9, mode="normal")
        stand = Stand.build(World.build(case), device)
        outcome = check(stand, subject)
        if outcome.ran:
            for seed in range(4):
                on_a_cliff(stand, subject, outcome, seed)
            assert outcome.ok, outcome.findings
