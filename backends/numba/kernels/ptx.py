"""PTX for Numba: lines of PTX as typed functions, and those that the kernels are made of.

Shared-memory addresses are 32-bit (see `shared_address`), global ones 64-bit. A 32-bit word of a
fragment holds two 16-bit elements, the lower index in the lower half.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from inspect import Parameter, Signature

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

# From a line of PTX to a typed Numba function:
#
#     fence = instruction("fence.proxy.async.shared::cta;")
#     add3 = instruction("add.s32 $0, $1, $2;", types.int32, types.int32, types.int32, effects=False)
#
# Operands are numbered in LLVM's order: results first, then arguments. A `UniTuple` stands for as many
# operands as it has elements, so a fragment of a matrix is one value in Python and a list of registers
# in PTX. `inout` ties the first argument to the result, register by register, which is what an
# accumulator is. An instruction with `effects` is never moved across another one, nor removed.

I32, I64, F32, F64 = types.int32, types.int64, types.float32, types.float64
LLVM = {
    types.int16: ir.IntType(16),
    I32: ir.IntType(32),
    I64: ir.IntType(64),
    F32: ir.FloatType(),
    F64: ir.DoubleType(),
}
REGISTERS = {"i16": "h", "i32": "r", "i64": "l", "float": "f", "double": "d"}
"""How the constraints of inline assembly name the registers of an LLVM type."""


def floats(count):
    """The type of a fragment of `count` float32 registers."""
    return types.UniTuple(F32, count)


def words(count):
    """The type of a fragment of `count` 32-bit registers."""
    return types.UniTuple(I32, count)


def assembly(builder, text, values, returns=(), effects=True, tied=0):
    """Emits PTX on these LLVM values; its results, of the LLVM types `returns`.

    The first `tied` values share the registers of the results.
    """
    parts = ["=" + REGISTERS[str(kind)] for kind in returns]
    parts += [str(i) if i < tied else REGISTERS[str(value.type)] for i, value in enumerate(values)]
    parts += ["~{memory}"] if effects else []
    result = ir.LiteralStructType(returns) if len(returns) > 1 else returns[0] if returns else ir.VoidType()
    function = ir.FunctionType(result, [value.type for value in values])
    found = builder.call(ir.InlineAsm(function, text, ",".join(parts), side_effect=effects), values)
    if len(returns) < 2:
        return [found][: len(returns)]
    return [builder.extract_value(found, i) for i in range(len(returns))]


def emitted(generate, returns, *takes):
    """A device function of these types whose body `generate(builder, *LLVM values)` emits; it returns an LLVM value."""

    def codegen(context, builder, signature, arguments):
        found = generate(builder, *arguments)
        return context.get_dummy_value() if returns is types.void else found

    def typed(typingctx, *given):
        return returns(*takes), codegen

    # Numba reads the number of arguments off the signature.
    names = ["typingctx", *(f"argument_{i}" for i in range(len(takes)))]
    typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    return intrinsic(typed)


def undefined(fragment):
    """An LLVM value of a fragment, none of whose registers is set."""
    return ir.Constant(ir.ArrayType(LLVM[fragment.dtype], fragment.count), ir.Undefined)


def elements(builder, fragment, count):
    """The first `count` registers of a fragment."""
    return [builder.extract_value(fragment, i) for i in range(count)]


def replaced(builder, fragment, values, first=0):
    """The fragment with other values in its registers from `first` on."""
    for i, value in enumerate(values):
        fragment = builder.insert_value(fragment, value, first + i)
    return fragment


def _scalars(kind):
    return [kind.dtype] * kind.count if isinstance(kind, types.UniTuple) else [kind]


def instruction(text, returns=None, *takes, effects=True, inout=False, within=None):
    """A device function that is this PTX.

    `within` (with `inout`): the accumulator is the beginning of a fragment of that many registers,
    which the function takes and returns whole.
    """
    outputs = [] if returns is None else [LLVM[kind] for kind in _scalars(returns)]
    seen = (types.UniTuple(takes[0].dtype, within), *takes[1:]) if within else takes
    result = types.void if returns is None else seen[0] if within else returns

    def generate(builder, *arguments):
        values = []
        for kind, argument in zip(takes, arguments, strict=True):
            values += elements(builder, argument, kind.count) if isinstance(kind, types.UniTuple) else [argument]
        tied = len(_scalars(takes[0])) if inout else 0
        found = assembly(builder, text, values, outputs, effects, tied)
        if not isinstance(returns, types.UniTuple):
            return found[0] if found else None
        return replaced(builder, arguments[0] if within else undefined(returns), found)

    return emitted(generate, result, *seen)


def registers(first, count):
    """ "$first, $(first+1), ..." as an operand list of PTX."""
    return ", ".join(f"${i}" for i in range(first, first + count))


def make_zeros(count, kind=types.float32, within=None):
    """zeros() -> a tuple of `count` zeros, followed by undefined registers up to `within`.

    A literal of that length trips an assertion in Numba's peephole pass; an intrinsic does not.
    """
    fragment = types.UniTuple(kind, within or count)

    def generate(builder):
        return replaced(builder, undefined(fragment), [ir.Constant(LLVM[kind], None)] * count)

    return emitted(generate, fragment)


@intrinsic
def shared_address(typingctx, array):
    """The 32-bit shared-memory address of a `cuda.shared.array`."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        generic = builder.ptrtoint(data, ir.IntType(64))
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return assembly(builder, text, [generic], [LLVM[I32]], effects=False)[0]

    return types.int32(array), generate


# What every GPU since sm_80 has: fragments, matrix loads, mma.sync, cp.async.

MMA = {
    "f16": ("m16n8k16.row.col.f32.f16.f16.f32", 4, 2),
    "bf16": ("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2),
    "tf32": ("m16n8k8.row.col.f32.tf32.tf32.f32", 4, 2),
    "i8": ("m16n8k32.row.col.s32.s8.s8.s32", 4, 2),
    "f64": ("m16n8k4.row.col.f64.f64.f64.f64", 2, 1),
}
"""The instruction by the kind of product, and registers of A and of B; float64 takes sm_90."""
SUMS = {"f16": F32, "bf16": F32, "tf32": F32, "f32": F32, "i8": I32, "f64": F64}
"""The type of a sum; "f32" is the product without tensor cores."""


@cache
def make_ldmatrix(count, transposed=False):
    """ldmatrix(row address of this lane) -> `count` words: 8 x 8 matrices of 16-bit elements."""
    option = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{option}.shared.b16 {{{registers(0, count)}}}, [${count}];"
    return instruction(text, words(count), I32)


@cache
def make_pack(kind):
    """pack(low, high) -> a word of two 16-bit floats, each rounded once."""
    return instruction(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", I32, F32, F32, effects=False)


cp_async_16 = instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", None, I32, I64, I32)
"""(shared, global, bytes to read): 16 bytes, of which those beyond the count become zero."""

cp_async_4 = instruction("cp.async.ca.shared.global [$0], [$1], 4, $2;", None, I32, I64, I32)
cp_async_8 = instruction("cp.async.ca.shared.global [$0], [$1], 8, $2;", None, I32, I64, I32)

cp_async_commit = instruction("cp.async.commit_group;")


@cache
def make_cp_async_wait(pending):
    """Waits until at most `pending` groups of this thread are under way."""
    return instruction(f"cp.async.wait_group {pending};")


load_shared_u32 = instruction("ld.shared.u32 $0, [$1];", I32, I32)
load_shared_f32 = instruction("ld.shared.f32 $0, [$1];", F32, I32)
load_shared_f64 = instruction("ld.shared.f64 $0, [$1];", F64, I32)
load_shared_f64x2 = instruction("ld.shared.v2.f64 {$0, $1}, [$2];", types.UniTuple(F64, 2), I32)
load_shared_f32x4 = instruction("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", floats(4), I32)
load_shared_u32x4 = instruction("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", words(4), I32)
store_shared_f32 = instruction("st.shared.f32 [$0], $1;", None, I32, F32)
store_shared_f64 = instruction("st.shared.f64 [$0], $1;", None, I32, F64)
store_shared_u8 = instruction("st.shared.u8 [$0], $1;", None, I32, types.int16)
store_shared_u16 = instruction("st.shared.u16 [$0], $1;", None, I32, types.int16)
store_shared_u32 = instruction("st.shared.u32 [$0], $1;", None, I32, I32)
store_shared_u32x4 = instruction("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", None, I32, words(4))
load_shared_i64 = instruction("ld.shared.s64 $0, [$1];", I64, I32)
store_shared_i64 = instruction("st.shared.s64 [$0], $1;", None, I32, I64)
store_global_u32 = instruction("st.global.u32 [$0], $1;", None, I64, I32)
store_global_u32x4 = instruction("st.global.v4.u32 [$0], {$1, $2, $3, $4};", None, I64, words(4))
store_global_u32x2 = instruction("st.global.v2.u32 [$0], {$1, $2};", None, I64, words(2))
store_global_f32x4 = instruction("st.global.v4.f32 [$0], {$1, $2, $3, $4};", None, I64, floats(4))
store_global_f64x2 = instruction("st.global.v2.f64 [$0], {$1, $2};", None, I64, types.UniTuple(F64, 2))
load_shared_u16 = instruction("ld.shared.u16 $0, [$1];", types.int16, I32)
store_global_u16 = instruction("st.global.u16 [$0], $1;", None, I64, types.int16)

prefetch = instruction("prefetch.global.L2 [$0];", None, I64)
"""(global address): brings it into the L2 cache."""
atomic_add = instruction("atom.global.add.u32 $0, [$1], $2;", I32, I64, I32)
"""(global address, word) -> the old value."""
thread_again = instruction("mov.u32 $0, %tid.x;", I32)
"""The number of this thread, read anew, where a register that keeps it would be one too many."""
named_barrier = instruction("bar.sync $0, $1;", None, I32, I32)
"""(barrier 1 to 15, threads): a rendezvous of part of a block."""


# What Hopper adds: barriers with byte counts, TMA, wgmma, register budgets. Compile with `cc=(9, 0, "a")`.
#
# A barrier is 8 bytes of shared memory; `parity` is the phase (0 or 1) whose end is waited for. wgmma
# descriptors are built by `make_descriptor`.

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


@cache
def make_arrive_at_each(blocks):
    """arrive(barrier, wanted): a warp arrives once at this barrier of each of the first `blocks` of a cluster.

    Not if `wanted` is negative. Without a branch, which would end products under way.
    """
    return instruction(
        "{ .reg .pred p; .reg .b32 lane, there; mov.u32 lane, %laneid; "
        f"setp.lt.u32 p, lane, {blocks}; setp.ge.and.s32 p, $1, 0, p; mapa.shared::cluster.u32 there, $0, lane; "
        "@p mbarrier.arrive.shared::cluster.b64 _, [there]; }",
        None, I32, I32,
    )  # fmt: skip


store_async_u32x4 = instruction(
    "{ .reg .b32 there, counter; mapa.shared::cluster.u32 there, $0, $2; mapa.shared::cluster.u32 counter, $1, $2; "
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {$3, $4, $5, $6}, [counter]; }",
    None, I32, I32, I32, words(4),
)  # fmt: skip
"""(shared address, barrier, rank, words): stores in that block of the cluster, and counts 16 bytes on its barrier."""
elected = instruction("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }", I32)
"""Whether this is the one lane of a whole warp that shall do what follows, which the compiler then knows to run
once."""
cluster_rank = instruction("mov.u32 $0, %cluster_ctarank;", I32, effects=False)
cluster_arrive = instruction("barrier.cluster.arrive.relaxed.aligned;")
"""Orders no memory, which `fence_mbarrier_init` has done for the barriers: a release would wait for all of the GPU."""
cluster_wait = instruction("barrier.cluster.wait.acquire.aligned;")
fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;")
fence_async = instruction("fence.proxy.async.shared::cta;")
"""Between ordinary stores to shared memory and the tensor cores or TMA reading it."""
fence_tensormap = instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", None, I64)
"""Before the first use of a tensor map that lies in global memory."""
grid_dependency_wait = instruction("griddepcontrol.wait;")
grid_dependents_launch = instruction("griddepcontrol.launch_dependents;")


@cache
def make_setmaxnreg(count, more):
    """Moves this warpgroup's register budget up (`more`) or down to `count`, a multiple of 8."""
    return instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};")


EVICT_FIRST, EVICT_NORMAL, EVICT_LAST = 0x12F0000000000000, 0x1000000000000000, 0x14F0000000000000
"""What the L2 cache shall do with the lines of a box."""


@cache
def make_tma_load(rank):
    """load(shared, map, barrier, coordinates[rank], hint): one box, counted in bytes on the barrier."""
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[$0], [$1, {{{registers(3, rank)}}}], [$2], ${3 + rank};"
    )
    return instruction(text, None, I32, I64, I32, words(rank), I64)


@cache
def make_tma_multicast(rank):
    """load(shared, map, barrier, coordinates[rank], mask, hint): the same box into every block of the mask.

    Each of them receives it at the same shared address and counts the bytes on its own barrier.
    """
    text = (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        f".L2::cache_hint [$0], [$1, {{{registers(3, rank)}}}], [$2], ${3 + rank}, ${4 + rank};"
    )
    return instruction(text, None, I32, I64, I32, words(rank), types.int16, I64)


tma_store = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p cp.async.bulk.tensor.5d.global.shared::cta.bulk_group "
    "[$2, {$3, $4, $5, $6, $7}], [$1]; cp.async.bulk.commit_group; }",
    None, I32, I32, I64, words(5),
)  # fmt: skip
"""(wanted, shared, map, coordinates): one box to memory, where `wanted` is not 0; without a branch, as above."""
tma_store_read = instruction("{ .reg .pred p; setp.ne.b32 p, $0, 0; @p cp.async.bulk.wait_group.read 0; }", None, I32)
"""(wanted): waits until this thread's stores have read shared memory."""
tma_store_wait = instruction("cp.async.bulk.wait_group 0;")
"""Waits until this thread's stores are done."""


@cache
def make_wgmma(kind, n, a_transposed=False, b_transposed=False, within=None, steps=((0, 0),)):
    """wgmma(acc[n/2], a, b) -> acc: m64 x n x 32 bytes of k at each of `steps`, both operands by descriptor.

    `within`: acc is the beginning of that many registers, so that loops of different n can share what follows. `steps`
    are pairs of what to add to the descriptors of a and b.

    Transposed means that the operand's own dimension (not k) is contiguous; 16-bit types only.
    Between `wgmma_fence` and `wgmma_commit`; acc may be read after `make_wgmma_wait`.
    """
    k = 8 if kind == "tf32" else 16
    count = n // 2
    transposes = "" if kind == "tf32" else f", {int(a_transposed)}, {int(b_transposed)}"
    if kind == "tf32" and (a_transposed or b_transposed):
        raise ValueError("tf32 operands of wgmma must be contiguous along k")
    parts = ["{ .reg .pred p; .reg .b64 x, y; setp.ne.b32 p, 1, 0;"]
    for of_a, of_b in steps:
        parts.append(
            f"add.s64 x, ${2 * count}, {of_a}; add.s64 y, ${2 * count + 1}, {of_b}; "
            f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{kind}.{kind} {{{registers(0, count)}}}, "
            f"x, y, p, 1, 1{transposes};"
        )
    return instruction(" ".join([*parts, "}"]), floats(count), floats(count), I64, I64, inout=True, within=within)


@cache
def make_wgmma_of_bytes(a, b, n, k, fresh):
    """wgmma(acc[n/2], a, b, never) -> acc: as `make_wgmma`, for float8 of two formats, from `k` x 16 bytes of k on.

    Operands are the lower halves of descriptors, whose upper one is `K_MAJOR`. If `fresh`, it starts from zero; acc is
    taken all the same, so that its registers stay where they are: `never` is a number that is never negative, which
    the compiler does not know.
    """
    count = n // 2
    wanted = f"setp.lt.s32 p, ${2 * count + 2}, 0;" if fresh else "setp.ne.b32 p, 1, 0;"
    text = (
        f"{{ .reg .pred p; .reg .b32 t; .reg .b64 x, y; {wanted} add.u32 t, ${2 * count}, {k}; "
        f"mov.b64 x, {{t, {K_MAJOR}}}; add.u32 t, ${2 * count + 1}, {k}; mov.b64 y, {{t, {K_MAJOR}}}; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{a}.{b} {{{registers(0, count)}}}, x, y, p, 1, 1; }}"
    )
    return instruction(text, floats(count), floats(count), I32, I32, I32, inout=True)


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


K_MAJOR = 1 << 30 | 1024 >> 4
"""The upper half of a descriptor of an operand that is dense and contiguous along k."""
descriptor_half = instruction("{ .reg .u32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x3fff; }", I32, I32, effects=False)
"""The lower half of such a descriptor, from the shared address."""


@cache
def make_settled(count):
    """settled(acc) -> acc: no instruction, but what makes acc stays in front of the wgmma behind it."""
    return instruction("", floats(count), floats(count), inout=True)


unforeseen = instruction("", I32, I32, inout=True)
"""The same number, which the compiler cannot foresee: it leaves the loop that counts by it as it is."""
unforeseen_wide = instruction("", I64, I64, inout=True)
"""The same for 64 bits."""
SWIZZLE_128 = 1 << 62


@cache
def make_descriptor(leading, stride):
    """descriptor(shared address) -> 64 bits, with 128-byte swizzle and these byte strides between 8-row groups.

    Contiguous along k: `stride` is the step from 8 rows to the next 8 (1024 when dense), `leading`
    unused. Transposed: `leading` is the step from 64 elements to the next 64 of the operand's own
    dimension, `stride` the step from 8 values of k to the next 8.
    """
    bits = SWIZZLE_128 | (stride >> 4) << 32 | (leading >> 4) << 16
    text = (
        "{ .reg .u32 t; .reg .u64 u; shr.u32 t, $1, 4; and.b32 t, t, 0x3fff; "
        f"cvt.u64.u32 u, t; or.b64 $0, u, {bits}; }}"
    )
    return instruction(text, types.int64, I32, effects=False)
