// Weights at any address, read by TMA.
//
// TMA wants addresses, pitches and places in a line that are multiples of 16 bytes. Lines eight apart are such a multiple
// apart, whatever the pitch: so eight maps read any matrix, one for the lines of each residue modulo 8, each from the
// aligned address before its first line on (tensor_maps.eighths). The aligned bytes round each line of a block arrive,
// residue by residue, and are shifted on their way into registers, in the order in which wgmma takes its first operand.
#pragma once
#include "load.cuh"

constexpr int SKEW = 4;                         // pairs of residues lie 16 bytes apart, in other banks
constexpr int W_PITCH = ((W_K ? BK : COLUMNS) + 8 * SKEW) * 2, W_LINES = (W_K ? COLUMNS : BK) / 8;      // bytes of a line, and lines of a residue, in a stage
constexpr int W_BOX = W_LINES * W_PITCH, W_STAGE = 8 * W_BOX;
constexpr int FRAGMENT = 16;                    // registers of a thread for a stage's weights
static_assert(W_BOX % 128 == 0 && W_STAGE % 1024 == 0, "where boxes and stages may begin");

struct WeightMaps { TensorMap map[8]; };

struct Eighths {
    const TensorMap* listed;                    // a list's: eight for each group
    u32 at, pitch;                              // else: the first line's address and the pitch, in bytes, modulo 2^32
    int lines;                                  // from group to group
    int copied;                                 // 1: the rows are copies, 2: the weights
};

// A group's lines.
struct Lines {
    const TensorMap* maps;
    u32 at, pitch;
    int first;                                  // number of the group's first line
    // By how many elements a line begins after the aligned address before it.
    __device__ __forceinline__ int shift(int line) const { return int((at + (line & 7) * pitch) & 15) >> 1; }
};

__device__ __forceinline__ Lines lines_of(const Problem& p, const Launch& l, const Eighths& e, const WeightMaps& maps, const Tile& t) {
    if (!LISTED) return {maps.map, e.at, e.pitch, t.group * e.lines};
    const i64* g = p.table + i64(t.group) * T_COLUMNS;
    return {e.listed + 8 * t.group, u32(__ldg(g + (l.swapped ? T_A : T_B))), 2 * u32(__ldg(g + (l.swapped ? (W_K ? T_A_ROW : T_A_COL) : (W_K ? T_B_COL : T_B_ROW)))), 0};
}

__device__ __forceinline__ int skew(int residue) { return residue >> 1 & (SKEW - 1); }

// One lane's box of each stage of a tile.
struct WeightBox {
    const TensorMap* map;
    int x, y, to;

    __device__ __forceinline__ void begin(const Lines& lines, int col) {
        const int residue = threadIdx.x & 7, line = lines.first + (W_K ? col : 0) + residue;
        map = lines.maps + (line & 7), x = (W_K ? 0 : col) - 8 * skew(residue), y = line >> 3, to = residue * W_BOX;
        if (LISTED) refresh_map(map);
    }
    __device__ __forceinline__ void load(u32 stage, u32 full) {
        const int lane = threadIdx.x & 31;
        if (lane == 0) barrier_expect(full, W_STAGE);
        if (lane < 8) load_box(stage + to, map, full, x, y, 0, EVICT_NORMAL);
        if (W_K) x += BK;
        else y += BK / 8;
    }
};

// Where a thread's elements of the weights lie in a stage. It holds columns m and m + 8 at k = 2c, 2c + 1, 2c + 8 and
// 2c + 9 of each 16 (m and c: a quarter of its lane, and the rest).
struct Place {
    u32 at[2];            // contiguous k: the word of the first pair; else the first elements at k = 2c and 2c + 1
    u32 bits;             // contiguous k: by how much a pair lies across words
};

__device__ __forceinline__ Place place_of(const Lines& lines, int col, int half) {
    const int lane = threadIdx.x & 31, m = half * 64 + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2), c = lane & 3;
    Place r;
    if (W_K) {
        const int residue = lane >> 2, shift = lines.shift(lines.first + col + residue);
        r.at[0] = r.at[1] = residue * W_BOX + skew(residue) * 16 + (m >> 3) * W_PITCH + ((shift >> 1) + c) * 4, r.bits = (shift & 1) * 16;
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int residue = c * 2 + i;
            r.at[i] = residue * W_BOX + skew(residue) * 16 + (m + lines.shift(lines.first + residue)) * 2;
        }
        r.bits = 0;
    }
    asm volatile("" : "+r"(r.at[0]), "+r"(r.at[1]), "+r"(r.bits));      // kept, not worked out anew for every block
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

// 64 columns by 64 k, of which `left` exist: lines after them may be another group's.
__device__ __forceinline__ void read_fragment(u32 (&w)[FRAGMENT], const Place& place, u32 stage, int left) {
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        const int eight = i >> 1, more = (i & 1) * (W_K ? W_PITCH : 16) + eight * (W_K ? 16 : W_PITCH);      // which 8 of k
        if (W_K) w[i] = __funnelshift_r(load_word(stage + place.at[0] + more), load_word(stage + place.at[0] + more + 4), place.bits);
        else w[i] = __byte_perm(load_half(stage + place.at[0] + more), load_half(stage + place.at[1] + more), 0x5410);
    }
    if (W_K || left >= BK) return;
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        const int k = (i >> 1) * 8 + (threadIdx.x & 3) * 2;
        w[i] = k + 1 < left ? w[i] : k < left ? w[i] & 0xFFFF : 0;
    }
}
