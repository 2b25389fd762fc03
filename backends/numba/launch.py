"""spec + config -> Recipe: find or compile the kernel, then fix one problem's arguments.

`bind` packs every argument into one buffer and chooses the grid from what the host knows (an upper
bound of the number of tiles, so that token counts on the device are never read back); `launch` only
asks for the current stream.
"""

from __future__ import annotations

import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Bind, Launch, Recipe
from multigemm.backends.numba.build import OVERLAP_MINIMUM, image
from multigemm.backends.numba.call import Call, call_of
from multigemm.backends.numba.choice import obstacle
from multigemm.backends.numba.config import (
    Config,
    HopperConfig,
    MmaConfig,
    Signature,
    SimtConfig,
    effective,
    signature_of,
)
from multigemm.backends.numba.driver import Function
from multigemm.backends.numba.hopper_maps import tensor_maps
from multigemm.backends.numba.hopper_shape import COLUMNS, Layout
from multigemm.backends.numba.mma_shape import shared_bytes
from multigemm.backends.numba.support import capability_of
from multigemm.cuda.device import to_device
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import TABLE, Operands, group_table
from multigemm.problem.spec import ProblemSpec

SIMULATOR_SWITCH_SECONDS = 2e-5
_one_at_a_time = threading.Lock()
"""The simulator runs one kernel at a time, and the switch interval belongs to the whole process."""
ZEROS_PER_BLOCK = 16384


def list_table(ops: Operands) -> npt.NDArray[np.int64]:
    """The host table of a list problem; alpha = 0 reads neither A nor B, which is K = 0."""
    table = group_table(ops)
    if ops.spec.alpha == "zero":
        table[:, TABLE.K] = 0
    return table


def device_table(ops: Operands) -> tuple[Tensor | None, npt.NDArray[np.int64] | None]:
    """The per-group table on the device and on the host; None, None for a packed form."""
    if ops.spec.form != "per_group":
        return None, None
    table = list_table(ops)
    return to_device(table, ops.device), table


def most_tiles(call: Call, table: npt.NDArray[np.int64] | None, bm: int, bn: int) -> int:
    """An upper bound of the number of tiles, from what the host knows."""
    if table is not None:
        return int((-(-table[:, TABLE.M] // bm) * -(-table[:, TABLE.N] // bn)).sum())
    rows, columns = -(-call.m // bm), -(-call.n // bn)
    if call.jagged == 1:
        return (call.m // bm + min(call.groups, call.m)) * columns
    if call.jagged == 2:
        return (call.n // bn + min(call.groups, call.n)) * rows
    return call.groups * rows * columns


def zeroing_blocks(call: Call) -> int:
    """Blocks that are worth starting for rows that no group owns (none, where the caller owns them)."""
    if not call.zeroes:
        return 0
    return -(-call.m * call.n * (call.groups if call.valid else 1) // ZEROS_PER_BLOCK)


def pack(call: Call, alpha: float, beta: float, more: tuple[int, ...] = ()) -> bytes:
    """The argument buffer of a kernel: 64-bit words throughout, so no padding."""
    return struct.pack(f"<{len(call)}q2d{len(more)}q", *call, alpha, beta, *more)


@lru_cache(maxsize=256)
def function_of(config: Config, signature: Signature, device: torch.device, shared: int) -> Function:
    """The loaded kernel: one for each config, signature and device of this process."""
    return Function(image(config, signature, capability_of(device)), shared, device)


def plan(spec: ProblemSpec, config: Config, device: torch.device, why: str = "") -> Recipe:
    """The recipe for a spec: compiles (or loads) the kernel now, binds later."""
    if reason := obstacle(config, spec, device):
        raise InvalidSetting(f"{config} cannot run this problem: {reason}")
    signature = signature_of(spec)
    bind: Bind
    if isinstance(config, SimtConfig) and device.type == "cpu":
        bind = _emulated(config, signature)
    else:
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        bind = bind_for(config, signature, device)
    return Recipe(kernel=config.kernel, config=config, bind=bind, why=why)


def bind_for(config: Config, signature: Signature, device: torch.device) -> Bind:
    """The bind of a config on a GPU."""
    signature = effective(config, signature)
    if isinstance(config, HopperConfig):
        return _hopper(config, signature, device)
    return _tiled(config, signature, device, shared_bytes(config) if isinstance(config, MmaConfig) else 0)


def _hopper(config: HopperConfig, signature: Signature, device: torch.device) -> Bind:
    """Tensor maps, one block per multiprocessor at most."""
    shape = Layout(config, signature)
    function = function_of(config, signature, device, shape.bytes)
    processors = _multiprocessors(device)

    def bind(ops: Operands) -> Launch:
        table, host = device_table(ops)
        call = call_of(ops, table)
        tiles = most_tiles(call, host, config.n_max, COLUMNS * config.cluster) * config.cluster
        blocks = min(max(tiles, zeroing_blocks(call)), processors)
        grid = -(-blocks // config.cluster) * config.cluster
        if grid == 0:
            return _nothing
        maps = tensor_maps(config, signature, call, host)
        # One upload: the maps, and a word for the two counters of the scheduler, which start at 0.
        workspace = to_device(np.append(maps, np.int64(0)), ops.device)
        at = workspace.data_ptr()
        arguments = pack(call, ops.alpha, ops.beta, (at, at + maps.nbytes))
        launch = function.launcher(grid, config.threads, arguments, config.cluster, overlap=True)
        return keeping(launch, (ops, table, workspace))

    return bind


def _tiled(config: SimtConfig | MmaConfig, signature: Signature, device: torch.device, shared: int) -> Bind:
    """As many blocks as fit on the device; each walks the tiles in strides."""
    function = function_of(config, signature, device, shared)
    overlap = isinstance(config, MmaConfig) and capability_of(device) >= OVERLAP_MINIMUM
    resident = function.blocks_per_multiprocessor(config.threads) * _multiprocessors(device)

    def bind(ops: Operands) -> Launch:
        table, host = device_table(ops)
        call = call_of(ops, table)
        tiles = max(most_tiles(call, host, config.bm, config.bn), zeroing_blocks(call))
        if tiles == 0:
            return _nothing
        grid = min(tiles, resident)
        launch = function.launcher(grid, config.threads, pack(call, ops.alpha, ops.beta), overlap=overlap)
        return keeping(launch, (ops, table))

    return bind


def _emulated(config: SimtConfig, signature: Signature) -> Bind:
    from multigemm.backends.numba.simt import make_kernel

    kernel: Any = make_kernel(config, signature)

    def bind(ops: Operands) -> Launch:
        host = torch.from_numpy(list_table(ops)) if ops.spec.form == "per_group" else None
        call = call_of(ops, host)
        tiles = most_tiles(call, None if host is None else host.numpy(), config.bm, config.bn)
        # Two blocks at most: enough to walk tiles in strides, cheap enough for many checks.
        grid = max(1, min(tiles, 2))

        def launch() -> None:
            with _one_at_a_time, _simulating():
                kernel[grid, config.threads](call, ops.alpha, ops.beta)

        return keeping(launch, host)

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


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _nothing() -> None:
    """No element of out is to be written."""


def keeping(launch: Callable[[], None], alive: Any) -> Launch:
    """The same launch, holding what its packed addresses point to."""

    def run(_alive: Any = alive) -> None:
        launch()

    return run
