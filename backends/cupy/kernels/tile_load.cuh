// Global to shared memory for generic.cu: TileCopy for elements of 4 and 8 bytes, and for 16 bits whose lines are all
// aligned; TileLoad for 16 bits and bytes, whatever the strides and the alignment. What lies past an edge arrives as zeros, for both operands.
#pragma once
#include "common.cuh"

// ---- TileCopy: all by cp.async.
//
// Elements of 4 and 8 bytes are copies of their own size, which may begin at any element and end at any place in shared memory: what is
// contiguous and aligned travels as 16 bytes, all else element by element, turned on its way if need be. No copy passes
// through registers, so several k-blocks are in flight. What lies past an edge arrives as zeros, for both operands.

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
            const bool one_line = SIZE < 4 && (CONTIG_K ? mn_left : k) <= 1;      // whose stride says nothing
            wide = !TURNS && (along == 1 || (CONTIG_K ? k : mn_left) <= 1) && ((u64(base) | (one_line ? 0 : u64(across * SIZE))) & 15) == 0;
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
        if constexpr (SIZE >= 4)        // 16 bits come here with aligned lines only
            if (!whole) copy<SIZE>(tile, from, s.left, CONTIG_K ? k_stride : mn_stride, (CONTIG_K ? mn_stride : k_stride) * SIZE, k_left);
    }

    // The same copies for a thread to start one by one, in order, where they are `wide` and nothing is turned.
    struct Parts {
        static constexpr int V = 16 / SIZE, COUNT = MN * BK / V / THREADS, HOP = THREADS * V / LINE;
        const char* at;      // the next one's
        i64 hop;
        u32 to;
        int lines, bytes;    // how many lines there are from the first copy's on, and how much of it exists

        __device__ __forceinline__ void begin(T* tile, const Source& s, i64 mn_stride, i64 k_stride, int block, int k_left) {
            const int along = threadIdx.x % (LINE / V) * V, across = threadIdx.x / (LINE / V);
            const i64 pitch = (CONTIG_K ? mn_stride : k_stride) * SIZE;
            at = s.from + i64(block) * BK * k_stride * SIZE + across * pitch + along * SIZE, hop = HOP * pitch;
            to = shared_address(tile + across * PITCH + along);
            lines = (CONTIG_K ? s.left : k_left) - across;
            bytes = max(min(((CONTIG_K ? k_left : s.left) - along) * SIZE, 16), 0);
        }
        __device__ __forceinline__ void start(int c) {
            copy_part<16>(to + c * (HOP * PITCH * SIZE), at, c * HOP < lines ? bytes : 0);
            at += hop;
        }
    };

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

// ---- TileLoad for any strides and any alignment: 16 bits and bytes, which cp.async cannot copy one by one.
//
// A tile is MN x BK elements; CONTIG_K says which of its directions is taken to be contiguous in
// memory. Rows that are contiguous and aligned travel as 16 bytes by cp.async; at any other address as the two aligned
// 16 bytes round them, shifted into place in registers; all else, and every edge, element by element under a mask. What is masked is zero, for both operands, so a
// neighbour's NaN is never multiplied.

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
