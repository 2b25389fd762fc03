// Rows that are picked by index, on their way into the stages of hopper.cu. Where k is contiguous in them, 64 of k of a row are
// one line of 128 bytes; where rows are tokens of a jagged k, 64 columns of a row are. An index that means no row gives a line
// of zeros, and so do the up to 7 rows past a piece's end, and tokens past a group's.
#pragma once
#include "load.cuh"

static_assert(CLUSTER <= 2 && !(CLUSTER == 2 && PICKS_W), "copies reach no other block: a cluster's blocks have rows of their own, and share weights");

// The warps that copy issue an instruction every few cycles, and all copies of a stage have to be on their way within the
// time of its products: a copy of a line that exists as a whole is four instructions. Others take a path of their own.
__device__ __forceinline__ bool is_near(i64 pitch) { return (pitch >> 32) == 0; }
// Where a line begins; lines are `pitch` bytes apart.
__device__ __forceinline__ const char* line_at(const char* base, u32 line, u32 pitch) {
    u64 distance;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(distance) : "r"(line), "r"(pitch));
    return base + distance;
}

#if RAGGED_K
// Two warps copy 16 bytes per lane, each half of a stage's 64 tokens; the swizzle is done by the address. PICKS_W: they are rows
// of the weight side, and the first warp also says when the next tile is wanted, as load_weights does.
__device__ __forceinline__ void copy_picked_tokens(const Given& p, const Launch& l, Shared& s, u32 stages, int which) {
    constexpr int AHEAD = 8, BOXES = (PICKS_W ? COLUMNS : ROWS + 63) / 64;
    const Fused& f = p.fused;
    const int lane = threadIdx.x & 31, chunk = lane & 7, line = which * 32 + (lane >> 3);
    const bool of_a = PICKS_W == (l.swapped != 0);
    const char* const base = of_a ? p.a.ptr : p.b.ptr;
    const i64 pitch = (of_a ? p.a.col : p.b.row) * 2, columns = of_a ? p.m : p.n, extent = of_a ? f.a_extent : f.b_extent;
    const void* const rows = of_a ? f.a_rows : f.b_rows;
    const int is64 = of_a ? f.a64 : f.b64;
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        if (t.n == STOP) break;
        const int column = PICKS_W ? t.col0 : t.x_row, wide = PICKS_W ? BOXES : (t.n + 63) / 64;
        const i64 first = column + chunk * 8;
        const bool whole = is_near(pitch) && columns - column >= wide * 64;
        const char* const line_start = base + first * 2;
        const int left = int(max64(min64(columns - first, 1024), 0));
        const int blocks = k_blocks(t);
        const auto picked_at = [&](int k) { return k < t.k_len ? int(picked_row(rows, is64, t.extra + k, extent)) : -1; };
        const int ask_at = PICKS_W && which == 0 ? max(blocks - AHEAD, 0) : -1;
        if (PICKS_W && which == 0 && blocks == 0 && elected()) barrier_arrive_here(shared_address(&s.ask));
        const u32 bytes = ring.begin(t, blocks);
        int coming = picked_at(which * 32 + lane);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes)) {
            const int picked = coming;
            coming = picked_at((kb + 1) * BK + which * 32 + lane);      // asked early, used late
            const u32 to = stages + ring.at + (PICKS_W ? 0 : W_BYTES) + line * LINE_BYTES;
            room.take(s, s.begins[which ? 2 : PICKS_W ? 0 : 1], ring, bytes);
            int found[8];                                   // all numbers first: a copy is a barrier to the compiler
#pragma unroll
            for (int i = 0; i < 8; ++i) found[i] = __shfl_sync(~0u, picked, i * 4 + (lane >> 3));
            const auto place = [&](int i) { return to + i * 4 * LINE_BYTES + ((chunk ^ ((line + i * 4) & 7)) << 4); };
            if (whole) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const char* const from = line_at(line_start, max(found[i], 0), u32(pitch));
#pragma unroll
                    for (int b = 0; b < BOXES; ++b)
                        if (b < wide) copy_async_if(~found[i], 1u << 31, place(i) + b * BLOCK, from + b * LINE_BYTES);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < 8; ++i) {
                    const int row = __shfl_sync(~0u, picked, i * 4 + (lane >> 3));
                    const char* const from = line_start + max(row, 0) * pitch;
#pragma unroll 1
                    for (int b = 0; b < wide; ++b) {
                        const int count = row < 0 ? 0 : max(min(left - b * 64, 8), 0) * 2;
                        copy_async(place(i) + b * BLOCK, count ? from + b * LINE_BYTES : base, count);
                    }
                }
            }
            arrive_when_copied(shared_address(&s.full[ring.place]));
            if (kb == ask_at && lane == 0) barrier_arrive_here(shared_address(&s.ask));
        }
    }
    if (CLUSTER > 1) room.wait_for_all(s, ring);
}
#else
// A row's number, or -1.
__device__ __forceinline__ int picked_of(const Given& p, const Tile& t, int row) {
    const Fused& f = p.fused;
    return row < t.rows ? int(picked_row(f.a_rows, f.a64, t.x_row + row, f.a_extent)) : -1;
}

// 16 bytes of each of COUNT <= 8 rows, which are eight apart in the stage. Bit 4 i of `there`: the i-th one exists.
template <int COUNT> __device__ __forceinline__ void copy_lines(u32 to, const char* from, u32 pitch, const int* picked, u32 there, int count = COUNT) {
    int4 found[(COUNT + 3) / 4];                            // all numbers first: a copy is a barrier to the compiler
#pragma unroll
    for (int i = 0; i < (COUNT + 3) / 4; ++i) found[i] = ((const int4*)picked)[i];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int4 four = found[i / 4];
        const int row = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
        if (i < count) copy_async_if(there, 1u << 4 * i, to + i * 8 * LINE_BYTES, line_at(from, row, pitch));
    }
}

// Two warps copy 16 bytes per lane, each four of eight rows; the swizzle is done by the address. Their
// numbers wait in shared memory, of which each lane reads what its own warp wrote: there are too many for registers.
__device__ __forceinline__ void copy_picked_rows(const Given& p, Shared& s, u32 stages, int which) {
    constexpr int BATCHES = ROWS / 64;
    const int lane = threadIdx.x & 31, chunk = lane & 7, line = which * 4 + (lane >> 3);
    const i64 pitch = p.a.row * 2;
    const u32 place = W_BYTES + line * LINE_BYTES + ((chunk ^ line) << 4);
    const int* const picked = s.picked[line];
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        if (t.n == STOP) break;
        __syncwarp();                                       // the numbers of the tile before have been read
        u32 there[BATCHES];                                 // whether rows exist, those of this lane four bits apart
        int found[BATCHES];
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) found[b] = picked_of(p, t, b * 64 + (lane >> 2) * 8 + which * 4 + (lane & 3));
#pragma unroll
        for (int b = 0; b < BATCHES; ++b) {
            there[b] = __ballot_sync(~0u, found[b] >= 0) >> (lane >> 3);
            s.picked[which * 4 + (lane & 3)][b * 8 + (lane >> 2)] = max(found[b], 0);
        }
        __syncwarp();
        const int blocks = k_blocks(t), lines = t.n / 8;
        const int whole = is_near(pitch) ? t.k_len / BK : 0;
        const u32 bytes = ring.begin(t, blocks);
        const char* from = p.a.ptr + chunk * 16;
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes), from += LINE_BYTES) {
            const u32 to = stages + ring.at + place;
            room.take(s, s.begins[1 + which], ring, bytes);
            const int count = max(min(t.k_len - kb * BK - chunk * 8, 8), 0) * 2;
#pragma unroll
            for (int b = 0; b < BATCHES; ++b) {
                const int left = lines - b * 8;
                const u32 at = to + b * 64 * LINE_BYTES;
                if (left <= 0) break;
                if (kb >= whole) {
#pragma unroll 1
                    for (int i = 0; i < min(left, 8); ++i)  // what does not exist reads no bytes of the first row
                        copy_async(at + i * 8 * LINE_BYTES, from + picked[b * 8 + i] * pitch, there[b] >> 4 * i & 1 ? count : 0);
                } else if (left >= 8) {
                    copy_lines<8>(at, from, u32(pitch), picked + b * 8, there[b]);
                } else {
                    copy_lines<7>(at, from, u32(pitch), picked + b * 8, there[b], left);
                }
            }
            arrive_when_copied(shared_address(&s.full[ring.place]));
        }
    }
    if (CLUSTER > 1) room.wait_for_all(s, ring);
}
#endif
