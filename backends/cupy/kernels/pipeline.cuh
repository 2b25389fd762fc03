// What lies between the copy engine and the tensor cores: the ring of stages, the tiles that are
// announced to all roles, and the loads of one stage.
#pragma once
#include "epilogue.cuh"
#include "schedule.cuh"

constexpr int BK = 64, COLUMNS = 128, CONSUMERS = 2, THREADS = 384;
constexpr int W_BYTES = COLUMNS * BK * 2, X_BYTES = ROWS * BK * 2, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int BLOCK = 64 * BK * 2;                     // 64 x 64 elements, one box of an operand with contiguous mn
constexpr int SLOTS = 4;                               // tiles announced ahead
[[maybe_unused]] constexpr int PITCH = 68;              // floats per row of the general epilogue's staging
constexpr int STAGING_BYTES = PLAIN ? 64 * 128 : 9216; // per consumer warpgroup
constexpr i64 FAR = 1 << 30;                           // ragged maps: see tensor_maps.py

struct Maps { TensorMap w, x[16]; };                   // x[i]: boxes of 8 * (i + 1) rows

struct Launch {
    const TensorMap* listed;    // per group: weight side, row side
    int* counter;               // next tile, finished clusters
    int swapped, busy_rows, vector_out, keep_rows;   // keep_rows: the row side should stay in the L2 cache
};

struct Shared {
    u64 full[STAGES], empty[STAGES], tile_full[SLOTS], tile_empty[SLOTS];
    u64 ask;                    // the next tile is wanted (hopper.cu)
    alignas(16) Tile tiles[SLOTS];
    Schedule schedule;
};
// Stages (1024-byte aligned), staging of results, and the struct above.
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + CONSUMERS * STAGING_BYTES + (int)sizeof(Shared) + 1024;
static_assert(SHARED_BYTES <= 232448, "more shared memory than a thread block may have");

struct Ring {                   // position in the ring of stages: index and parity
    int index = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int blocks) {
        const int sum = index + blocks;
        index = sum % STAGES, parity ^= sum / STAGES & 1;
    }
};

// The next tile, as every role reads it; frees its slot as soon as the copy is in registers.
__device__ __forceinline__ Tile take_tile(Shared& s, int number, bool one_thread) {
    const int slot = number % SLOTS;
    barrier_wait(shared_address(&s.tile_full[slot]), (number / SLOTS) & 1);
    const Tile t = s.tiles[slot];
    if (one_thread) barrier_arrive(shared_address(&s.tile_empty[slot]), 0);
    return t;
}

// Each block's producer thread, before the slot is filled: 32 bytes will come.
__device__ __forceinline__ void expect_tile(Shared& s, int number) { barrier_expect(shared_address(&s.tile_full[number % SLOTS]), sizeof(Tile)); }

__device__ __forceinline__ void announce(Shared& s, int number, const Tile& t) {
    const int slot = number % SLOTS;
    const u32 to = shared_address(&s.tiles[slot]), full = shared_address(&s.tile_full[slot]);
    barrier_wait(shared_address(&s.tile_empty[slot]), ((number / SLOTS) & 1) ^ 1);
    if (CLUSTER == 1) {                              // st.async exists in clusters only
        s.tiles[slot] = t;
        barrier_arrive(full, 0);
        return;
    }
    expect_tile(s, number);
#pragma unroll
    for (u32 rank = 0; rank < CLUSTER; ++rank) {
        store_remote(to, full, rank, make_int4(t.group, t.n, t.rows, t.row0));
        store_remote(to + 16, full, rank, make_int4(t.col0, t.k_len, t.x_row, t.extra));
    }
}

// Where a block's columns begin, or those of one of two warpgroups that share them.
__device__ __forceinline__ i64 first_column(const Tile& t, u32 rank, int half) { return t.col0 + i64(rank) * COLUMNS + half * 64; }

__device__ __forceinline__ int k_blocks(const Tile& t) { return (t.k_len + BK - 1) / BK; }
