"""PTX for Numba, part 2: what Hopper adds. Barriers with byte counts, TMA, wgmma, register budgets.

Compile with `cc=(9, 0, "a")`. A barrier is 8 bytes of shared memory; `parity` is the phase (0 or 1)
whose end is waited for. wgmma descriptors are built by `descriptor`.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba.cuda import types

from multigemm.backends.numba.ptx_asm import I32, I64, floats, instruction, registers, words

mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", None, I32, I32)
"""(barrier, arrivals per phase)"""
mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", None, I32)
mbarrier_expect_tx = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", None, I32, I32)
"""(barrier, bytes): arrives, and lets the phase end only once that many bytes have come."""
mbarrier_wait = instruction(
    "{ .reg .pred p; wait_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra wait_${:uid}; }",
    None, I32, I32,
)  # fmt: skip
"""(barrier, parity): returns when that phase has ended."""
mbarrier_arrive_cluster = instruction("mbarrier.arrive.shared::cluster.b64 _, [$0];", None, I32)
"""The same for a barrier of any block of the cluster, at an address from `map_shared`."""
map_shared = instruction("mapa.shared::cluster.u32 $0, $1, $2;", I32, I32, I32, effects=False)
"""(shared address, rank) -> the address of the same place in that block of the cluster."""
store_async = instruction(
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [$0], $1, [$2];", None, I32, I32, I32
)
"""(shared address, word, barrier), both in one block of the cluster: stores, and counts 4 bytes on the barrier."""
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", I32, effects=False)
cluster_arrive = instruction("barrier.cluster.arrive.release.aligned;")
cluster_wait = instruction("barrier.cluster.wait.acquire.aligned;")
fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;")
fence_async = instruction("fence.proxy.async.shared::cta;")
"""Between ordinary stores to shared memory and the tensor cores or TMA reading it."""
fence_tensormap = instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", None, I64)
"""Before the first use of a tensor map that lies in global memory."""
grid_dependency_wait = instruction("griddepcontrol.wait;")
grid_dependents_launch = instruction("griddepcontrol.launch_dependents;")
elect = instruction("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }", I32)
"""1 in one lane of a fully active warp."""


@cache
def make_setmaxnreg(count, more):
    """Moves this warpgroup's register budget up (`more`) or down to `count`, a multiple of 8."""
    return instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};")


@cache
def make_tma_load(rank):
    """load(shared, map, barrier, coordinates[rank]): one box, counted in bytes on the barrier."""
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{registers(3, rank)}}}], [$2];"
    )
    return instruction(text, None, I32, I64, I32, words(rank))


@cache
def make_tma_multicast(rank):
    """load(shared, map, barrier, coordinates[rank], mask): the same box into every block of the mask.

    Each of them receives it at the same shared address and counts the bytes on its own barrier.
    """
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        f"[$0], [$1, {{{registers(3, rank)}}}], [$2], ${3 + rank};"
    )
    return instruction(text, None, I32, I64, I32, words(rank), types.int16)


WGMMA = {"f16": ("f16", 16), "bf16": ("bf16", 16), "tf32": ("tf32", 8)}


@cache
def make_wgmma(kind, n, a_transposed=False, b_transposed=False, within=None):
    """wgmma(acc[n/2], a, b) -> acc: m64 x n x 32 bytes of k, both operands by descriptor.

    `within`: acc is the beginning of that many registers, so that loops of different n can share what follows.

    Transposed means that the operand's own dimension (not k) is contiguous; 16-bit types only.
    Between `wgmma_fence` and `wgmma_commit`; acc may be read after `make_wgmma_wait`.
    """
    name, k = WGMMA[kind]
    count = n // 2
    transposes = "" if kind == "tf32" else f", {int(a_transposed)}, {int(b_transposed)}"
    if kind == "tf32" and (a_transposed or b_transposed):
        raise ValueError("tf32 operands of wgmma must be contiguous along k")
    text = (
        "{ .reg .pred p; setp.ne.b32 p, 1, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{name}.{name} {{{registers(0, count)}}}, "
        f"${2 * count}, ${2 * count + 1}, p, 1, 1{transposes}; }}"
    )
    return instruction(text, floats(count), floats(count), I64, I64, inout=True, within=within)


wgmma_fence = instruction("wgmma.fence.sync.aligned;")
wgmma_commit = instruction("wgmma.commit_group.sync.aligned;")


@cache
def make_wgmma_wait(pending):
    return instruction(f"wgmma.wait_group.sync.aligned {pending};")


@cache
def make_wgmma_result(n, within=None):
    """result(acc) -> acc, once all wgmma of this warpgroup are done; ties the reads to the wait."""
    kind = floats(n // 2)
    return instruction("wgmma.wait_group.sync.aligned 0;", kind, kind, inout=True, within=within)


SWIZZLE_128 = 1 << 62


def descriptor_bits(leading, stride):
    """The constant part of a descriptor with 128-byte swizzle: byte strides between 8-row groups.

    Contiguous along k: `stride` is the step from 8 rows to the next 8 (1024 when dense), `leading`
    unused. Transposed: `leading` is the step from 64 elements to the next 64 of the operand's own
    dimension, `stride` the step from 8 values of k to the next 8.
    """
    return SWIZZLE_128 | (stride >> 4) << 32 | (leading >> 4) << 16


@cache
def make_descriptor(leading, stride):
    """descriptor(shared address) -> 64 bits."""
    bits = descriptor_bits(leading, stride)
    text = (
        "{ .reg .u32 t; .reg .u64 u; shr.u32 t, $1, 4; and.b32 t, t, 0x3fff; "
        f"cvt.u64.u32 u, t; or.b64 $0, u, {bits}; }}"
    )
    return instruction(text, types.int64, I32, effects=False)
