// Tiles of at most 16 rows under quantised weights: bound by the memory, if codes become numbers in few enough instructions.
//
// A lane multiplies k of its own: 16 bytes of codes of each of its two columns, one load from a stage. mma.sync takes its operands
// from registers, so the sum over k may be in any order, as long as both sides have the same: a lane reads from its rows the k
// that its codes have. Codes next to each other go to different pairs (of four bits the i-th and the one four behind it, whose
// bits lie 16 apart in a word), and a warp of its own puts each 16 bytes of the rows into that order before the others
// read them. The lane's k lie in one block of scales, where scales multiply the weights.
#pragma once
#include "tensor_cores.cuh"
#include "weights.cuh"

// Stages whose scales and zero points are held or on their way. (H200, low tiles with two instead of four: int4 0.93 to 0.97 of the
// time; mxfp4 0.98 where K is 768, 1.05 to 1.13 where it is 4096 or more.)
constexpr int FEW_AHEAD = SCALE_K == 0 ? 1 : LOW && !FOLD ? 2 : 4;
constexpr int CHUNKS = FOUR_BITS ? 4 : 2;               // pieces of 16 bytes of a row that a lane has of a stage
constexpr int BOX_K = BK / W_BOXES, LANE_K = BOX_K / 4;
// Warpgroups take half of a stage's k each, of all columns, but for float8: each warp has 16 columns of both halves, so that one read
// of the rows serves 32 columns. In the end each gives its sums of the other half to the other one. (H200, 32 experts of 4096 x
// 7168, 128 rows: int8 248 us, else 282; float8 254, else 247.)
constexpr bool BY_HALVES = ARRANGED;
static_assert(W_BOXES == (BY_HALVES ? 2 : 1) && DEEP % W_BOXES == 0, "a box of weights for each warpgroup");
constexpr int HALVES_HERE = BY_HALVES ? 2 : 1;
// The next tile's first scales are asked for before the warpgroups join their sums and the results leave, where a block of k has
// its own: else they are not used before a tile's end, and asking early takes longer (int8, K = 768: 1.08 of the time; H200).
constexpr bool ASKS_EARLY = SCALE_K > 0;
// Sums that are added to in turns, where a lane has few others and each product would wait for the one before.
constexpr int CHAINS = BY_HALVES ? 1 : 2;
constexpr int LOW_RESULTS = 16 * 128;                   // bytes of a warpgroup's staging before the sums that it gives away
constexpr int STAGE_BLOCKS = SCALE_K && BK > SCALE_K ? BK / SCALE_K : 1;     // blocks from a lane's to its next

// ---- Rows ----

// The rows' 8 numbers of 16 bytes in the order of their codes' pairs.
__device__ __forceinline__ uint4 arranged(uint4 v) {
    if (FOUR_BITS) return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
}

#if ARRANGED
// The rows of one stage, eight or sixteen.
template <int EIGHTS> __device__ __forceinline__ void arrange_stage(u32 rows) {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
        uint4 v[DEEP][2];
#pragma unroll
        for (int i = 0; i < DEEP * 2; ++i) v[i / 2][i & 1] = load_shared16(rows + e * 1024 + i / 2 * FEW_APART + (i & 1) * 512);
#pragma unroll
        for (int i = 0; i < DEEP * 2; ++i) store_shared16(rows + e * 1024 + i / 2 * FEW_APART + (i & 1) * 512, arranged(v[i / 2][i & 1]));
    }
}

// One warp: rows that have come, of low tiles in another order, are handed on to those who multiply. (load_rows puts a proxy fence
// between what is written here and the next stage there.)
__device__ __forceinline__ void arrange_rows(Shared& s, u32 stages) {
    const int lane = threadIdx.x & 31;
    Ring ring;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        const u32 bytes = ring.begin(t, blocks);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes)) {
            barrier_wait(shared_address(&s.rows_full[ring.place]), ring.parity);
            const u32 rows = stages + ring.at + W_BYTES + lane * 16;
            if (t.n <= 8) arrange_stage<1>(rows);
            else if (t.n <= FEW_ROWS) arrange_stage<2>(rows);
            __syncwarp();
            if (lane == 0) barrier_arrive_here(shared_address(&s.full[ring.place]));
        }
    }
}
#endif

// ---- Scales and zero points of a lane's k ----

// The numbers of one column: `at` that of the lane's first block, the others behind it by a distance that all columns share.
template <int CODE> struct LaneQueue {
    const char* at;
    u32 held[FEW_AHEAD];

    __device__ __forceinline__ void begin(const GroupGrid& g, i64 column, int block, u32 absent) {
        at = g.ptr ? entry_of(g, column, 0) + block * g.k * bytes_of(CODE) : nullptr;
        held[0] = SCALE_K == 0 && at ? load_code<CODE>(at) : absent;
    }
    __device__ __forceinline__ void ask(int slot, i64 behind) { held[slot] = load_code<CODE>(at + behind); }
};

struct LaneNumbers {
    static constexpr int COUNT = 2 * HALVES_HERE;       // columns
    static constexpr int ZERO = ZEROS ? ZERO_CODE : CODE_U8;
    LaneQueue<SCALE_CODE> scale[COUNT];
    LaneQueue<ZERO> zero[COUNT];
    i64 scale_step, scale_behind, zero_step, zero_behind;       // bytes from stage to stage; how far the numbers asked for last are
    int first_k, block, blocks;     // this lane's of a stage; its block of the stage that was asked for last, and how many there are

    // Stages behind the last block's end have zeros, whichever number of their column these meet.
    __device__ __forceinline__ void begin(const GroupGrid& scales, const GroupGrid& zeros, i64 column, i64 columns, int k, int box) {
        first_k = box * BOX_K + int(threadIdx.x & 3) * LANE_K;
        blocks = SCALE_K ? (k + SCALE_K - 1) / (SCALE_K ? SCALE_K : 1) : 1, block = min(lane_block(0), blocks - 1);
        scale_behind = zero_behind = 0;
        scale_step = scales.k * bytes_of(SCALE_CODE) * STAGE_BLOCKS, zero_step = zeros.k * bytes_of(ZERO) * STAGE_BLOCKS;
        keep_in_register(scale_step);
        if (ZEROS) keep_in_register(zero_step);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const i64 known = min64(column + (i & 1) * 8 + (i >> 1) * 64, columns - 1);
            scale[i].begin(scales, known, block, one_of(SCALE_CODE));
            if (ZEROS) zero[i].begin(zeros, known, block, 0);
        }
#pragma unroll
        for (int i = 0; i < (SCALE_K ? FEW_AHEAD : 0); ++i) load(i, i > 0 && next_block(i));
    }
    __device__ __forceinline__ void ask(int slot, int stage) {
        if (SCALE_K) load(slot, next_block(stage));
    }
    __device__ __forceinline__ int lane_block(int stage) const { return (stage * BK + first_k) / (SCALE_K ? SCALE_K : 1); }
    // Whether there is a block for a stage behind the one before it.
    __device__ __forceinline__ bool next_block(int stage) {
        const int next = BK % (SCALE_K ? SCALE_K : 1) == 0 ? block + STAGE_BLOCKS : lane_block(stage);
        const bool further = next < blocks && next > block;
        if (further) block = next;
        return further;
    }
    __device__ __forceinline__ void load(int slot, bool further) {
        if (further) scale_behind += scale_step, zero_behind += zero_step;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            scale[i].ask(slot, scale_behind);
            if (ZEROS) zero[i].ask(slot, zero_behind);
        }
    }
    __device__ __forceinline__ float factor(int slot, int column) const { return decode<SCALE_CODE>(scale[column].held[slot]); }
    __device__ __forceinline__ bool large(int slot) const {
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) codes |= scale[i].held[slot];
        return AT_ONCE_LIFTED && (codes & 0x80) != 0;
    }
};

// ---- Codes ----

// Whole numbers in the low 8 bits of a bfloat16 are its smallest ones, counted in 2^-133. One fused multiply-add takes their
// offset away and makes them multiples of 1 / PER_UNIT, as large as a factor of bfloat16 can make them; sums are multiplied by
// PER_UNIT when a tile ends. Powers of two: each step is exact.
constexpr bool COUNTED = BFLOAT && !ZEROS && (W_CODE == CODE_I8 || W_CODE == CODE_INT4 || W_CODE == CODE_UINT4);
constexpr float PER_UNIT = COUNTED ? 64.0f : 1.0f;
constexpr u32 FROM_LOW = 0x7F007F00u, FROM_FOURTH = 0x7D007D00u;       // 2^127, or 2^123 where they begin with bit 4
constexpr u32 OFFSET = W_CODE == CODE_I8 ? 0xC000C000u : W_CODE == CODE_INT4 ? 0xBE00BE00u : 0x80008000u;      // -128, -8 or 0 units

// What codes are joined with: an instruction has room for one constant, and the assembler would load the other one into a register
// each time. So these are no constants, but have `nothing` added, which is zero and only known when the kernel runs.
struct CountMasks {
    u32 low = W_CODE == CODE_I8 ? 0x00FF00FFu : 0x000F000Fu, fourth = 0x00F000F0u, from_low = FROM_LOW, from_fourth = FROM_FOURTH;
    Masks others;
    __device__ __forceinline__ void keep(u32 nothing) {
        low += nothing, fourth += nothing, from_low += nothing, from_fourth += nothing;
        others.keep(nothing);
    }
};
__device__ __forceinline__ u32 counted_low(u32 word, const CountMasks& masks) {
    constexpr u32 sign = W_CODE == CODE_I8 ? 0x00800080u : W_CODE == CODE_INT4 ? 0x00080008u : 0;
    return fma_pairs((word & masks.low) ^ sign, masks.from_low, OFFSET);
}
__device__ __forceinline__ u32 counted_fourth(u32 word, const CountMasks& masks) {
    return fma_pairs((word & masks.fourth) ^ (W_CODE == CODE_INT4 ? 0x00800080u : 0), masks.from_fourth, OFFSET);
}

// Two pairs of a word: of four bits those of its lower bytes' halves, or with `upper` those of the upper ones.
__device__ __forceinline__ void two_pairs(u32 word, bool upper, const CountMasks& masks, u32& first, u32& second) {
    if (W_CODE == CODE_E4M3 || W_CODE == CODE_E5M2) {
        first = pair_of_bytes(word), second = pair_of_bytes(word >> 16);
        return;
    }
    if (W_CODE == CODE_I8) {
        first = COUNTED ? counted_low(word, masks) : pair_of_even_bytes(word, masks.others);
        second = COUNTED ? counted_low(word >> 8, masks) : pair_of_even_bytes(word >> 8, masks.others);
        return;
    }
    if (W_CODE == CODE_E2M1 && BFLOAT) {        // sign and magnitude six bits apart: one product puts both into place
        constexpr u32 IN_PLACE = 0x81C081C0u;
        if (upper) {
            const u32 moved = word >> 6;
            first = (moved & 0x003C003Cu) * 0x0410u & IN_PLACE, second = (word & 0x80008000u) | (moved & 0x01C001C0u);
        } else {
            first = (word & 0x000F000Fu) * 0x1040u & IN_PLACE, second = (word & 0x00F000F0u) * 0x0104u & IN_PLACE;
        }
        return;
    }
    if (upper) word >>= 8;
    if (W_CODE == CODE_E2M1) {
        first = (word << 12 & 0x80008000u) | (word << 9 & 0x0E000E00u), second = (word << 8 & 0x80008000u) | (word << 5 & 0x0E000E00u);
    } else if (COUNTED) {
        first = counted_low(word, masks), second = counted_fourth(word, masks);
    } else {
        first = pair_of_counts(word, masks.others), second = pair_of_counts(word >> 4, masks.others);
    }
}

// The products of one box: 16 bytes of codes of each of a lane's columns. `load_rows` gives a lane's 16 bytes of each eight rows.
template <int EIGHTS, bool LARGE, class LoadRows>
__device__ __forceinline__ void multiply_words(const uint4 (&line)[2 * HALVES_HERE], LoadRows load_rows, const LaneNumbers& numbers, int slot, const CountMasks& masks, float (&d)[HALVES_HERE][CHAINS][EIGHTS][4]) {
    u32 factor[2 * HALVES_HERE] = {}, rest[2 * HALVES_HERE] = {}, zero[2 * HALVES_HERE] = {};
#pragma unroll
    for (int i = 0; i < 2 * HALVES_HERE; ++i) {
        const u32 code = numbers.scale[i].held[slot];
        if (FOLD) factor[i] = factor_of(LARGE ? min(code, 127u) : code);
        if (LARGE) rest[i] = rest_of(code);
        if (ZEROS) {
            const float z = decode<ZEROS ? ZERO_CODE : CODE_U8>(numbers.zero[i].held[slot]);
            zero[i] = pack_pair(z, z);
        }
    }
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        uint4 x[EIGHTS];
        load_rows(j, x);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int side = 0; side < HALVES_HERE; ++side) {
                const int word = FOUR_BITS ? j : j * 2 + h;
                u32 w[4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = side * 2 + i;
                    const u32 codes = word == 0 ? line[column].x : word == 1 ? line[column].y : word == 2 ? line[column].z : line[column].w;
                    two_pairs(codes, h, masks, w[i], w[2 + i]);
#pragma unroll
                    for (int e = i; e < 4; e += 2) {
                        if (W_CODE == CODE_E2M1 && !AT_ONCE_LIFTED) w[e] = multiply_pairs(w[e], LIFT);
                        if (ZEROS) w[e] = subtract_pairs(w[e], zero[column]);
                        if (FOLD) w[e] = multiply_pairs(w[e], factor[column]);
                        if (LARGE) w[e] = multiply_pairs(w[e], rest[column]);
                    }
                }
#pragma unroll
                for (int t = 0; t < EIGHTS; ++t) {
                    const u32 rows[2] = {h ? x[t].z : x[t].x, h ? x[t].w : x[t].y};
#if BFLOAT
                    mma_bf16(d[side][h % CHAINS][t], w, rows);
#else
                    mma_f16(d[side][h % CHAINS][t], w, rows);
#endif
                }
            }
    }
}

template <int EIGHTS> __device__ __forceinline__ float sum_of(const float (&d)[CHAINS][EIGHTS][4], int t, int i) {
    return CHAINS == 1 ? d[0][t][i] : d[0][t][i] + d[CHAINS - 1][t][i];
}

__device__ __forceinline__ void sync_both() { asm volatile("bar.sync 7, 256;" ::: "memory"); }

// Both warpgroups have sums of all columns: each keeps those of its half, and adds what the other one has of them.
template <int EIGHTS>
__device__ __forceinline__ void join_halves(u32 staging, int half, const float (&sums)[HALVES_HERE][EIGHTS * 4], float (&total)[ACCUMULATORS]) {
    const int tid = threadIdx.x & 127;
    const u32 mine = staging + (LOW ? LOW_RESULTS : 0) + tid * 16, others = mine + (half ? -STAGING_BYTES : STAGING_BYTES);
#if SEND
    if (tid < 32) wait_until_read();                    // the last tile's results have left
#endif
    sync_both();
#pragma unroll
    for (int t = 0; t < EIGHTS; ++t) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = half ? sums[0][t * 4 + i] : sums[HALVES_HERE - 1][t * 4 + i];
        store_shared16(mine + t * 2048, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
    }
    sync_both();
#pragma unroll
    for (int t = 0; t < EIGHTS; ++t) {
        const uint4 v = load_shared16(others + t * 2048);
        const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) total[t * 4 + i] = (half ? sums[HALVES_HERE - 1][t * 4 + i] : sums[0][t * 4 + i]) + __uint_as_float(w[i]);
    }
    if (!(LOW && SEND)) sync_both();                    // results lie elsewhere (send_low)
}

#if LOW && SEND
// send_tile for 16 rows, the first of a box; what follows them in the staging is not stored. Warpgroups that have joined their sums
// have waited there until the last tile's results had left.
__device__ __forceinline__ void send_low(const Problem& p, const Maps& maps, const Tile& t, int half, u32 staging, const float (&total)[ACCUMULATORS]) {
    const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
    const float alpha = factor(p);
    u32 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = pack_pair(total[i * 2] * alpha, total[i * 2 + 1] * alpha);
    if (!BY_HALVES || t.k_len == 0) {
        if (tid < 32) wait_until_read();
        warpgroup_sync(half);
    }
    store_transposed(staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4), pair[0], pair[1], pair[2], pair[3]);
    show_to_copy_engine();
    warpgroup_sync(half);
    const Results to = results_of(p, t, first_column(t, 0, half));
    send_box(tid == 0, staging, &maps.out, to.col, int(FAR) - to.rows, to.end, int(FAR), to.group);
}
#endif

// All k-blocks of a tile of at most EIGHTS * 8 rows. `take_next` runs when its numbers have been used, if a kernel ASKS_EARLY.
template <int EIGHTS, class TakeNext>
__device__ __forceinline__ void multiply_few(Shared& s, u32 stages, u32 staging, Ring& ring, int blocks, u32 bytes, int half, float (&total)[ACCUMULATORS], LaneNumbers& numbers, TakeNext take_next) {
    const int lane = threadIdx.x & 31, row = lane >> 2, c = lane & 3, column = (BY_HALVES ? 0 : half * 64) + ((threadIdx.x & 127) >> 5) * 16 + row;
    const int box = BY_HALVES ? half : 0;
    u32 codes = box * (COLUMNS * W_LINE) + column * W_LINE + ((c ^ (column >> 1 & 3)) << 4);
    keep_in_register(codes);
    // A lane's k begin in the second line of a box for the upper two of four lanes, where four bits have two lines.
    const int line_of = box * (DEEP / W_BOXES) + (FOUR_BITS ? c >> 1 : 0), first = FOUR_BITS ? (c & 1) * 4 : c * 2;
    const u32 rows = W_BYTES + line_of * FEW_APART + row * LINE_BYTES;
    const int turn = (row + line_of * 2) & 7;           // FEW_APART is two rows more than whole swizzles
    u32 piece[CHUNKS];
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
        piece[j] = rows + (((first + j) ^ turn) << 4);
        keep_in_register(piece[j]);
    }
    CountMasks masks;
    masks.keep(ring.at >> 31);                          // a ring is shorter
    float d[HALVES_HERE][CHAINS][EIGHTS][4] = {}, sums[HALVES_HERE][EIGHTS * 4] = {};
#pragma unroll 1
    for (int begin = 0; begin < blocks; begin += FEW_AHEAD) {
#pragma unroll
        for (int slot = 0; slot < FEW_AHEAD; ++slot) {
            const int kb = begin + slot, held = SCALE_K ? slot : 0;
            if (kb >= blocks) break;
            barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
            const u32 stage = stages + ring.at;
            uint4 line[2 * HALVES_HERE], x[LOW ? 1 : CHUNKS][EIGHTS];
#pragma unroll
            for (int i = 0; i < 2 * HALVES_HERE; ++i) line[i] = load_shared16(codes + stage + ((i & 1) * 8 + (i >> 1) * 64) * W_LINE);
            const auto load_rows = [&](int j, uint4 (&to)[EIGHTS]) {
#pragma unroll
                for (int t = 0; t < EIGHTS; ++t) to[t] = load_shared16(piece[j] + stage + t * 8 * LINE_BYTES);
            };
            const auto hand_back = [&] {
                __syncwarp();                           // all lanes have what they need of the stage
                if (lane == 0) barrier_arrive(shared_address(&s.empty[ring.place]), 0);
                ring.next(bytes);
            };
            const auto rows_of = [&](int j, uint4 (&to)[EIGHTS]) {
                if (LOW) {                              // few registers, and as many warps again, which hide what this waits for
                    load_rows(j, to);
                } else {
#pragma unroll
                    for (int t = 0; t < EIGHTS; ++t) to[t] = x[LOW ? 0 : j][t];
                }
            };
            if (!LOW) {
#pragma unroll
                for (int j = 0; j < CHUNKS; ++j) load_rows(j, x[LOW ? 0 : j]);
                hand_back();
            }
            if (AT_ONCE_LIFTED && __any_sync(~0u, numbers.large(held))) multiply_words<EIGHTS, AT_ONCE_LIFTED>(line, rows_of, numbers, held, masks, d);
            else multiply_words<EIGHTS, false>(line, rows_of, numbers, held, masks, d);
            if (LOW) hand_back();
            if (PARTS) {                                // a box lies in one block of scales
#pragma unroll
                for (int side = 0; side < HALVES_HERE; ++side)
#pragma unroll
                    for (int t = 0; t < EIGHTS; ++t)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            sums[side][t * 4 + i] = fmaf(numbers.factor(held, side * 2 + (i >> 1)), sum_of(d[side], t, i), sums[side][t * 4 + i]);
#pragma unroll
                            for (int chain = 0; chain < CHAINS; ++chain) d[side][chain][t][i] = 0.0f;
                        }
            }
            numbers.ask(slot, kb + FEW_AHEAD);
        }
    }
    if (!PARTS) {
#pragma unroll
        for (int side = 0; side < HALVES_HERE; ++side)
#pragma unroll
            for (int t = 0; t < EIGHTS; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[side][t * 4 + i] = sum_of(d[side], t, i);
    }
#pragma unroll
    for (int side = 0; side < HALVES_HERE; ++side)
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; ++i) {
            if (COUNTED) sums[side][i] *= PER_UNIT;
            if (SCALE_K == 0) sums[side][i] *= numbers.factor(0, side * 2 + (i >> 1 & 1));
        }
    if (ASKS_EARLY) take_next();
    if (BY_HALVES) {
        join_halves<EIGHTS>(staging, half, sums, total);
    } else {
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; ++i) total[i] = sums[0][i];
    }
}
