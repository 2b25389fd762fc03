// Weights at any address: the aligned bytes round each of their lines come into shared memory by cp.async, as they are, and
// are shifted on their way into registers, in the order in which wgmma takes its first operand.
#pragma once
#include "pipeline.cuh"

constexpr int LINES = W_K ? COLUMNS : BK, CHUNKS = (W_K ? BK : COLUMNS) / 8;      // lines of a stage, 16 bytes each in a line
constexpr int PITCH_RAW = (CHUNKS + 1) * 16, RAW_BYTES = LINES * PITCH_RAW;       // in shared memory a line has one piece more
constexpr int LOADERS = THREADS - CONSUMERS * 128, ABREAST = LOADERS / CHUNKS;    // lines that the loaders take at once
constexpr int FRAGMENT = 16;                                                      // registers of a thread for a stage's weights
static_assert(RAW_BYTES % 1024 == 0 && ABREAST % 8 == 0, "stages keep the swizzle; lines 8 apart have one offset, for pitches are even");

// A tile's weights: its first line at the first k, and how far may be read.
struct Weights {
    u64 at, end;          // first element; past the group's last element
    i64 pitch;            // bytes between lines
    int cols;             // columns that exist from the tile's first one on
};

__device__ __forceinline__ Weights weights_of(const Problem& p, const Launch& l, const Tile& t, u32 rank) {
    const int col = int(first_column(t, rank, 0));
    Weights w;
    if (LISTED) {
        const i64* g = p.table + i64(t.group) * T_COLUMNS;
        w.at = u64(__ldg(g + (l.swapped ? T_A : T_B))), w.cols = int(__ldg(g + (l.swapped ? T_M : T_N)));
        w.pitch = 2 * __ldg(g + (l.swapped ? (W_K ? T_A_ROW : T_A_COL) : (W_K ? T_B_COL : T_B_ROW)));
    } else {
        const Strided& s = l.swapped ? p.a : p.b;
        w.at = u64(s.ptr) + i64(t.group) * s.group * 2, w.cols = int(l.swapped ? p.m : p.n);
        w.pitch = 2 * (l.swapped ? (W_K ? s.row : s.col) : (W_K ? s.col : s.row));
    }
    const i64 lines = W_K ? w.cols : t.k_len, along = W_K ? t.k_len : w.cols;
    w.end = w.at + (lines - 1) * w.pitch + along * 2;
    w.at += W_K ? col * w.pitch : col * 2;
    w.cols -= col;
    return w;
}

// 16 bytes, of which the first `bytes` are read and the others become zero.
__device__ __forceinline__ void copy16(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy16(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same as far as `limit`.
__device__ __forceinline__ void copy_before(u32 to, u64 from, u64 limit, u64 readable) {
    const u32 bytes = from < limit ? u32(min(limit - from, u64(16))) : 0;
    copy16(to, bytes ? from : readable, bytes);
}
// Arrives at a barrier once all copies that this thread has asked for are there.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What one loader copies of each stage: piece `piece` of lines `line`, line + ABREAST, ..., and the last piece of one more.
struct Pieces {
    u64 from, extra_from;             // aligned addresses in the next stage
    i64 stride, step;                 // bytes between its lines, between stages
    int line, extra;                  // its first line; the line whose last piece it copies, if there is one
    u32 to, extra_to;                 // from the start of a stage
};

__device__ __forceinline__ Pieces pieces_of(const Weights& w) {
    const int tid = threadIdx.x - CONSUMERS * 128, piece = tid % CHUNKS;
    Pieces r;
    r.line = tid / CHUNKS, r.extra = tid;
    r.from = ((w.at + r.line * w.pitch) & ~15ull) + piece * 16, r.extra_from = ((w.at + tid * w.pitch) & ~15ull) + CHUNKS * 16;
    r.stride = ABREAST * w.pitch, r.step = W_K ? BK * 2 : BK * w.pitch;
    r.to = r.line * PITCH_RAW + piece * 16, r.extra_to = tid * PITCH_RAW + CHUNKS * 16;
    return r;
}

// One thread's pieces of one stage. What lies past the end of k becomes zero; columns that do not exist may hold
// anything, for their results are never stored.
__device__ __forceinline__ void copy_pieces(Pieces& r, const Weights& w, u32 stage, int k, int left) {
    const bool inside = W_K ? left >= BK + 8 && w.cols >= COLUMNS : left >= BK && w.at + (k + BK - 1) * w.pitch + (COLUMNS + 8) * 2 <= w.end;
    u64 from = r.from;
    if (inside) {
#pragma unroll
        for (int i = 0; i < LINES / ABREAST; ++i, from += r.stride) copy16(stage + r.to + i * ABREAST * PITCH_RAW, from);
        if (LINES == LOADERS || r.extra < LINES) copy16(stage + r.extra_to, r.extra_from);
    } else {
        // Lines end where k does, or where the operand does; lines that do not exist hold nothing.
        const int lines = W_K ? w.cols : left;
        const u64 readable = w.at & ~15ull;
#pragma unroll 1
        for (int i = 0; i < LINES / ABREAST; ++i, from += r.stride) {
            const int line = r.line + i * ABREAST;
            copy_before(stage + r.to + i * ABREAST * PITCH_RAW, from, line >= lines ? 0 : W_K ? w.at + line * w.pitch + (k + left) * 2 : w.end, readable);
        }
        if (r.extra < LINES) copy_before(stage + r.extra_to, r.extra_from, r.extra >= lines ? 0 : W_K ? w.at + r.extra * w.pitch + (k + left) * 2 : w.end, readable);
    }
    r.from += r.step, r.extra_from += r.step;
}

// Where a thread's elements of the weights lie in a stage. It holds columns m and m + 8 at k = 2c, 2c + 1, 2c + 8 and
// 2c + 9 of each 16 (m and c: a quarter of its lane, and the rest). Lines 8 apart have one offset.
struct Place {
    u32 at[2];            // contiguous k: the word of the first pair; else the first elements at k = 2c and 2c + 1
    u32 bits;             // contiguous k: by how much a pair lies across words
};

__device__ __forceinline__ Place place_of(const Weights& w, int half) {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, m = half * 64 + warp * 16 + (lane >> 2), c = lane & 3;
    Place r;
    if (W_K) {
        const u32 offset = u32(w.at + m * w.pitch) & 15;
        r.at[0] = r.at[1] = m * PITCH_RAW + (offset & ~3u) + c * 4, r.bits = (offset & 2) * 8;
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) r.at[i] = (c * 2 + i) * PITCH_RAW + (u32(w.at + (c * 2 + i) * w.pitch) & 15) + m * 2;
        r.bits = 0;
    }
    return r;
}

__device__ __forceinline__ u32 load_word(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ u32 load_half(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ void read_fragment(u32 (&w)[FRAGMENT], const Place& place, u32 stage) {
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        const int k = (i >> 2) * 16 + (i >> 1 & 1) * 8, m = (i & 1) * 8;
        if (W_K) {
            const u32 at = stage + place.at[0] + m * PITCH_RAW + k * 2;
            w[i] = __funnelshift_r(load_word(at), load_word(at + 4), place.bits);
        } else {
            const u32 more = k * PITCH_RAW + m * 2;
            w[i] = __byte_perm(load_half(stage + place.at[0] + more), load_half(stage + place.at[1] + more), 0x5410);
        }
    }
}
