// Global to shared memory for elements of 4 and 8 bytes: all by cp.async, whatever the strides and the alignment.
//
// Such elements are copies of their own size, which may begin at any element and end at any place in shared memory: what is
// contiguous and aligned travels as 16 bytes, all else element by element, turned on its way if need be. No copy passes
// through registers, so several k-blocks are in flight. What lies past an edge arrives as zeros, for both operands.
#pragma once
#include "common.cuh"

// 4 or 8 bytes, or 16; the first `bytes` of them, the others become zero.
template <int WIDTH> __device__ __forceinline__ void copy_part(u32 to, const char* from, int bytes) {
    if (WIDTH == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(WIDTH), "r"(bytes) : "memory");
}
template <int WIDTH> __device__ __forceinline__ void copy_all(u32 to, const char* from) {
    if (WIDTH == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(WIDTH) : "memory");
}

// A tile of MN x BK elements. CONTIG_K: k is taken to be contiguous in memory; LINES_K: and in shared memory, whose lines
// are PITCH elements apart.
template <class T, int MN, int BK, bool CONTIG_K, bool LINES_K, int PITCH, int THREADS>
struct TileCopy {
    static constexpr int SIZE = sizeof(T), WARPS = THREADS / 32;
    static constexpr bool TURNS = CONTIG_K != LINES_K;
    // A warp that turns takes DEEP elements of 32 / DEEP lines: as few cache lines as the banks allow.
    static constexpr int LINE = CONTIG_K ? BK : MN, DEEP = LINE / WARPS > 8 ? LINE / WARPS : 8;

    // What is the same for all threads and k-blocks of a tile, kept in shared memory: registers are short.
    struct Source {
        const char* from;    // the tile's first element
        int left;            // lines or elements along mn that exist, as far as a tile
        bool wide;           // copies of 16 bytes

        __device__ __forceinline__ void begin(const char* base, i64 mn_stride, i64 k_stride, i64 mn_left, i64 k) {
            const i64 along = CONTIG_K ? k_stride : mn_stride, across = CONTIG_K ? mn_stride : k_stride;
            from = base, left = int(min64(mn_left, MN));
            wide = !TURNS && (along == 1 || (CONTIG_K ? k : mn_left) <= 1) && ((u64(base) | u64(across * SIZE)) & 15) == 0;
        }
    };

    // Of `block`, of which as many as `k_left` exist.
    static __device__ __forceinline__ void start(T* tile, const Source& s, i64 mn_stride, i64 k_stride, int block, int k_left) {
        const char* const from = s.from + i64(block) * BK * k_stride * SIZE;
        bool whole = false;
        if constexpr (!TURNS) {
            whole = s.wide;
            if (whole) copy<16>(tile, from, s.left, 1, (CONTIG_K ? mn_stride : k_stride) * SIZE, k_left);
        }
        if (!whole) copy<SIZE>(tile, from, s.left, CONTIG_K ? k_stride : mn_stride, (CONTIG_K ? mn_stride : k_stride) * SIZE, k_left);
    }

    // `stride` is that along a line in elements, `pitch` that between lines in bytes.
    template <int WIDTH>
    static __device__ __forceinline__ void copy(T* tile, const char* from, int left, i64 stride, i64 pitch, int k_left) {
        constexpr int V = WIDTH / SIZE, PER_LINE = LINE / V;                    // copies
        constexpr int COUNT = MN * BK / V / THREADS, HOP = TURNS ? WARPS * DEEP / LINE * (32 / DEEP) : THREADS / PER_LINE;
        static_assert(COUNT * HOP == (CONTIG_K ? MN : BK), "a tile is a whole number of copies per thread");
        int along, across;                                                      // of this thread's first copy
        if (TURNS) {
            const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
            along = lane % DEEP + warp % (LINE / DEEP) * DEEP, across = lane / DEEP + warp / (LINE / DEEP) * (32 / DEEP);
        } else {
            along = threadIdx.x % PER_LINE * V, across = threadIdx.x / PER_LINE;
        }
        const char* at = from + across * pitch + along * (stride * SIZE);
        u32 to = shared_address(tile + (LINES_K == CONTIG_K ? across * PITCH + along : along * PITCH + across));
        constexpr int SHARED_HOP = (LINES_K == CONTIG_K ? HOP * PITCH : HOP) * SIZE;
        const i64 hop = HOP * pitch;
        if (left == MN && k_left >= BK) {
#pragma unroll
            for (int c = 0; c < COUNT; ++c, at += hop) copy_all<WIDTH>(to + c * SHARED_HOP, at);
            return;
        }
        const int lines = (CONTIG_K ? left : k_left) - across;
        const int bytes = max(min(((CONTIG_K ? k_left : left) - along) * SIZE, WIDTH), 0);
#pragma unroll
        for (int c = 0; c < COUNT; ++c, at += hop) {
            const int exist = c * HOP < lines ? bytes : 0;
            copy_part<WIDTH>(to + c * SHARED_HOP, exist ? at : from, exist);
        }
    }
};
