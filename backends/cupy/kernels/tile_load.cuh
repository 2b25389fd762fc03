// Global to shared memory for any strides and any alignment: 16 bits and bytes, which cp.async cannot copy one by one.
//
// A tile is MN x BK elements; CONTIG_K says which of its directions is taken to be contiguous in
// memory. Rows that are contiguous and aligned travel as 16 bytes by cp.async; at any other address as the two aligned
// 16 bytes round them, shifted into place in registers; all else, and every edge, element by element under a mask. What is masked is zero, for both operands, so a
// neighbour's NaN is never multiplied.
#pragma once
#include "common.cuh"

// 16 where rows are contiguous and aligned, 1 where they are contiguous, 0 where only single elements will do.
template <class T>
__device__ __forceinline__ int access_width(const char* base, i64 contiguous_stride, i64 other_stride, i64 extent) {
    if (contiguous_stride != 1 && extent > 1) return 0;
    const u64 bits = u64(base) | u64(other_stride * i64(sizeof(T)));
    return (bits & 15) == 0 ? 16 : 1;
}

template <class T, int MN, int BK, bool CONTIG_K, int THREADS>
struct TileLoad {
    static constexpr int V = 16 / sizeof(T);                       // elements per 16 bytes
    static constexpr int ALONG = CONTIG_K ? BK : MN;
    static constexpr int CHUNKS = MN * BK / V / THREADS;
    static_assert(MN * BK % (V * THREADS) == 0, "a tile is a whole number of chunks per thread");

    union Chunk { uint4 q; T e[V]; };
    Chunk chunk[CHUNKS];

    // First element along the contiguous direction, and position along the other, of chunk c.
    static __device__ __forceinline__ int along(int c) { return ((threadIdx.x + c * THREADS) % (ALONG / V)) * V; }
    static __device__ __forceinline__ int across(int c) { return (threadIdx.x + c * THREADS) / (ALONG / V); }

    i64 offset[CHUNKS];      // bytes from the k-block's base to each chunk
    int owned[CHUNKS];       // of its elements, how many lie inside along mn (all V or none where k is contiguous)
    int width;
    int line;                // where mn is contiguous: elements that are left of a line, as far as two tiles

    // Once per tile: what does not change from one k-block to the next.
    __device__ __forceinline__ void begin(const char* base, i64 mn_stride, i64 k_stride, i64 mn_left, i64 k) {
        const i64 step = CONTIG_K ? k_stride : mn_stride, pitch = CONTIG_K ? mn_stride : k_stride;
        width = access_width<T>(base, step, pitch, CONTIG_K ? k : mn_left);
        const int left = int(min64(mn_left, MN));
        line = int(min64(mn_left, 2 * MN));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            offset[c] = (across(c) * pitch + along(c) * step) * i64(sizeof(T));
            owned[c] = CONTIG_K ? (across(c) < left ? V : 0) : max(min(left - along(c), V), 0);
        }
    }
    // Elements of chunk c that exist in a block with k_left of k.
    __device__ __forceinline__ int count(int c, int k_left) const {
        return CONTIG_K ? min(owned[c], max(k_left - along(c), 0)) : across(c) < k_left ? owned[c] : 0;
    }

    // Straight from global to shared memory, where 16-byte accesses are allowed; bytes past the edge
    // arrive as zeros. Nothing passes through registers, so blocks far ahead cost none.
    template <int PITCH> __device__ __forceinline__ void start(T* tile, const char* base, int k_left) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int bytes = count(c, k_left) * int(sizeof(T));
            copy_async(shared_address(tile + across(c) * PITCH + along(c)), bytes ? base + offset[c] : base, bytes);
        }
    }

    // Into registers; `step` is the stride along the contiguous direction, `k_left` counts as far as two blocks.
    // What is shifted lies well before the end of its line, so the bytes after it belong to the operand too.
    __device__ __forceinline__ void load(const char* base, i64 step, int k_left) {
        uint4 next[CHUNKS];
        bool whole[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const char* from = base + offset[c];
            // In terms of what was not clamped: ptxas 13.0 miscompiles `max(min(x, V), 0) == V` where x is negative or zero.
            const int room = (CONTIG_K ? k_left : line) - along(c);
            whole[c] = (CONTIG_K ? owned[c] > 0 : across(c) < k_left) && room >= (width == 16 ? V : 2 * V) && width > 0;
            chunk[c].q = make_uint4(0, 0, 0, 0);
            if (whole[c]) {
                const uint4* words = (const uint4*)(u64(from) & ~15ull);
                chunk[c].q = load_16_bytes(words);
                if (width == 1) next[c] = load_16_bytes(words + (u64(from) & 15 ? 1 : 0));
            }
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const char* from = base + offset[c];
            if (whole[c]) {
                if (width == 1) chunk[c].q = shifted(chunk[c].q, next[c], int(u64(from) & 15));
            } else {
                const int left = count(c, k_left);
#pragma unroll
                for (int i = 0; i < V; ++i)
                    if (i < left) chunk[c].e[i] = *(const T*)(from + i * step * i64(sizeof(T)));
            }
        }
    }

    // Keeps the contiguous direction contiguous in shared memory; PITCH is the row pitch in elements.
    template <int PITCH> __device__ __forceinline__ void store(T* tile) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) *(uint4*)(tile + across(c) * PITCH + along(c)) = chunk[c].q;
    }

    // [mn][k] from an operand that is contiguous along mn: four lines of k would be needed to write words, so bytes it is.
    template <int PITCH> __device__ __forceinline__ void store_turned(T* tile) const {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < V; ++i) tile[(along(c) + i) * PITCH + across(c)] = chunk[c].e[i];
    }
};
