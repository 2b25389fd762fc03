// The Hopper instructions that CUDA C++ has no word for, one thin function each.
#pragma once
#include "common.cuh"

// What wgmma multiplies, of a kernel that says neither: 16 bits, or float8 (hopper_fp8.cu).
#ifndef TF32
#define TF32 0          // float32, of whose significand the tensor cores read 11 bits
#endif
#ifndef INT8
#define INT8 0
#endif
#ifndef DOUBLE
#define DOUBLE 0        // float64, whose products take registers (consume_f64.cuh)
#endif
#define WORD_RESULTS (TF32 || INT8)        // sums, and plain results, are words of 4 bytes
#if INT8
typedef int Sum;
#else
typedef float Sum;
#endif

// ---- mbarrier: a counter in shared memory that threads and the copy engine wait on and arrive at ----

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive_here(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the same barrier of thread block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 remote;\n"
                 "mapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
// Whether the phase is over, without waiting for it.
__device__ __forceinline__ bool barrier_test(u32 barrier, u32 parity) {
    u32 over;
    asm volatile("{\n.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, done;\n}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    return over != 0;
}
// This thread arrives when all of its copies are there.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other block of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers ----

// A value that the compiler must not work out anew where it is used.
__device__ __forceinline__ void keep_in_register(u32& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void keep_in_register(int& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void keep_in_register(i64& v) { asm volatile("" : "+l"(v)); }

// ---- clusters ----

__device__ __forceinline__ u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same in two halves that order no memory: enough after barrier_init_fence. A release would wait until all of the GPU
// sees whatever was written before.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Writes 16 bytes into the shared memory of thread block `rank`, whose barrier counts them: whoever
// waits there sees them, without a fence.
__device__ __forceinline__ void store_remote(u32 address, u32 barrier, u32 rank, int4 v) {
    asm volatile("{\n.reg .b32 remote, counter;\n"
                 "mapa.shared::cluster.u32 remote, %0, %2;\n"
                 "mapa.shared::cluster.u32 counter, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], {%3, %4, %5, %6}, [counter];\n}"
                 ::"r"(address), "r"(barrier), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// One lane of a warp that runs together: the compiler sees that what follows runs once, with uniform operands.
__device__ __forceinline__ bool elected() {
    u32 yes;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
    return yes != 0;
}

// ---- TMA: a box of a tensor, described by a tensor map, into swizzled shared memory ----

struct alignas(64) TensorMap { u64 opaque[16]; };

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, u64 hint) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(hint) : "memory");
}
__device__ __forceinline__ void load_box(u32 to, const TensorMap* map, u32 barrier, int x, int y, int z, int w, u64 hint) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(hint) : "memory");
}
// The same box to the same place in every block of `mask`, each block's own barrier counting its bytes.
__device__ __forceinline__ void multicast_box(u32 to, const TensorMap* map, u32 barrier, u16 mask, int x, int y, int z, u64 hint) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3, %7;"
                 ::"r"(to), "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y), "r"(z), "l"(hint) : "memory");
}
__device__ __forceinline__ void multicast_box(u32 to, const TensorMap* map, u32 barrier, u16 mask, int x, int y, int z, int w, u64 hint) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3, %8;"
                 ::"r"(to), "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y), "r"(z), "r"(w), "l"(hint) : "memory");
}
// The way back: a box in shared memory to a tensor, by the thread that has `wanted`; without a branch, which would end
// products under way. What has been read may be written over; before the end all must have been written.
__device__ __forceinline__ void send_box(bool wanted, u32 from, const TensorMap* map, int x, int y, int z, int w, int v) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n"
                 "@p cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%1, {%3, %4, %5, %6, %7}], [%2];\n}"
                 ::"r"(u32(wanted)), "l"(map), "r"(from), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_until_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// What this thread wrote to shared memory becomes visible to the copy engine.
__device__ __forceinline__ void show_to_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A tensor map in global memory that the host has just written: drop what the copy engine remembers of it.
__device__ __forceinline__ void refresh_map(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
// What the L2 cache should do with a box's lines.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull, EVICT_LAST = 0x14F0000000000000ull;

// ---- wgmma: products of a warpgroup, straight from shared memory ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Where an operand lies: 128-byte swizzle; strides between the 8-row atoms of 1024 bytes, in bytes.
__device__ __forceinline__ u64 smem_descriptor(u32 address, u32 leading, u32 stride) {
    return (1ull << 62) | (u64(stride >> 4) << 32) | (u64(leading >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// ---- registers, named barriers, matrix stores ----

template <int N> __device__ __forceinline__ void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

__device__ __forceinline__ void warpgroup_sync(int which) {
    asm volatile("bar.sync %0, 128;" ::"r"(which + 1) : "memory");
}
// Four 8 x 8 blocks of 16-bit values, transposed on the way: lane l names the row l % 8 of block l / 8.
__device__ __forceinline__ void store_transposed(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_transposed(u32 row, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(a), "r"(b) : "memory");
}
// Four such blocks as they are.
__device__ __forceinline__ void store_blocks(u32 row, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ uint4 load_shared16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
__device__ __forceinline__ void store_shared16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, int v) { asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
__device__ __forceinline__ void store_shared(u32 address, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory"); }
__device__ __forceinline__ void store_shared(u32 address, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory"); }
__device__ __forceinline__ void store_shared(u32 address, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory"); }
__device__ __forceinline__ void load_shared(int& v, u32 address) { asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(address)); }
__device__ __forceinline__ void load_shared(float& v, u32 address) { asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address)); }
__device__ __forceinline__ u32 load_shared_word(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ u32 load_shared_half(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ u32 load_shared_byte(u32 address) {
    u16 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ float load_shared(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
