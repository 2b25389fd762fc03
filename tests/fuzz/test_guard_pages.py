"""Operands against pages that are not mapped: right kernels do not notice, a read past the end does not survive."""

from typing import Any

import pytest
import torch

from multigemm.testing.case import Case, Layout
from multigemm.testing.deep_oracles import edge_of_memory
from multigemm.testing.guard_pages import GuardedBlocks, banded_allocations
from multigemm.testing.oracles import check
from multigemm.testing.placed_case import Arena, DeviceCase
from multigemm.testing.strategies import EMULATED, random_case
from multigemm.testing.subject import Subject
from tests.model_mutants.kernel import ModelBackend
from tests.support.python_process import run_python

CPU = torch.device("cpu")


@pytest.mark.parametrize("behind", [True, False])
def test_a_tensor_keeps_its_contents_and_its_alignment(behind: bool) -> None:
    arena = Arena()
    region = arena.add(torch.float16, (5, 7), Layout("col", pad=1, shift=3))
    memory = arena.random_bytes(1)
    pool = GuardedBlocks(CPU)
    moved = pool.place(region, memory, behind=behind)
    assert torch.equal(moved.view(torch.int16), region.bits(memory))
    assert moved.stride() == region.strides
    assert (moved.data_ptr() - region.view(memory).data_ptr()) % 16 == 0
    block = pool.blocks[0]
    last = moved.data_ptr() + 2 * (sum((n - 1) * s for n, s in zip(moved.shape, moved.stride(), strict=True)) + 1)
    gap = block.end - last if behind else moved.data_ptr() - block.begin
    assert 0 <= gap < 16


def test_right_kernels_do_not_notice() -> None:
    ran = 0
    for seed in range(60):
        device_case, subject = DeviceCase.from_case(random_case(seed, EMULATED), CPU), Subject("cpu")
        outcome = check(device_case, subject)
        if outcome.ran:
            ran += edge_of_memory(device_case, subject, outcome, seed)
            assert outcome.ok, outcome.findings
    assert ran > 40


@pytest.mark.slow
def test_a_read_past_the_end_ends_the_process() -> None:
    code = (
        "import ctypes, torch\n"
        "from multigemm.testing.guard_pages import GuardedBlocks\n"
        "from multigemm.testing.placed_case import Arena\n"
        "arena = Arena()\n"
        "region = arena.add(torch.float32, (4, 8))\n"
        "moved = GuardedBlocks(torch.device('cpu')).place(region, arena.random_bytes(1), behind=True)\n"
        "ctypes.c_float.from_address(moved.data_ptr() + 4 * 31).value\n"
        "print('the last element', flush=True)\n"
        "ctypes.c_float.from_address(moved.data_ptr() + 4 * 32).value\n"
        "print('the next one', flush=True)\n"
    )
    done = run_python("-c", code, code=None)
    assert done.returncode < 0, done
    assert done.stdout == "the last element\n"


class Careless(ModelBackend):
    """Its plans take a workspace, and touch the element behind it."""

    writes = True

    def bind(self, ops: Any, config: Any) -> Any:
        workspace, launch = torch.empty((3, 5), dtype=torch.int32), super().bind(ops, config)
        behind = torch.as_strided(workspace, (16,), (1,))

        def run() -> None:
            launch()
            if self.writes:
                behind[15] = 7
            elif not behind[15]:
                ops.out.zero_()

        return run


@pytest.mark.parametrize(("writes", "oracle", "seed"), [(True, "workspace", 1), (False, "edge of memory", 0)])
def test_the_memory_of_a_backend_has_bands_too(writes: bool, oracle: str, seed: int) -> None:
    backend = Careless("careless")
    case = Case(dtype="float32", n=4, k=4, lengths=(17, 0, 30, 5), mode="int")
    device_case, subject = DeviceCase.from_case(case, CPU), Subject(backend)
    backend.writes = False
    with banded_allocations(0xFF):
        outcome = check(device_case, subject)
    assert outcome.ok, outcome.findings
    backend.writes = writes
    edge_of_memory(device_case, subject, outcome, seed)
    assert [finding.oracle for finding in outcome.findings] == [oracle]


def test_allocations_between_bands_are_as_torch_makes_them() -> None:
    with banded_allocations(0xFF) as guards:
        made = [
            torch.zeros(3, 2),
            torch.zeros((4,), dtype=torch.int64),
            torch.empty(0),
            torch.zeros(2, pin_memory=False),
        ]
    assert [(t.shape, t.dtype) for t in made] == [
        ((3, 2), torch.float32), ((4,), torch.int64), ((0,), torch.float32), ((2,), torch.float32)
    ]  # fmt: skip
    assert not any(t.any() for t in made) and len(guards.bands) == 4 and not guards.written()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cublas", "triton", "cupy", "numba"])
def test_right_kernels_do_not_notice_on_a_gpu(backend: str) -> None:
    subject, device = Subject(backend), torch.device("cuda")
    for dtype in ("bfloat16", "float32"):
        case = Case(dtype=dtype, n=40, k=24, lengths=(17, 0, 30, 5), head=3, tail=9, mode="normal")
        device_case = DeviceCase.from_case(case, device)
        outcome = check(device_case, subject)
        if outcome.ran:
            for seed in range(4):
                edge_of_memory(device_case, subject, outcome, seed)
            assert outcome.ok, outcome.findings


def test_tensors_without_memory_get_no_bands() -> None:
    """A backend that asks a meta tensor for strides while it binds was reported as failed."""
    with banded_allocations(0xA5) as bands:
        assert torch.empty((2, 3), dtype=torch.float16, device="meta").is_meta
        assert torch.zeros(4, device=torch.device("meta")).is_meta
        torch.empty(5)
    assert len(bands.bands) == 2 and bands.written() == 0
