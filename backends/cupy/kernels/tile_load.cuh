// Global to shared memory for any strides and any alignment.
//
// A tile is MN x BK elements; CONTIG_K says which of its directions is taken to be contiguous in
// memory. Rows that are contiguous and aligned travel as 16 bytes by cp.async, or as 8 or 4 through registers; all else,
// and every edge, element by element under a mask. What is masked is zero, for both operands, so a
// neighbour's NaN is never multiplied.
#pragma once
#include "common.cuh"

// The widest access (bytes) that an operand allows; 0 where only single elements will do.
template <class T>
__device__ __forceinline__ int access_width(const char* base, i64 contiguous_stride, i64 other_stride, i64 extent) {
    if (contiguous_stride != 1 && extent > 1) return 0;
    const u64 bits = u64(base) | u64(other_stride * i64(sizeof(T)));
    return (bits & 15) == 0 ? 16 : (bits & 7) == 0 ? 8 : (bits & 3) == 0 ? 4 : 0;
}

template <class T, int MN, int BK, bool CONTIG_K, int THREADS>
struct TileLoad {
    static constexpr int V = 16 / sizeof(T);                       // elements per 16 bytes
    static constexpr int ALONG = CONTIG_K ? BK : MN;
    static constexpr int CHUNKS = MN * BK / V / THREADS;
    static_assert(MN * BK % (V * THREADS) == 0, "a tile is a whole number of chunks per thread");

    // Straight from global to shared memory, where 16-byte accesses are allowed; bytes past the edge
    // arrive as zeros. Nothing passes through registers, so blocks far ahead cost none.
    template <int PITCH>
    __device__ __forceinline__ void start(T* tile, const char* base, i64 mn_stride, i64 k_stride, i64 mn_left, i64 k_left) const {
        const i64 pitch = CONTIG_K ? mn_stride : k_stride, along_left = CONTIG_K ? k_left : mn_left, across_left = CONTIG_K ? mn_left : k_left;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 left = across(c) < across_left ? along_left - along(c) : 0;
            const int bytes = int(min64(max64(left, 0), V)) * int(sizeof(T));
            const T* from = bytes > 0 ? (const T*)base + across(c) * pitch + along(c) : (const T*)base;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(tile + across(c) * PITCH + along(c))), "l"(from), "r"(bytes) : "memory");
        }
    }

    union Chunk { uint4 q; uint2 h[2]; u32 w[4]; T e[V]; };
    Chunk chunk[CHUNKS];

    // First element along the contiguous direction, and position along the other, of chunk c.
    static __device__ __forceinline__ int along(int c) { return ((threadIdx.x + c * THREADS) % (ALONG / V)) * V; }
    static __device__ __forceinline__ int across(int c) { return (threadIdx.x + c * THREADS) / (ALONG / V); }

    // `base` points at the tile's first element; `mn_left`, `k_left` say how many are owned.
    __device__ __forceinline__ void load(const char* base, i64 mn_stride, i64 k_stride, i64 mn_left, i64 k_left, int width) {
        const i64 step = CONTIG_K ? k_stride : mn_stride, pitch = CONTIG_K ? mn_stride : k_stride;
        const i64 along_left = CONTIG_K ? k_left : mn_left, across_left = CONTIG_K ? mn_left : k_left;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            chunk[c].q = make_uint4(0, 0, 0, 0);
            const i64 left = across(c) < across_left ? along_left - along(c) : 0;
            const T* from = (const T*)base + across(c) * pitch + along(c) * step;
            if (left >= V && width >= 16) {
                chunk[c].q = __ldg((const uint4*)from);
            } else if (left >= V && width >= 8) {
                chunk[c].h[0] = __ldg((const uint2*)from), chunk[c].h[1] = __ldg((const uint2*)from + 1);
            } else if (left >= V && width >= 4) {
#pragma unroll
                for (int i = 0; i < 4; ++i) chunk[c].w[i] = __ldg((const u32*)from + i);
            } else if (left > 0) {
#pragma unroll
                for (int i = 0; i < V; ++i)
                    if (i < left) chunk[c].e[i] = from[i * step];
            }
        }
    }

    // Keeps the contiguous direction contiguous in shared memory; PITCH is the row pitch in elements.
    template <int PITCH> __device__ __forceinline__ void store(T* tile) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) *(uint4*)(tile + across(c) * PITCH + along(c)) = chunk[c].q;
    }

    // Always [k][mn], for kernels that read columns of k: transposes where k was contiguous.
    template <int PITCH> __device__ __forceinline__ void store_k_major(T* tile) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < V; ++i)
                tile[CONTIG_K ? (along(c) + i) * PITCH + across(c) : across(c) * PITCH + along(c) + i] = chunk[c].e[i];
    }
};
