"""The Hopper kernel: TMA, a ring of barriers, wgmma, one persistent block per multiprocessor.

C^T = B^T A^T: the columns of C (weights) lie on the side of wgmma that is always 64 wide, its rows
(tokens) on the side that comes in steps of 8. So a ragged group wastes at most a few rows, and the
tile height is chosen for each group: every height that is a multiple of `step` has a main loop of its own.

Three warpgroups. The first produces: its warp 0 walks the schedule, describes each tile in a ring of
`SLOTS` records and fills a ring of `stages` stages by TMA; its other warps zero the rows that no
group owns. The other two consume: each multiplies 64 columns by all rows of the tile, and writes
them out while the producer already loads the next tile.

Shared memory, from a multiple of 1024: stages of [128 columns | n_max rows] x 128 bytes of k,
staging for the epilogue, tile records, barriers. An operand that is contiguous along k lies as rows
of 128 bytes; one that is not lies as boxes of 64 elements x the k of a stage. Both are swizzled.

Where offsets cut k, the last stage of a group holds foreign k: the consumers overwrite it with zeros.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from multigemm.backends.numba import ptx_hopper as hw
from multigemm.backends.numba.hopper_consumer import CONSUMERS, make_consumer
from multigemm.backends.numba.hopper_producer import make_producer
from multigemm.backends.numba.hopper_shape import SLOTS, TURNS, Layout
from multigemm.backends.numba.ptx_asm import shared_address
from multigemm.backends.numba.runtime import kernel
from multigemm.backends.numba.schedule import make_zero_unowned

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 72, 216
CONSUMER_WARPS = CONSUMERS // 32
int32 = types.int32
_less, _more = hw.make_setmaxnreg(PRODUCER_REGISTERS, False), hw.make_setmaxnreg(CONSUMER_REGISTERS, True)


@cache
def make_kernel(config, signature):
    """The kernel for one pipeline shape and one set of dtypes and layouts."""
    at = Layout(config, signature)
    stages, full, empty, slot_full, slot_empty = config.stages, at.full, at.empty, at.slot_full, at.slot_empty
    cluster, turn_full, turn_empty = config.cluster, at.turn_full, at.turn_empty
    produce, consume = make_producer(config, signature), make_consumer(config, signature)
    zero_unowned = make_zero_unowned()
    helpers = 96

    @kernel
    def hopper(p, alpha, beta, maps, counters):
        base = (shared_address(cuda.shared.array(0, np.uint8)) + int32(1023)) & int32(~1023)
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(stages):
                hw.mbarrier_init(base + full + stage * 8, 1)
                hw.mbarrier_init(base + empty + stage * 8, CONSUMER_WARPS * cluster)
            for slot in range(SLOTS):
                hw.mbarrier_init(base + slot_full + slot * 8, 1)
                hw.mbarrier_init(base + slot_empty + slot * 8, CONSUMERS)
            for slot in range(TURNS):
                hw.mbarrier_init(base + turn_full + slot * 8, 1)
                hw.mbarrier_init(base + turn_empty + slot * 8, cluster)
            hw.fence_mbarrier_init()
        if cluster > 1:
            hw.cluster_arrive()
            hw.cluster_wait()
        else:
            cuda.syncthreads()
        # Set up by now, maybe before the kernel in front of this one has ended; nothing of its was read yet.
        hw.grid_dependents_launch()
        if thread >= 32:
            hw.grid_dependency_wait()
        if thread < 128:
            _less()
            if thread < 32:
                produce(p, maps, counters, base, thread)
            elif p.zeroes != 0:
                zero_unowned(p, cuda.blockIdx.x * helpers + thread - 32, cuda.gridDim.x * helpers)
        else:
            _more()
            consume(p, types.float32(alpha), types.float32(beta), base, thread // 128 - 1, thread % 128)
        if cluster > 1:  # a block must not end while another may still write into it
            hw.cluster_arrive()
            hw.cluster_wait()

    return hopper
