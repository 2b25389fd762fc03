"""spec + config -> Recipe: find or compile the kernel, then fix one problem's arguments.

`bind` packs every argument into one buffer and chooses the grid from what the host knows (an upper
bound of the number of tiles, so that token counts on the device are never read back). The launch of a
packed form can follow its operands; a list has a table of them in device memory, and is bound anew.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from multigemm.backend import Bind, Launch, Recipe
from multigemm.backends.numba.arguments import (
    Call,
    MapEncoder,
    Table,
    call_of,
    epilogue_words,
    list_table,
    packed_arguments,
)
from multigemm.backends.numba.build import OVERLAP_MINIMUM, image
from multigemm.backends.numba.choice import obstacle, why
from multigemm.backends.numba.config import (
    COLUMNS,
    Config,
    GenericConfig,
    HopperConfig,
    Layout,
    MmaConfig,
    Signature,
    effective,
    shared_bytes,
    signature_of,
)
from multigemm.backends.numba.support import capability_of
from multigemm.cuda import driver
from multigemm.cuda.arguments import join
from multigemm.cuda.device import index_of, processors, to_device
from multigemm.cuda.device_fields import DeviceFields
from multigemm.cuda.launch import NOTHING, BoundKernel, Kernel, without_move
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import Operands
from multigemm.planning.tiles import list_tiles, most_packed_tiles
from multigemm.problem.spec import ProblemSpec

SIMULATOR_SWITCH_SECONDS = 2e-5
_one_at_a_time = threading.RLock()
"""The simulator runs one kernel at a time, and the switch interval belongs to the whole process."""
ZEROS_PER_BLOCK = 16384
COUNTERS = bytes(8)
"""The two counters of the Hopper kernel's scheduler, which start at 0."""


def bound_on_tiles(ops: Operands, call: Call, rows: int, columns: int) -> Callable[[int], int]:
    """Number of rows -> an upper bound on the tiles, known without reading any size; it keeps no operand alive."""
    groups, n, jagged = call.groups, call.n, ops.spec.jagged
    if ops.spec.form == "per_group":
        listed = list_tiles(((a.shape[0], b.shape[1]) for a, b in zip(ops.a, ops.b, strict=True)), rows, columns)
        return lambda _: listed
    return lambda m: most_packed_tiles(jagged, groups, m, n, rows, columns)


def zeroing_blocks(call: Call, m: int) -> int:
    """Blocks that are worth starting for rows that no group owns (none, where the caller owns them)."""
    if not call.zeroes:
        return 0
    return -(-m * call.n * (call.groups if call.valid else 1) // ZEROS_PER_BLOCK)


@cache
def kernel_of(config: Config, signature: Signature, index: int, shared: int) -> Kernel:
    """The loaded kernel: one for each config, signature and device of this process."""
    made = image(config, signature, capability_of(torch.device("cuda", index)))
    kernel = Kernel(made.cubin, made.entry, index)
    if shared > 0:
        kernel.allow_shared(shared)
    return kernel


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """The recipe for a spec: compiles (or loads) the kernel now, binds later."""
    if reason := obstacle(config, spec, device):
        raise InvalidSetting(f"{config} cannot run this problem: {reason}")
    bind: Bind
    if isinstance(config, GenericConfig) and device.type == "cpu":
        bind = _emulated(config, spec)
    else:
        bind = bind_for(config, spec, index_of(device))
    return Recipe(kernel=config.kernel, config=config, bind=bind, why=why(config, spec, device))


def bind_for(config: Config, spec: ProblemSpec, index: int) -> Bind:
    """The bind of a config on a GPU."""
    if isinstance(config, HopperConfig):
        return _hopper(config, spec, index)
    return _tiled(config, spec, index, shared_bytes(config) if isinstance(config, MmaConfig) else 0)


def _hopper(config: HopperConfig, spec: ProblemSpec, index: int) -> Bind:
    """Tensor maps, one block per multiprocessor at most.

    The maps are uploaded in front of a launch that may overlap with the kernel before it. An upload is no kernel, so
    what overlaps is the kernel behind it at most, and the maps of a copy never change.
    """
    signature = effective(config, signature_of(spec))
    shared, style, most_blocks = Layout(config, signature).bytes, epilogue_words(spec), processors(index)
    kernel, maps = kernel_of(config, signature, index, shared), MapEncoder(config, signature)

    def bind(ops: Operands) -> Launch:
        table = list_table(ops) if spec.form == "per_group" else None
        on_device = None if table is None else to_device(table, ops.device)
        call = call_of(ops, style, on_device)
        most_tiles = bound_on_tiles(ops, call, config.n_max, COLUMNS * config.cluster)

        def grid_for(m: int) -> int:
            tiles = most_tiles(m) * config.cluster
            blocks = min(max(tiles, zeroing_blocks(call, m)), most_blocks)
            return -(-blocks // config.cluster) * config.cluster

        grid = grid_for(call.m)
        if grid == 0:
            return NOTHING
        with driver.on_device(index):
            content = join([*(maps.of_call(call) if table is None else maps.of_list(table)), COUNTERS])
        uploaded = DeviceFields(content, ops.device)
        counters = uploaded.address.at(uploaded.address + len(content) - len(COUNTERS))
        launch = kernel.bound(
            packed_arguments(call, ops.alpha, ops.beta, uploaded.address, counters), grid=grid,
            threads=config.threads, shared=shared, cluster=config.cluster, overlap=True, fields=uploaded,
            keep=kept(on_device), grid_for=grid_for,
        )  # fmt: skip
        return _movable(launch, table)

    return bind


def _tiled(config: GenericConfig | MmaConfig, spec: ProblemSpec, index: int, shared: int) -> Bind:
    """As many blocks as fit on the device; each walks the tiles in strides."""
    kernel, style = kernel_of(config, effective(config, signature_of(spec)), index, shared), epilogue_words(spec)
    overlap = isinstance(config, MmaConfig) and capability_of(torch.device("cuda", index)) >= OVERLAP_MINIMUM
    resident = kernel.blocks_per_processor(config.threads, shared) * processors(index)

    def bind(ops: Operands) -> Launch:
        table = list_table(ops) if spec.form == "per_group" else None
        on_device = None if table is None else to_device(table, ops.device)
        call = call_of(ops, style, on_device)
        most_tiles = bound_on_tiles(ops, call, config.bm, config.bn)

        def grid_for(m: int) -> int:
            return min(max(most_tiles(m), zeroing_blocks(call, m)), resident)

        grid = grid_for(call.m)
        if grid == 0:
            return NOTHING
        launch = kernel.bound(
            packed_arguments(call, ops.alpha, ops.beta), grid=grid, threads=config.threads, shared=shared,
            overlap=overlap, keep=kept(on_device), grid_for=grid_for,
        )  # fmt: skip
        return _movable(launch, table)

    return bind


def kept(table: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """What a launch keeps alive: a list's table in device memory; operands belong to whoever launches."""
    return () if table is None else (table,)


def _movable(launch: BoundKernel, table: Table | None) -> Launch:
    """The launch; of a list without `move`, since the table in device memory holds the operands' addresses."""
    return launch if table is None else without_move(launch)


def _emulated(config: GenericConfig, spec: ProblemSpec) -> Bind:
    from multigemm.backends.numba.kernels.generic import make_kernel

    kernel: Any = make_kernel(config, signature_of(spec))
    style = epilogue_words(spec)

    def bind(ops: Operands) -> Launch:
        host = torch.from_numpy(list_table(ops)) if ops.spec.form == "per_group" else None
        call = call_of(ops, style, host)
        tiles = bound_on_tiles(ops, call, config.bm, config.bn)(call.m)
        # Two blocks at most: enough to walk tiles in strides, cheap enough for many checks.
        grid = max(1, min(tiles, 2))

        def launch(_table: torch.Tensor | None = host) -> None:
            with _one_at_a_time, _simulating():
                kernel[grid, config.threads](call, ops.alpha, ops.beta)

        return launch

    return bind


@contextmanager
def _simulating() -> Iterator[None]:
    """Makes the simulator quick and quiet.

    Its manager polls its threads in a busy loop and holds them up for a whole switch interval each
    time; and NumPy scalars warn of the NaN and infinities that a GPU computes silently.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SIMULATOR_SWITCH_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.setswitchinterval(before)
