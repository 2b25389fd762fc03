// Rows that are picked by index, on their way into the stages of hopper.cu, where k is contiguous in them: 64 of k of a row are
// one line of 128 bytes. An index that means no row gives a line of zeros, and so do the up to 7 rows past a piece's end.
#pragma once
#include "load.cuh"

// A row's number, or -1.
__device__ __forceinline__ int picked_of(const Given& p, const Tile& t, int row) {
    const Fused& f = p.fused;
    return row < t.rows ? int(picked_row(f.a_rows, f.a64, t.x_row + row, f.a_extent)) : -1;
}

#if GATHER == BY_BOXES
// The copy engine brings each row as a box of its own; the row -1 lies outside of the map, which fills it with zeros. A
// cluster's blocks load a part of the rows each, for all of them.
__device__ __forceinline__ void load_picked_boxes(const Given& p, const Maps& maps, Shared& s, u32 stages, u32 rank) {
    constexpr int MOST = (ROWS / 8 + CLUSTER - 1) / CLUSTER * 8, EACH = (MOST + 31) / 32;
    const int lane = threadIdx.x & 31;
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        if (t.n == STOP) break;
        const bool alone = CLUSTER == 1 || (marks & HALVES);
        const int part = alone ? t.n : (t.n / 8 + CLUSTER - 1) / CLUSTER * 8, first = alone ? 0 : rank * part, height = min(part, t.n - first);
        int picked[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) picked[i] = picked_of(p, t, first + i * 32 + lane);
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        const u32 bytes = stage_bytes(t), rows = stages + W_BYTES + first * LINE_BYTES;
        if (blocks > 0) ring.fit(bytes);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes)) {
            const u32 full = shared_address(&s.full[ring.place]), to = rows + ring.at;
            room.take(s, s.begins[1], ring, bytes);
            if (elected()) barrier_expect(full, t.n * LINE_BYTES);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int r = i * 32 + lane;
                if (r >= height) continue;
                if (alone) load_box(to + r * LINE_BYTES, &maps.x[0], full, kb * BK, picked[i], 0, EVICT_NORMAL);
                else multicast_box(to + r * LINE_BYTES, &maps.x[0], full, (1 << CLUSTER) - 1, kb * BK, picked[i], 0, EVICT_NORMAL);
            }
        }
    }
    if (CLUSTER > 1) room.wait_for_all(s, ring);
}
#else
// Two warps copy 16 bytes per lane, each four of eight rows; the swizzle is done by the address. A block's own rows only. Their
// numbers wait in shared memory, of which each lane reads what its own warp wrote: there are too many for registers.
static_assert(CLUSTER == 1, "copies reach no other block");
__device__ __forceinline__ void copy_picked_rows(const Given& p, Shared& s, u32 stages, int which) {
    const int lane = threadIdx.x & 31, chunk = lane & 7, line = which * 4 + (lane >> 3);
    const i64 pitch = p.a.row * 2;
    const u32 place = W_BYTES + line * LINE_BYTES + ((chunk ^ line) << 4);
    const int* const picked = s.picked + line;               // of every eighth row
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        int marks;
        const Tile t = take_tile_together(s, number, marks);
        if (t.n == STOP) break;
        __syncwarp();                                       // the numbers of the tile before have been read
#pragma unroll 1
        for (int i = lane; i < t.n / 2; i += 32) {
            const int row = (i >> 2) * 8 + which * 4 + (i & 3);
            s.picked[row] = picked_of(p, t, row);
        }
        __syncwarp();
        const int blocks = t.n > 0 ? k_blocks(t) : 0;
        const u32 bytes = stage_bytes(t);
        if (blocks > 0) ring.fit(bytes);
        const char* from = p.a.ptr + chunk * 16;
        int left = t.k_len - chunk * 8;
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes), from += LINE_BYTES, left -= BK) {
            const u32 to = stages + ring.at + place;
            const int count = max(min(left, 8), 0) * 2;
            room.take(s, s.begins[1 + which], ring, bytes);
#pragma unroll 4
            for (int r = 0; r < t.n; r += 8) {
                const int found = picked[r];                // what does not exist reads no bytes of the first row
                copy_async(to + r * LINE_BYTES, from + max(found, 0) * pitch, found < 0 ? 0 : count);
            }
            arrive_when_copied(shared_address(&s.full[ring.place]));
        }
    }
}
#endif
