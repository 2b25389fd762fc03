// An operand's way in small.cu: by cp.async into a stage of the ring, block of k by block, and on into registers.
//
// A line lies along the contiguous direction of memory, and so in a stage. What each thread copies is worked out once; what
// lies past an edge arrives as zeros. The k-blocks' size BK and the number of THREADS are the kernel's.
#pragma once
#include "tensor_cores.cuh"

// Lines that begin at multiples of 16 bytes: as they are, and by ldmatrix into registers.
template <int MN, bool CONTIG_K>
struct EvenLines {
    static constexpr int LINE = (CONTIG_K ? BK : MN) / 8, LINES = THREADS / LINE;    // pieces of a line; lines that all threads take at once
    static constexpr int PIECES = MN * BK / 8 / THREADS, PITCH = (CONTIG_K ? BK : MN) + 8, SIZE = (CONTIG_K ? MN : BK) * PITCH;
    const char* from;
    i64 lines, next;            // bytes from one of this thread's lines to the next one, from block to block
    u32 to;

    __device__ __forceinline__ void begin(const char* base, i64 pitch) {
        const u32 across = threadIdx.x / LINE, along = threadIdx.x % LINE;
        from = base + across * pitch + along * 16, to = across * PITCH * 2 + along * 16;
        lines = LINES * pitch, next = CONTIG_K ? BK * 2 : BK * pitch;
        asm volatile("" : "+l"(from), "+l"(lines), "+l"(next), "+r"(to));            // here: the compiler may not put it off
    }
    // `left`: elements of mn and of k that exist from the tile's and the block's first one on; what lies outside arrives as zeros.
    __device__ __forceinline__ void load(u32 stage, int kb, bool inside, const char* base, int mn_left, int k_left) const {
        const int line = threadIdx.x / LINE, along = threadIdx.x % LINE * 8;
        const char* at = from + kb * next;
#pragma unroll
        for (int c = 0; c < PIECES; ++c, at += lines) {
            const u32 there = stage + to + c * LINES * PITCH * 2;
            const int across = line + c * LINES;
            const int left = CONTIG_K ? (across < mn_left ? k_left - along : 0) : (across < k_left ? mn_left - along : 0);
            const int bytes = min(max(left, 0), 8) * 2;
            if (inside) copy_async(there, at);
            else copy_async(there, bytes ? at : base, bytes);
        }
    }
    __device__ __forceinline__ void rows(u32 (&r)[4], const u16* stage, int m, int k) const {
        load_a<CONTIG_K, PITCH>(r, stage, m, k);
    }
    __device__ __forceinline__ void columns(u32 (&r)[4], const u16* stage, int n, int k) const {
        load_b<CONTIG_K, PITCH>(r, stage, n, k);
    }
};

// Lines that begin at any element: the aligned pieces of 16 bytes that hold them, so that a line begins up to 14 bytes behind
// its place in the stage. Eight lines on, and a block of k on, it is as many: they are multiples of 16 bytes away.
template <int MN, bool CONTIG_K>
struct OddLines {
    static constexpr int ALONG = CONTIG_K ? BK : MN, LINES = CONTIG_K ? MN : BK, LINE = ALONG / 8 + 1, PITCH = LINE * 8;
    static constexpr int PIECES = (LINES * LINE + THREADS - 1) / THREADS, SIZE = LINES * PITCH;     // of a line and a stage: elements
    const char* from[PIECES];   // this thread's pieces of the first block
    int ahead[PIECES];          // bytes from each to its line's begin
    i64 next;
    u32 low, high;              // places in a stage of the two elements of a register, if it is the first of a tile's

    static __device__ __forceinline__ int number(int c) { return threadIdx.x + c * THREADS; }

    __device__ __forceinline__ void begin(const char* base, i64 pitch) {
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            const char* const line = base + number(c) / LINE * pitch;
            const int piece = number(c) % LINE * 16, past = int(u64(line) & 15);
            from[c] = line - past + piece, ahead[c] = past - piece;
            asm volatile("" : "+l"(from[c]), "+r"(ahead[c]));
        }
        next = CONTIG_K ? BK * 2 : BK * pitch;
        const u32 eighth = (threadIdx.x & 31) >> 2, two = (threadIdx.x & 3) * 2;
        const auto place = [&](u32 line, u32 along) { return line * PITCH + ((u32(u64(base)) + line * u32(pitch)) & 15) / 2 + along; };
        low = CONTIG_K ? place(eighth, two) : place(two, eighth), high = CONTIG_K ? low + 1 : place(two + 1, eighth);
        asm volatile("" : "+l"(next), "+r"(low), "+r"(high));
    }
    __device__ __forceinline__ void load(u32 stage, int kb, bool, const char* base, int mn_left, int k_left) const {
        const int lines = CONTIG_K ? mn_left : k_left, bytes = min(CONTIG_K ? k_left : mn_left, ALONG) * 2;
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            if (LINES * LINE % THREADS && c == PIECES - 1 && number(c) >= LINES * LINE) break;
            const int exist = number(c) / LINE < lines ? min(max(ahead[c] + bytes, 0), 16) : 0;
            copy_async(stage + number(c) * 16, exist ? from[c] + kb * next : (const char*)(u64(base) & ~15ull), exist);
        }
    }
    // Neighbours along k, 8 x 8 blocks away from the first ones.
    __device__ __forceinline__ u32 pair(const u16* stage, int mn, int k) const {
        const int away = CONTIG_K ? mn * PITCH + k : k * PITCH + mn;
        return stage[low + away] | u32(stage[high + away]) << 16;
    }
    __device__ __forceinline__ void rows(u32 (&r)[4], const u16* stage, int m, int k) const {
        r[0] = pair(stage, m, k), r[1] = pair(stage, m + 8, k), r[2] = pair(stage, m, k + 8), r[3] = pair(stage, m + 8, k + 8);
    }
    __device__ __forceinline__ void columns(u32 (&r)[4], const u16* stage, int n, int k) const {
        r[0] = pair(stage, n, k), r[1] = pair(stage, n, k + 8), r[2] = pair(stage, n + 8, k), r[3] = pair(stage, n + 8, k + 8);
    }
};

template <int MN, bool CONTIG_K, bool ODD> struct LinesOf { typedef EvenLines<MN, CONTIG_K> Type; };
template <int MN, bool CONTIG_K> struct LinesOf<MN, CONTIG_K, true> { typedef OddLines<MN, CONTIG_K> Type; };
