// What lies between the copy engine and the tensor cores: the ring of stages, and the tiles that are announced to all roles.
// load.cuh and hopper_shift_b.cu fill the stages.
#pragma once
#include "epilogue.cuh"
#include "schedule.cuh"

#ifndef SEND
#define SEND 0                      // hopper.cu: the copy engine stores the results
#endif
#ifndef WIDE_ROWS
#define WIDE_ROWS 0                 // rows of results that begin at any address leave by 128 columns
#endif
#ifndef LATE
#define LATE (SEND && !PINGPONG && !WORD_RESULTS)      // while the next tile is multiplied: see consume.cuh
#endif
#ifndef ELEMENT
#define ELEMENT (DOUBLE ? 8 : TF32 ? 4 : INT8 ? 1 : 2)       // bytes of an operand's element
#endif
#ifndef FUSED
#define FUSED 0                     // hopper.cu: more than products and their epilogue (fused.cuh)
#endif
#ifndef GATE
#define GATE 0                      // hopper.cu: how a gate's columns come, see gated.cuh
#endif
#ifndef BIASED
#define BIASED 0                    // hopper.cu: plain results, after a bias of each column
#endif
#ifndef ROW_SCALED
#define ROW_SCALED 0                // hopper.cu: plain results, each row times a number
#endif
#ifndef GATHER
#define GATHER 0                    // hopper.cu: rows are picked by index (picked_rows.cuh)
#endif
#ifndef TILE_COLUMNS
#define TILE_COLUMNS 128            // columns of a tile that one block has (hopper_fp8.cu: or 192)
#endif
#define BROAD (TILE_COLUMNS > 128)
#ifndef EVEN
#define EVEN DOUBLE                 // all stages are of one size, as in hopper_fp8.cu
#endif
#ifndef W_LINE
#define W_LINE 128                  // bytes of a column of the weights in a box
#endif
#ifndef W_BOXES
#define W_BOXES 1                   // boxes of weights of a stage, each with a part of its k
#endif
#ifndef DEEP
#define DEEP 1                      // lines of 128 bytes of a row in a stage, whose blocks of rows follow each other
#endif
#ifndef JAGGED_K
#define JAGGED_K 0                  // hopper_fp8.cu: both operands are copies of a jagged k
#endif
#ifndef LOW
#define LOW 0                       // hopper_weights.cu: all tiles are low, and two thread blocks share a multiprocessor
#endif
#ifndef W_SHIFT
#define W_SHIFT 0                   // log2 of the k that one element of their map holds
#endif
#ifndef LOADERS
#define LOADERS (GATHER ? 3 : 2)   // warps that fill the stages
#endif
#ifndef SHIFTING
#define SHIFTING 0                  // hopper_shift_b.cu: warps that shift the weights of each stage into place
#endif
#define IN_TWO_BOXES 1
#define SIDE_BY_SIDE 2
#if FUSED
#include "fused.cuh"
typedef FusedProblem Given;
#else
typedef Problem Given;
#endif

constexpr int LINE_BYTES = 128;                        // of a stage: the swizzle's width
constexpr int BK = LINE_BYTES / ELEMENT * DEEP, COLUMNS = TILE_COLUMNS, CONSUMERS = 2, THREADS = 384;
// Weights that are shifted come with 16 bytes more of each line.
constexpr int W_BYTES = SHIFTING ? (W_K ? COLUMNS * (BK + 8) : BK * (COLUMNS + 8)) * ELEMENT : COLUMNS * W_LINE * W_BOXES, X_BYTES = ROWS * LINE_BYTES * DEEP, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int LOW_ROWS = 32;                           // of a low tile, as config.LOW_ROWS
enum { CLUSTER_ROWS = LOW ? LOW_ROWS : SPLIT_ROWS ? ROWS * CLUSTER : ROWS, CLUSTER_COLUMNS = SPLIT_ROWS ? COLUMNS : COLUMNS * CLUSTER };      // of a cluster's tile
constexpr int BLOCK = 64 * LINE_BYTES;                 // 64 lines
constexpr int ACROSS = LINE_BYTES / ELEMENT, ACROSS_BYTES = BK * LINE_BYTES;      // columns of a box of weights with contiguous mn, and its bytes
constexpr int RESULT = DOUBLE ? 8 : WORD_RESULTS ? 4 : 2;                  // bytes of a plain result
constexpr int SLOTS = 4;                               // tiles announced ahead
#ifndef FAST_MEMORY
#define FAST_MEMORY 0                                  // as build.FAST_MEMORY
#endif
constexpr int LONG_K = FAST_MEMORY ? 0x7FFFFFFF : 5120;        // see stage_bytes
// The ring, and stages at most, each with its two barriers.
constexpr int LEAST_BYTES = W_BYTES + (LOW ? DEEP : 1) * STEP * LINE_BYTES;      // of a stage
#ifdef RING
constexpr int RING_BYTES = RING, PLACES = RING / LEAST_BYTES;
#else
constexpr int RING_BYTES = STAGES * STAGE_BYTES, PLACES = EVEN ? STAGES : RING_BYTES / LEAST_BYTES + 1;
#endif
[[maybe_unused]] constexpr int PITCH = 68;              // floats per row of the general epilogue's staging
constexpr int STAGING_BYTES = LOW && SEND ? LOW_ROWS * 128 : BROAD ? 64 * 2 * COLUMNS : PLAIN || GATE ? 64 * 128 : 9216; // per consumer warpgroup
constexpr i64 FAR = 1 << 30;                           // ragged maps: see arguments.py

struct Maps {
    TensorMap w, x[16];         // x[i]: boxes of 8 * (i + 1) rows
#if SEND
    TensorMap out;
#endif
};

struct Launch {
    const TensorMap* listed;    // per group: weight side, row side
    int* counter;               // next tile, finished clusters
    int swapped, busy_rows, vector_out, keep_rows;   // keep_rows: the row side should stay in the L2 cache
};

struct Shared {
    u64 full[PLACES], empty[PLACES], tile_full[SLOTS], tile_empty[SLOTS];
    u64 ask;                    // the next tile is wanted (hopper.cu)
#if SHIFTING
    u64 raw[PLACES];            // the weights are there, and not yet in their places
#endif
#if LOW
    u64 rows_full[PLACES], numbers_full[2], numbers_empty[2];
#endif
#if GATHER && !RAGGED_K
    alignas(16) int picked[8][ROWS / 8];    // numbers of a tile's rows: of every eighth row one after the other (picked_rows.cuh)
#endif
    u32 begins[LOADERS][PLACES];   // where each stage in flight begins (load.cuh), for each of the warps that load
    alignas(16) Tile tiles[SLOTS];
    Schedule schedule;
};
// Stages (1024-byte aligned), staging of results, and the struct above; each kernel compares it with SHARED, or a layout of
// its own.
constexpr int SHARED_BYTES = RING_BYTES + CONSUMERS * STAGING_BYTES + (int)sizeof(Shared) + 1024;
static_assert(SHARED <= 232448, "more shared memory than a thread block may have");

// A tile's stages, of a block of k each: none of an empty tile.
__device__ __forceinline__ int k_blocks(const Tile& t) { return t.n > 0 ? (t.k_len + BK - 1) / BK : 0; }

// Bytes of a tile's stages. A lower tile's are smaller, so more of them are in flight: what a stage holds is multiplied
// sooner, but the memory answers just as late. Not so where the memory bounds most tiles (low pieces; on an H100 a long k):
// there more would only queue, and hold up the tiles that wait for little.
__device__ __forceinline__ u32 stage_bytes(const Tile& t) {
    if (LOW) return W_BYTES + t.n * (DEEP * LINE_BYTES);
    if (ROWS <= 128 || t.k_len > LONG_K) return STAGE_BYTES;
    const int rows = LISTED ? max(t.n, t.extra * CLUSTER) : t.n;
    return W_BYTES + (X_K ? (rows + STEP - 1) / STEP * STEP : (rows + ACROSS - 1) & ~(ACROSS - 1)) * LINE_BYTES;
}

// A position in the ring, which every role walks through alike: stages follow each other, and one that would reach past
// the end begins at the start.
struct Ring {
    u32 at = 0;                 // where the stage lies
    int place = 0;              // which barriers are its own, and their parity
    u32 parity = 0;
    __device__ __forceinline__ void fit(u32 bytes) { if (!EVEN && at + bytes > RING_BYTES) at = 0; }
    // To the first of a tile's `blocks` stages, each of which takes the bytes that are returned.
    __device__ __forceinline__ u32 begin(const Tile& t, int blocks) {
        const u32 bytes = stage_bytes(t);
        if (blocks > 0) fit(bytes);
        return bytes;
    }
    __device__ __forceinline__ void next(u32 bytes) {
        at += bytes;
        fit(bytes);
        if (++place < PLACES) return;
        place = 0, parity ^= 1;
        if (EVEN) at = 0;
    }
};

// A block's half of a tile whose columns are one block's. The halves take as many bytes of the ring in both blocks.
__device__ __forceinline__ void take_half(Tile& t, u32 rank) {
    const int half = (t.n / 8 + 1) / 2 * 8, before = rank * half;
    t.row0 += before, t.x_row += before, t.rows = max(min(t.rows - before, half), 0);
    t.n = half, t.col0 -= rank * COLUMNS;           // first_column adds this again
}

// The next tile, as every role reads it: whole warps, or (`lanes` = 1) the first thread of one. Each frees the slot for
// itself alone, when all of its lanes hold their copies: nobody may arrive for a warp that could still be reading.
__device__ __forceinline__ Tile take_tile(Shared& s, int number, u32 lanes, int* marks = nullptr) {
    const int slot = number % SLOTS;
    barrier_wait(shared_address(&s.tile_full[slot]), (number / SLOTS) & 1);
    Tile t = s.tiles[slot];
    if (marks) *marks = t.group & MARKS;
    if (HALVES_LAST && (t.group & HALVES)) take_half(t, cluster_rank());
    t.group &= ~MARKS;
    __syncwarp(lanes);
    if ((threadIdx.x & 31) == 0) barrier_arrive(shared_address(&s.tile_empty[slot]), 0);
    return t;
}

// Each block's producer thread, before the slot is filled: 32 bytes will come.
__device__ __forceinline__ void expect_tile(Shared& s, int number) { barrier_expect(shared_address(&s.tile_full[number % SLOTS]), sizeof(Tile)); }

// `here`: in this block alone.
__device__ __forceinline__ void announce(Shared& s, int number, const Tile& t, bool here = CLUSTER == 1) {
    const int slot = number % SLOTS;
    const u32 to = shared_address(&s.tiles[slot]), full = shared_address(&s.tile_full[slot]);
    barrier_wait(shared_address(&s.tile_empty[slot]), ((number / SLOTS) & 1) ^ 1);
    if (CLUSTER == 1 || here) {                      // st.async exists in clusters only
        s.tiles[slot] = t;
        barrier_arrive_here(full);
        return;
    }
    expect_tile(s, number);
#pragma unroll
    for (u32 rank = 0; rank < CLUSTER; ++rank) {
        store_remote(to, full, rank, make_int4(t.group, t.n, t.rows, t.row0));
        store_remote(to + 16, full, rank, make_int4(t.col0, t.k_len, t.x_row, t.extra));
    }
}

// The announcing thread leaves last of all that arrive at its slots: those of other blocks may be late.
__device__ __forceinline__ void wait_until_taken(Shared& s, int last) {
    for (int number = max(last - SLOTS + 1, 0); number <= last; ++number) barrier_wait(shared_address(&s.tile_empty[number % SLOTS]), (number / SLOTS) & 1);
}

// Where a block's columns begin, or those of one of two warpgroups that share them.
__device__ __forceinline__ i64 first_column(const Tile& t, u32 rank, int half) { return t.col0 + i64(rank) * COLUMNS + half * 64; }

// Jagged k: the first k of a tile. Of rows (X_K) or weights (W_K) that lie along k it is that of a copy (pack.cu), where groups
// begin at multiples of PADDED; else of a ragged map, which counts back from the group's end.
constexpr int PADDED = BK > 64 ? BK : 64;
__device__ __forceinline__ int first_k(const Tile& t, bool padded) {
    return !RAGGED_K && !JAGGED_K ? 0 : padded ? (t.extra / PADDED + t.group) * PADDED : int(FAR) - t.k_len;
}
