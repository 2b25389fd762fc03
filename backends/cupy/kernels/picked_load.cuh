// Global to shared memory for fused problems in generic.cu: every line of a tile has an address of its own, since rows are
// picked by index and a gate's columns come from two places. What does not exist arrives as zeros, for both operands.
#pragma once
#include "fused.cuh"
#include "tile_load.cuh"

// A tile of MN x BK elements. CONTIG_K: k is taken to be contiguous in memory; LINES_K: and in shared memory, whose lines
// are PITCH elements apart. What is contiguous and aligned travels as 16 bytes, all else element by element.
template <class T, int MN, int BK, bool CONTIG_K, bool LINES_K, int PITCH, int THREADS>
struct PickedLoad {
    static constexpr int SIZE = sizeof(T), V = 16 / SIZE, PER_LINE = (CONTIG_K ? BK : MN) / V, COUNT = MN * BK / V / THREADS;
    static_assert(COUNT * V * THREADS == MN * BK, "a tile is a whole number of copies per thread");

    struct Lines {
        i64 at[MN];             // bytes from the base to each line, -1 where there is none
        u8 run[MN];             // of 16 bytes, how many elements from this line on exist and lie side by side
    };
    // What is the same for all lines and k-blocks of a tile.
    struct Source {
        const char* base;
        const void* by_k;       // which k to read, else null
        i64 k_stride, start_k, extent;
        int is64, wide;         // copies of 16 bytes

        // `apart`: the bytes between two runs of lines that exist, besides the stride.
        __device__ __forceinline__ void begin(const char* from, i64 mn_stride, i64 k_stride_, i64 mn, i64 k, const void* rows, bool of_k, int is64_, i64 start, i64 extent_, i64 apart) {
            base = from, by_k = of_k ? rows : nullptr, k_stride = k_stride_ * SIZE, start_k = start, extent = extent_, is64 = is64_;
            const i64 along = CONTIG_K ? k_stride_ : mn_stride, across = CONTIG_K ? mn_stride : k_stride_;
            const bool picked_along = rows && of_k == CONTIG_K;
            wide = CONTIG_K == LINES_K && !picked_along && (along == 1 || (CONTIG_K ? k : mn) <= 1) && ((u64(from) | u64(across * SIZE) | u64(CONTIG_K ? 0 : apart * SIZE)) & 15) == 0;
        }
        // Bytes from a line's first k to another one of the group, or -1 where an index means none.
        __device__ __forceinline__ i64 at_k(i64 k) const {
            if (!by_k) return k * k_stride;
            const i64 number = picked_row(by_k, is64, start_k + k, extent);
            return number < 0 ? -1 : number * k_stride;
        }
    };

    // Of `block`, of which as many as `k_left` exist. The stage is free: zeros are written at once.
    static __device__ __forceinline__ void load(T* tile, const Lines& lines, const Source& s, int block, int k_left) {
        if (s.wide) {
#pragma unroll
            for (int c = 0; c < COUNT; ++c) {
                const int number = threadIdx.x + c * THREADS, along = number % PER_LINE * V, across = number / PER_LINE;
                const int mn = CONTIG_K ? across : along, k = CONTIG_K ? along : across;
                const i64 line = lines.at[mn], deep = k < k_left ? s.at_k(i64(block) * BK + k) : -1;
                const int count = line < 0 || deep < 0 ? 0 : CONTIG_K ? min(k_left - k, V) : int(lines.run[mn]);
                T* const to = tile + across * PITCH + along;
                if (count > 0) copy_part<16>(shared_address(to), s.base + line + deep, count * SIZE);
                else *(uint4*)to = make_uint4(0, 0, 0, 0);
            }
            return;
        }
#pragma unroll 1
        for (int c = 0; c < COUNT; ++c) {
            const int number = threadIdx.x + c * THREADS, along = number % PER_LINE * V, across = number / PER_LINE;
#pragma unroll
            for (int i = 0; i < V; ++i) {
                const int mn = CONTIG_K ? across : along + i, k = CONTIG_K ? along + i : across;
                const i64 line = lines.at[mn], deep = k < k_left ? s.at_k(i64(block) * BK + k) : -1;
                const char* const from = s.base + line + deep;
                T* const to = tile + (LINES_K ? mn * PITCH + k : k * PITCH + mn);
                const bool exists = line >= 0 && deep >= 0;
                if constexpr (SIZE >= 4) {
                    if (exists) copy_all<SIZE>(shared_address(to), from);
                    else *to = T(0);
                } else {
                    *to = exists ? *(const T*)from : T(0);
                }
            }
        }
    }
};
