"""The Hopper kernel of numba, all of its warps and clusters, in a model whose copies and products take any time they
like.

Each problem is of whole numbers, so its result is exact. The faults below show what the model would notice.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.numba.config import FLOAT8_LOW, FLOAT8_MEDIUM, FLOAT8_TALL, Float8Config
from tests.support.numba_lane_model import plain
from tests.support.numba_pipeline_faults import FAULTS, Fault
from tests.support.numba_pipeline_model import BASE, LINE, Machine
from tests.support.numba_pipeline_run import CASES, KERNELS, Problem, Run, source_of

pytestmark = pytest.mark.slow


def run(
    case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None, clusters: int = 2
) -> None:
    """One launch of a case in the model."""
    config, make = CASES[case]
    made = Run(config, make(), monkeypatch)
    machine = made.machine(seed, clusters)
    modules = kernel(machine, fault)
    made.launch(machine, modules, made.counts(modules, machine))
    made.check(machine)


MANY_GROUPS = "more groups than threads that count"


@pytest.mark.parametrize(
    ("case", "seed"), [*((case, 0) for case in CASES), *((c, 1) for c in CASES if c != MANY_GROUPS)]
)
def test_results_are_exact_in_any_order(case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many groups, whose tiles are like those of few, take as long as ten other cases: one order of them."""
    run(case, seed, kernel, monkeypatch)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", ["jagged k", "a list"])
def test_stages_of_a_long_k_are_as_large_as_any_tile_needs(
    case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups with a longer and with a shorter k, one after the other, in one ring."""
    monkeypatch.setattr(Run, "longest_k", 80)
    run(case, seed, kernel, monkeypatch)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of some orders: as a race, as warps that all wait, or in the result."""
    fault = FAULTS[name]
    if source_of(fault.module).count(fault.line) != 1:
        pytest.fail(f"not one line of {fault.module}.py: {fault.line}")
    for seed in range(12):
        try:
            with monkeypatch.context() as patch:
                run(fault.case, seed, kernel, patch, fault)
        except (AssertionError, KeyError, IndexError, OverflowError, ValueError):
            return
    pytest.fail("nothing was noticed")


# --- float8: the same way in, and consumers of its own -------------------------------------------------

FLOAT8: dict[str, tuple[Float8Config, Problem]] = {
    "jagged m": (FLOAT8_TALL, lambda: float8([300, 0, 5, 513], 264, 400)),
    "jagged m, low": (FLOAT8_LOW, lambda: float8([70, 1, 0, 64], 136, 130)),
    "jagged n": (FLOAT8_MEDIUM, lambda: float8([100, 0, 260, 7], 140, 144, jagged="n")),
    "batched": (FLOAT8_TALL, lambda: float8([2], 328, 272, m=270)),
    "masked": (FLOAT8_MEDIUM, lambda: float8([5, 0, 200], 264, 128, m=200, valid=True)),
}


def float8(
    sizes: list[int], n: int, k: int, *, m: int = 0, jagged: str = "", valid: bool = False
) -> mg.GroupedGemmProblem:
    """Random bytes, contiguous along k, in lines at multiples of 16 bytes. Jagged n: `n` rows."""

    def codes(*shape: int) -> Tensor:
        data = torch.randint(0, 100, (*shape[:-1], -(-shape[-1] // 16) * 16), dtype=torch.uint8)
        return data.view(torch.float8_e4m3fn)[..., : shape[-1]]

    groups, total = len(sizes), sum(sizes)
    if jagged:
        return mg.GroupedGemmProblem(codes(groups, n, k), codes(total, k).T, sizes=sizes, jagged="n")
    if m:
        more: dict[str, Any] = {"valid_rows": torch.tensor(sizes)} if valid else {}
        return mg.GroupedGemmProblem(codes(groups, m, k), codes(groups, n, k).mT, **more)
    return mg.GroupedGemmProblem(codes(total, k), codes(groups, n, k).mT, sizes=sizes)


class Float8Run(Run):
    """A float8 problem, whose consumers compare every stage with the operands."""

    def install(self, machine: Machine, tiles: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The float8 kernel's module with consumers that only look."""
        from multigemm.backends.numba.kernels import hopper_float8

        ops: Any = self.ops
        a, b = (x.view(torch.uint8).numpy() for x in (ops.a, ops.b.mT))
        form, layout = self.problem.spec.form, self.layout
        release = plain(sys.modules[f"{KERNELS}.hopper"].make_release(self.config, self.signature))
        self.seen = 0

        def stage(at: int, rows: int) -> Any:
            flat = at - BASE + np.arange(rows * LINE)
            return machine.block.shared[BASE + (flat ^ (flat >> 7 & 7) << 4)].reshape(rows, LINE)

        def padded(lines: Any, first: int, rows: int, k: int) -> Any:
            found = np.zeros((rows, LINE), np.uint8)
            part = lines[first : first + rows, k : k + LINE]
            found[: part.shape[0], : part.shape[1]] = part
            return found

        def dispatch(
            _: int, p: Any, q: Any, base: int, place: Any, parity: Any, depth: int, record: int, first: int
        ) -> Any:
            tile = tiles.read_tile(record)
            g, j = int(tiles.group_of(tile)), int(tile.column) + machine.block.rank * 128
            of_a = a if form == "jagged_m" else a[g]
            of_b = b if form == "jagged_n" else b[g]
            i, j = int(tile.row) + int(tile.start) * (form == "jagged_m"), j + int(tile.start) * (form == "jagged_n")
            for block in range(int(depth)):
                machine.mbarrier_wait(base + layout.full + place * 8, parity)
                at = BASE + int(place) * layout.stage_bytes
                if machine.warp.number == 4:
                    assert np.array_equal(stage(at, 128), padded(of_b, j, 128, block * 128))
                    rows = stage(at + 128 * LINE, int(tile.height))
                    assert np.array_equal(rows, padded(of_a, i, int(tile.height), block * 128))
                    self.seen += 1
                release(base, place)
                place = np.int32(place + 1)
                if place == layout.places:
                    place, parity = np.int32(0), np.int32(parity ^ 1)
            return None, place, parity

        fakes = {
            "ptx": machine, "cuda": machine, "make_dispatch": lambda *_: dispatch,
            "make_prefetch": lambda *_: lambda *_: None, "make_strip_write": lambda *_: lambda *_: machine.pause(),
            "read_tile": tiles.read_tile, "group_of": tiles.group_of,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(hopper_float8, name, fake)
        for name in ("share_of", "read_part", "depth_of"):
            monkeypatch.setattr(hopper_float8, name, plain(getattr(hopper_float8, name)))
        return hopper_float8


@pytest.mark.parametrize("case", FLOAT8)
@pytest.mark.parametrize("seed", range(2))
def test_stages_of_float8_hold_what_they_should(
    case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, make = FLOAT8[case]
    made = Float8Run(config, make(), monkeypatch)
    machine = made.machine(seed, 2)
    modules = kernel(machine)
    module = made.install(machine, modules[2], monkeypatch)
    made.launch(machine, modules, made.counts(modules, machine), module.make_consumer.__wrapped__)
    assert made.seen > 0
