"""Plans a spec with a config: finds or compiles the kernel, then fixes one problem's arguments.

`bind` packs every argument into one buffer and chooses the grid from what the host knows (an upper
bound of the number of tiles, so that token counts on the device are never read back). The launch of a
packed form can follow its operands; a list has a table of them in device memory, and is bound anew.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from multigemm.backend import Bind, Launch, Recipe, cannot_run
from multigemm.backends.numba.arguments import (
    GRID_WORDS,
    Call,
    Grids,
    MapEncoder,
    Table,
    call_of,
    code_tables,
    epilogue_words,
    grids_of,
    list_table,
    quantised_signature_of,
)
from multigemm.backends.numba.build import OVERLAP_MINIMUM, image
from multigemm.backends.numba.choice import problem_with, why
from multigemm.backends.numba.config import (
    ANY_K,
    COLUMNS,
    FAST_MEMORY,
    LONG_K,
    Config,
    Float8Config,
    GenericConfig,
    HopperConfig,
    Layout,
    MmaConfig,
    QuantisedConfig,
    QuantisedSignature,
    Signature,
    effective,
    float8_signature_of,
    shared_bytes,
    signature_of,
)
from multigemm.backends.numba.support import capability_of
from multigemm.cuda import driver
from multigemm.cuda.arguments import DeviceFields, Fields, join, words
from multigemm.cuda.device import index_of, memory_rate, processors, to_device
from multigemm.cuda.launch import NOTHING, Kernel, without_move
from multigemm.planning.fused_steps import plan_in_steps, product_spec, taken_in_steps
from multigemm.planning.operands import Operands, view_of
from multigemm.planning.tiles import most_tiles_by_rows
from multigemm.problem.spec import ProblemSpec

ZEROS_PER_BLOCK = 16384
COUNTERS = bytes(8)
"""The two counters of the Hopper kernel's scheduler, which start at 0."""


def zeroing_blocks(call: Call, m: int) -> int:
    """The number of blocks to start for zeroing rows that no group owns; 0 if the caller owns them."""
    if not call.zeroes:
        return 0
    return -(-m * call.n * (call.groups if call.valid else 1) // ZEROS_PER_BLOCK)


def kernel_signature(config: Config, spec: ProblemSpec) -> Signature | QuantisedSignature:
    """What a config's kernel is compiled for, beside the config."""
    if isinstance(config, QuantisedConfig):
        return quantised_signature_of(spec)
    if isinstance(config, Float8Config):
        return float8_signature_of(spec)
    return effective(config, signature_of(spec))


@cache
def kernel_of(config: Config, signature: Signature | QuantisedSignature, index: int, shared: int) -> Kernel:
    """The loaded kernel: one per config, signature and device of this process."""
    made = image(config, signature, capability_of(torch.device("cuda", index)))
    kernel = Kernel(made.cubin, made.entry, index)
    if shared > 0:
        kernel.allow_shared(shared)
    return kernel


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """The recipe for a spec. Compiles (or loads) the kernel now and binds later."""
    if taken_in_steps(spec):
        return plan_in_steps(spec, plan(product_spec(spec), config, device), index_of(device))
    if reason := problem_with(config, spec, device):
        raise cannot_run(config, reason)
    if device.type == "cuda":
        bind = bind_for(config, spec, index_of(device))
    else:
        assert isinstance(config, GenericConfig | QuantisedConfig)  # problem_with lets no other through
        bind = _emulated(config, spec)
    return Recipe(kernel=config.kernel, config=config, bind=bind, why=why(config, spec, device))


def bind_for(config: Config, spec: ProblemSpec, index: int) -> Bind:
    """The bind of a config on a GPU: as many blocks as it holds at most, each of which takes one tile after another.

    The Hopper kernel's tensor maps are uploaded in front of a launch that may overlap with the kernel before it. An
    upload is no kernel, so what overlaps is the kernel behind it at most, and the maps of a copy never change.
    """
    style, shared, cluster, maps, longest_k = epilogue_words(spec), 0, 1, None, ANY_K
    signature = kernel_signature(config, spec)
    codes = signature if isinstance(signature, QuantisedSignature) else None
    if isinstance(config, HopperConfig):
        assert isinstance(signature, Signature)
        shared, cluster, maps = Layout(config, signature).bytes, config.cluster, MapEncoder(config, signature)
        rows, columns = config.n_max, COLUMNS * cluster
        if memory_rate(index) < FAST_MEMORY:
            longest_k = LONG_K
    else:
        rows, columns = config.bm, config.bn
        shared = shared_bytes(config) if isinstance(config, MmaConfig) else 0
    kernel, most_blocks = kernel_of(config, signature, index, shared), processors(index)
    waits = isinstance(config, MmaConfig | HopperConfig)
    overlap = waits and capability_of(torch.device("cuda", index)) >= OVERLAP_MINIMUM
    if maps is None:
        most_blocks *= kernel.blocks_per_processor(config.threads, shared)

    def bind(ops: Operands) -> Launch:
        table, view = list_table(ops) if spec.form == "per_group" else None, view_of(ops)
        on_device = None if table is None else to_device(table, ops.device)
        call, most_tiles = call_of(ops, view, style, on_device), most_tiles_by_rows(ops, view, rows, columns)

        def grid_for(m: int) -> int:
            blocks = min(max(most_tiles(m) * cluster, zeroing_blocks(call, m)), most_blocks)
            return -(-blocks // cluster) * cluster

        grid = grid_for(call.m)
        if grid == 0:
            return NOTHING
        scales, kept = list[int](), list[torch.Tensor]()
        if codes is not None:
            scales, kept = _scale_words(ops, tables_on(codes, ops.device))
        elif spec.quantised:
            scales, kept = _words_of_given_scales(ops, one_on(ops.device))
        uploaded, places = None, tuple[int, ...]()
        if maps is not None:
            content = _maps(maps, call, table, index)
            uploaded = DeviceFields(content, ops.device)
            at = uploaded.address
            places = longest_k, at, at.at(at + len(content) - len(COUNTERS))
        # Strides of scales may be the number of tokens: such a launch is for one number of them.
        launch = kernel.bound(
            words(*call, *scales, float(ops.alpha), float(ops.beta), *places), grid=grid, threads=config.threads,
            shared=shared, cluster=cluster, overlap=overlap, fields=uploaded, keep=(on_device, *kept),
            grid_for=None if scales else grid_for,
        )  # fmt: skip
        # The table of a list, which is in device memory, holds the operands' addresses.
        return launch if table is None else without_move(launch)

    return bind


@cache
def tables_on(signature: QuantisedSignature, device: torch.device) -> torch.Tensor:
    """The float tables of all codes in device memory, uploaded once."""
    return to_device(code_tables(signature).view(np.int64), device)


def _scale_words(ops: Operands, tables: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
    """The words of `Grids`, and what has to outlive the launch."""
    found, of_list = grids_of(ops)
    listed = None if of_list is None else to_device(of_list, ops.device)
    found += [0 if listed is None else listed.data_ptr(), tables.data_ptr()]
    return found, [x for x in (listed, tables) if x is not None]


@cache
def one_on(device: torch.device) -> torch.Tensor:
    """The scale of an operand without a scale, in device memory."""
    return to_device(np.ones(2, np.float32).view(np.int64), device)


def _words_of_given_scales(ops: Operands, one: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
    """The words of `Grids` without lists, zero points and tables: a one stands for a scale that is absent."""
    words, _ = grids_of(ops)
    for which, given in enumerate((ops.scale_a, ops.scale_b)):
        if given is None:
            words[which * GRID_WORDS] = one.data_ptr()
    return [*words, 0, 0], [one]


def _maps(maps: MapEncoder, call: Call, table: Table | None, index: int) -> Fields:
    """The tensor maps of a problem and, behind them, the counters of the Hopper kernel's scheduler."""
    with driver.on_device(index):
        return join([*(maps.of_call(call) if table is None else maps.of_list(table)), COUNTERS])


def _emulated(config: GenericConfig | QuantisedConfig, spec: ProblemSpec) -> Bind:
    """The bind of a config in Numba's simulator, on CPU tensors."""
    from multigemm.backends.numba.kernels.plain_cores import make_kernel
    from multigemm.backends.numba.kernels.runtime import simulating

    codes, style = quantised_signature_of(spec) if isinstance(config, QuantisedConfig) else None, epilogue_words(spec)
    kernel: Any = make_kernel(config, codes or signature_of(spec))
    tables = None if codes is None else torch.from_numpy(code_tables(codes))

    def bind(ops: Operands) -> Launch:
        table, view = torch.from_numpy(list_table(ops)) if ops.spec.form == "per_group" else None, view_of(ops)
        call = call_of(ops, view, style, table)
        # Two blocks at most: enough to walk tiles in strides, cheap enough for many checks.
        grid = max(1, min(most_tiles_by_rows(ops, view, config.bm, config.bn)(call.m), 2))
        scales, kept = ([], []) if tables is None else _scale_words(ops, tables)
        grids = (Grids._make(scales),) if scales else ()

        def launch(_kept: Any = (table, kept)) -> None:
            with simulating():
                kernel[grid, config.threads](call, *grids, ops.alpha, ops.beta)

        return launch

    return bind
