// Tiles of at most 32 rows under quantised weights: bound by the memory, if codes become numbers in few enough instructions.
//
// A lane turns codes of k of its own: of each of its two columns two times 16 bytes of a stage, in two passes. wgmma takes its first
// operand from registers, and the sum over k may be in any order, as long as both sides have the same: a warp of its own puts the
// rows of a stage into the order in which lanes have their codes. Codes next to each other go to different pairs (of four bits
// the i-th and the one four behind it, whose bits lie 16 apart in a word). A lane's k of a pass lie in one block of scales, where
// scales multiply the weights; those of all lanes do, where they multiply sums. Scales and zero points come by stage_numbers.cuh.
#pragma once
#include "stage_numbers.cuh"
#include "weights.cuh"

constexpr int LANE_K = FOUR_BITS ? 32 : 16;             // of 16 bytes of codes, of which a column has eight in a stage
constexpr int PIECES = LANE_K / 8;                      // of 16 bytes of a row that belong to them
constexpr int PASSES = 2, PRODUCTS = LANE_K / 4;        // of a stage; wgmmas of a pass
constexpr bool IN_ORDER = PARTS && SCALE_K < BK;        // a pass has half of a stage's k, and so one block of scales
static_assert(LOW && W_BOXES == 1 && W_LINE == LINE_BYTES && BK == 8 * LANE_K, "a stage has eight times 16 bytes of codes of a column");
static_assert(SCALE_K == 0 || SCALE_K >= (PARTS ? BK / 2 : LANE_K), "a pass has one block of scales");

// Which of the eight times 16 bytes lane `c` of four has in a pass: neighbours are read in different passes, so that lanes of two
// columns, whose swizzles differ by one, meet different banks.
__device__ __forceinline__ constexpr int sixteen_of(int pass, int c) { return IN_ORDER ? pass * 4 + c : c * 2 + pass; }

// ---- Rows ----

// The rows' 8 numbers of 16 bytes in the order of their codes' pairs.
__device__ __forceinline__ uint4 arranged(uint4 v) {
    if (FOUR_BITS) return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
    if (W_CODE == CODE_E4M3 || W_CODE == CODE_E5M2) return v;
    return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632));
}

// COUNT times eight rows, of one pass or of as many as 32 lanes have pieces for: each lane takes piece `j` of the four lanes that
// multiply a column. Their pairs go where wgmma reads them, in the place of the same pieces: products 2j and 2j + 1 of the pass,
// each of two times eight k, of which a lane has two.
template <int COUNT> __device__ __forceinline__ void arrange_eights(u32 rows, u32 apart, int pass) {
    const int lane = threadIdx.x & 31, row = lane & 7, j = (lane >> 3) & (PIECES - 1);
    const auto place = [&](int piece) { return rows + row * LINE_BYTES + piece / 8 * apart + (((piece & 7) ^ row) << 4); };
    const auto beside = [&](u32 first, int piece) { return (first + piece / 8 * apart) ^ (piece & 7) << 4; };
    const u32 from = place(sixteen_of(pass, 0) * PIECES + j), to = place(sixteen_of(pass, j * 4 / PIECES) * PIECES);
    uint4 a[COUNT * 4];
#pragma unroll
    for (int i = 0; i < COUNT * 4; ++i) a[i] = load_shared16(beside(from, sixteen_of(0, i & 3) * PIECES) + (i >> 2) * 8 * LINE_BYTES);
#pragma unroll
    for (uint4& v : a) v = arranged(v);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT * 4; ++i) {
        const int part = i & 3, first = i & ~3;
        const auto word = [part](const uint4& v) { return part == 0 ? v.x : part == 1 ? v.y : part == 2 ? v.z : v.w; };
        const uint4 v = make_uint4(word(a[first]), word(a[first + 1]), word(a[first + 2]), word(a[first + 3]));
        store_shared16(beside(to, sixteen_of(0, part / PIECES) * PIECES + part % PIECES) + (i >> 2) * 8 * LINE_BYTES, v);
    }
}

// One warp: rows that have come are handed on in another order to those who multiply.
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
            const u32 rows = stages + ring.at + W_BYTES;
            int row = 0;
#pragma unroll 1
            for (; row + 8 < t.n; row += 16)
#pragma unroll 1
                for (int pass = 0; pass < PASSES; pass += 4 / PIECES)
                    arrange_eights<2>(rows + row * LINE_BYTES, t.n * LINE_BYTES, pass + (lane >> 3) / PIECES);
#pragma unroll 1
            for (; row < t.n; row += 8)
#pragma unroll 1
                for (int pass = 0; pass < PASSES; pass += 4 / PIECES)
                    arrange_eights<1>(rows + row * LINE_BYTES, t.n * LINE_BYTES, pass + (lane >> 3) / PIECES);
            show_to_copy_engine();                      // to wgmma now, and to the next stage that comes here
            __syncwarp();
            if (lane == 0) barrier_arrive_here(shared_address(&s.full[ring.place]));
        }
    }
}

// ---- Scales and zero points ----

constexpr int ZERO = ZEROS ? ZERO_CODE : CODE_U8, ZERO_ALIGN = SCALE_ALIGN / bytes_of(SCALE_CODE);
constexpr int SCALES_BYTES = NumberPieces<SCALE_CODE, SCALE_RUN, SCALE_ALIGN>::BYTES, NUMBERS_BYTES = SCALES_BYTES + (ZEROS ? NumberPieces<ZERO, SCALE_RUN, ZERO_ALIGN>::BYTES : 0);
constexpr int PASS_NUMBERS = SCALE_K ? sixteen_of(1, 0) * LANE_K / (SCALE_K ? SCALE_K : 1) : 0;        // from a lane's number of the first pass to that of the second

// Which set of numbers comes next: the two places take turns.
struct NumberSets {
    u32 number = 0;
    __device__ __forceinline__ int place() const { return number & 1; }
    __device__ __forceinline__ u32 parity() const { return number >> 1 & 1; }
};

// What load_rows does beside a stage's rows: every lane copies, and arrives when its copies are there.
struct LoadedNumbers {
    const WeightGrids& grids;
    u32 numbers;
    NumberSets sets;
    NumberCopies<SCALE_CODE, SCALE_RUN, SCALE_ALIGN> scales;
    NumberCopies<ZERO, SCALE_RUN, ZERO_ALIGN> zeros;

    __device__ __forceinline__ LoadedNumbers(const WeightGrids& g, u32 at) : grids(g), numbers(at) {}
    __device__ __forceinline__ void begin(const Tile& t) {
        const i64 column = first_column(t, 0, 0);
        scales.begin(grid_of_group(grids.scale, t.group, 0, 0), column, grids.columns, t.k_len);
        if (ZEROS) zeros.begin(grid_of_group(grids.zero, t.group, 0, 0), column, grids.columns, t.k_len);
    }
    __device__ __forceinline__ void load(Shared& s, int kb) {
        if (SCALE_K ? kb % SET_STAGES != 0 : kb > 0) return;
        const u32 to = numbers + sets.place() * NUMBERS_BYTES;
        barrier_wait(shared_address(&s.numbers_empty[sets.place()]), sets.parity() ^ 1);
        scales.copy(to);
        if (ZEROS) zeros.copy(to + SCALES_BYTES);
        arrive_when_copied(shared_address(&s.numbers_full[sets.place()]));
        ++sets.number;
    }
};

// Of a lane's two columns.
struct ColumnNumbers {
    LaneNumbers<SCALE_CODE, SCALE_RUN, SCALE_ALIGN, PASS_NUMBERS> scale;
    LaneNumbers<ZERO, SCALE_RUN, ZERO_ALIGN, PASS_NUMBERS> zero;

    __device__ __forceinline__ void begin(const WeightGrids& grids, const Tile& t, int column) {
        const int block = SCALE_K ? sixteen_of(0, threadIdx.x & 3) * LANE_K / (SCALE_K ? SCALE_K : 1) : 0;
        const i64 first = first_column(t, 0, 0);
        scale.begin(grid_of_group(grids.scale, t.group, 0, 0), first, column, grids.columns, block);
        if (ZEROS) zero.begin(grid_of_group(grids.zero, t.group, 0, 0), first, column, grids.columns, block);
    }
};

// ---- Codes ----

// Whole numbers in the low 8 bits of a bfloat16 are its smallest ones, counted in 2^-133. One fused multiply-add takes their
// offset away and makes them multiples of 1 / PER_UNIT, as large as a factor of bfloat16 can make them; sums are multiplied by
// PER_UNIT when a tile ends. Powers of two: each step is exact. A zero point joins the offset where both together have 8 bits.
constexpr bool COUNTED = BFLOAT && (W_CODE == CODE_I8 || W_CODE == CODE_INT4 || W_CODE == CODE_UINT4);
constexpr bool ZERO_IN_OFFSET = COUNTED && ZEROS && (W_CODE == CODE_UINT4 || (W_CODE == CODE_INT4 && ZERO == CODE_I8));
constexpr float PER_UNIT = COUNTED ? 64.0f : 1.0f;
constexpr u32 FROM_LOW = 0x7F007F00u, FROM_FOURTH = 0x7D007D00u;       // 2^127, or 2^123 where they begin with bit 4
constexpr u32 OFFSET = W_CODE == CODE_I8 ? 0xC000C000u : W_CODE == CODE_INT4 ? 0xBE00BE00u : 0x80008000u;      // -128, -8 or 0 units
constexpr float NIBBLE_OFFSET = W_CODE == CODE_INT4 ? -8.0f : 0.0f;

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
__device__ __forceinline__ u32 counted_low(u32 word, u32 offset, const CountMasks& masks) {
    constexpr u32 sign = W_CODE == CODE_I8 ? 0x00800080u : W_CODE == CODE_INT4 ? 0x00080008u : 0;
    return fma_pairs((word & masks.low) ^ sign, masks.from_low, offset);
}
__device__ __forceinline__ u32 counted_fourth(u32 word, u32 offset, const CountMasks& masks) {
    return fma_pairs((word & masks.fourth) ^ (W_CODE == CODE_INT4 ? 0x00800080u : 0), masks.from_fourth, offset);
}

// Two pairs of a word: of four bits those of its lower bytes' halves, or with `upper` those of the upper ones. `offset`: of numbers
// that are counted.
__device__ __forceinline__ void two_pairs(u32 word, bool upper, u32 offset, const CountMasks& masks, u32& first, u32& second) {
    if (W_CODE == CODE_E4M3 || W_CODE == CODE_E5M2) {
        first = pair_of_bytes(word), second = pair_of_bytes(word >> 16);
        return;
    }
    if (W_CODE == CODE_I8) {
        first = COUNTED ? counted_low(word, offset, masks) : pair_of_even_bytes(word, masks.others);
        second = COUNTED ? counted_low(word >> 8, offset, masks) : pair_of_even_bytes(word >> 8, masks.others);
        return;
    }
    if (W_CODE == CODE_E2M1 && BFLOAT) {        // two codes' signs, and their magnitudes six bits lower, where a bfloat16 has them
        const u32 codes = chosen_bits(upper ? 0x88008800u : 0x00880088u, word, __funnelshift_r(word, word, 6));
        first = (upper ? codes << 4 : __funnelshift_r(codes, codes, 20)) & 0x81C081C0u, second = (upper ? codes : __funnelshift_r(codes, codes, 24)) & 0x81C081C0u;
        return;
    }
    if (upper) word >>= 8;
    if (W_CODE == CODE_E2M1) {
        first = (word << 12 & 0x80008000u) | (word << 9 & 0x0E000E00u), second = (word << 8 & 0x80008000u) | (word << 5 & 0x0E000E00u);
    } else if (COUNTED) {
        first = counted_low(word, offset, masks), second = counted_fourth(word, offset, masks);
    } else {
        first = pair_of_counts(word, masks.others), second = pair_of_counts(word >> 4, masks.others);
    }
}

// What a lane's numbers do to its weights in a pass.
struct WeightFactors {
    u32 code[2], factor[2], rest[2], zero[2];

    __device__ __forceinline__ void load(const ColumnNumbers& numbers, u32 at, int stage, int pass) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (FOLD) code[i] = numbers.scale.code(at, stage, i, pass), factor[i] = factor_of(code[i]);
            if (ZEROS) {
                const u32 code = numbers.zero.code(at + SCALES_BYTES, stage, i, pass);
                if (ZERO_IN_OFFSET) {               // counted as codes are
                    constexpr float most = ((ZERO == CODE_I8 ? 128.0f : 0.0f) + NIBBLE_OFFSET) / PER_UNIT;
                    zero[i] = fma_pairs((ZERO == CODE_I8 ? code ^ 0x80 : code) * 0x00010001u, FROM_LOW | 0x80008000u, pack_pair(most, most));
                } else {
                    const float units = decode<ZERO>(code) / PER_UNIT;
                    zero[i] = pack_pair(units, units);
                }
            }
        }
    }
    // Scales of e2m1 beyond what `factor_of` reaches. Few tiles have them: no others shall work out anything for it.
    __device__ __forceinline__ bool beyond() const { return AT_ONCE_LIFTED && ((code[0] | code[1]) & 0x80) != 0; }
    __device__ __forceinline__ void lower() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            factor[i] = factor_of(min(code[i], 127u)), rest[i] = rest_of(code[i]);
            keep_in_register(factor[i]), keep_in_register(rest[i]);
        }
    }
};

// ---- A tile ----

// All k-blocks of a tile of N rows.
template <int N>
__device__ __forceinline__ void multiply_few(Shared& s, u32 stages, u32 numbers_at, Ring& ring, NumberSets& sets, int blocks, u32 bytes, int half, float (&total)[ACCUMULATORS], ColumnNumbers& numbers) {
    // Products whose weights are turned while those before them are multiplied.
    constexpr int AT_A_TIME = PARTS && N > 16 ? 2 : 4, TURNS = PRODUCTS / AT_A_TIME;
    const int lane = threadIdx.x & 31, c = lane & 3, column = half * 64 + ((threadIdx.x & 127) >> 5) * 16 + (lane >> 2);
    u32 codes = column * W_LINE + ((sixteen_of(0, c) ^ (column & 7)) << 4);
    keep_in_register(codes);
    CountMasks masks;
    masks.keep(ring.at >> 31);                          // a ring is shorter
    float part[PARTS ? N / 2 : 1], scale[2] = {1.0f, 1.0f};
#pragma unroll 1
    for (int left = blocks; left > 0; left -= SET_STAGES) {
        const u32 at = numbers_at + sets.place() * NUMBERS_BYTES;
        barrier_wait(shared_address(&s.numbers_full[sets.place()]), sets.parity());
        const int count = SCALE_K ? min(left, SET_STAGES) : left;
#pragma unroll 1
        for (int of_set = 0; of_set < count; ++of_set) {
            const u32 stage = stages + ring.at;
            barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
            const u64 x = smem_descriptor(stage + W_BYTES, BLOCK, 1024);
            uint4 line[PASSES][2];
#pragma unroll
            for (int i = 0; i < PASSES * 2; ++i) line[i >> 1][i & 1] = load_shared16(((codes + stage) ^ sixteen_of(i >> 1, 0) << 4) + (i & 1) * 8 * W_LINE);
            WeightFactors factors[PASSES];
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) factors[pass].load(numbers, at, SCALE_K ? of_set : 0, pass);
            const bool beyond = AT_ONCE_LIFTED && __any_sync(~0u, factors[0].beyond() || factors[1].beyond());
            if (beyond) factors[0].lower(), factors[1].lower();
            u32 w[2][AT_A_TIME][4];
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
                for (int turn = 0; turn < TURNS; ++turn) {
                    const int before = PARTS ? turn : pass * TURNS + turn, which = before & 1;
                    if (before >= 2) wgmma_wait<1>();       // of the products before the last ones, whose registers these are
#pragma unroll
                    for (int p = 0; p < AT_A_TIME; ++p) {
                        const int product = turn * AT_A_TIME + p, word = FOUR_BITS ? product >> 1 : product;
                        u32 (&to)[4] = w[which][p];
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const uint4& v = line[pass][i];
                            two_pairs(word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w, FOUR_BITS && (product & 1), ZERO_IN_OFFSET ? factors[pass].zero[i] : OFFSET, masks, to[i], to[2 + i]);
#pragma unroll
                            for (int e = i; e < 4; e += 2) {
                                if (W_CODE == CODE_E2M1 && !AT_ONCE_LIFTED) to[e] = multiply_pairs(to[e], LIFT);
                                if (ZEROS && !ZERO_IN_OFFSET) to[e] = subtract_pairs(to[e], factors[pass].zero[i]);
                                if (FOLD) to[e] = multiply_pairs(to[e], factors[pass].factor[i]);
                            }
                        }
                    }
                    if (beyond) {
#pragma unroll
                        for (int e = 0; e < AT_A_TIME * 4; ++e) w[which][e >> 2][e & 3] = multiply_pairs(w[which][e >> 2][e & 3], factors[pass].rest[e & 1]);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int p = 0; p < AT_A_TIME; ++p) {
                        const int product = turn * AT_A_TIME + p, piece = sixteen_of(pass, product * 2 / PIECES) * PIECES + product * 2 % PIECES;
                        const u64 rows = x + (piece / 8 * (N * LINE_BYTES) >> 4) + (piece & 7);
                        if constexpr (PARTS) MmaWeights<N>::run(part, w[which][p], rows, product > 0);
                        else MmaWeights<N>::run(total, w[which][p], rows, 1);
                    }
                    wgmma_commit();
                }
                if constexpr (PARTS) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) scale[i] = decode<SCALE_CODE>(numbers.scale.code(at, of_set, i, pass));
                    wgmma_wait<0>();
                    settle(part, N / 2);
                    for_columns<N>(scale[0], scale[1], [&](int i, float by) { total[i] = fmaf(by, part[i], total[i]); });
                }
            }
            if (!PARTS) wgmma_wait<0>();
            settle(total, N / 2);
            __syncwarp();                                   // all lanes have what they need of the stage
            if (lane == 0) barrier_arrive_here(shared_address(&s.empty[ring.place]));
            ring.next(bytes);
        }
        if (SCALE_K == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) scale[i] = decode<SCALE_CODE>(numbers.scale.code(at, 0, i, 0));
            __syncwarp();
        }
        if (lane == 0) barrier_arrive_here(shared_address(&s.numbers_empty[sets.place()]));
        ++sets.number;
        if (SCALE_K == 0) break;
    }
    for_columns<N>(scale[0], scale[1], [&](int i, float by) {
        if (COUNTED) total[i] *= PER_UNIT;
        if (SCALE_K == 0) total[i] *= by;
    });
}

#if SEND
// send_tile for 32 rows, the first of a box; what follows them in shared memory is not stored.
__device__ __forceinline__ void send_few(const Problem& p, const Maps& maps, const Results& to, int half, u32 staging, const float (&total)[ACCUMULATORS]) {
    const int tid = threadIdx.x & 127, lane = tid & 31, warp = tid >> 5;
    const float alpha = factor(p);
    const u32 turn = staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
    if (tid < 32) wait_until_read();                    // the last tile's results
    warpgroup_sync(half);
#pragma unroll
    for (int r = 0; r < LOW_ROWS; r += 16) {
        if (r >= to.rows) continue;
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[i] = pack_pair(total[r / 2 + i * 2] * alpha, total[r / 2 + i * 2 + 1] * alpha);
        store_transposed(turn + r * 128, pair[0], pair[1], pair[2], pair[3]);
    }
    show_to_copy_engine();
    warpgroup_sync(half);
    send_box(tid == 0, staging, &maps.out, to.col, int(FAR) - to.rows, to.end, int(FAR), to.group);
}
#endif

__device__ __forceinline__ void consume_few(const Problem& p, const Launch& l, const WeightGrids& grids, const Maps& maps, Shared& s, u32 stages, u32 numbers_at, u32 staging, int half) {
    const int column = half * 64 + ((threadIdx.x & 127) >> 5) * 16 + ((threadIdx.x & 31) >> 2);
    Ring ring;
    NumberSets sets;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        const u32 bytes = ring.begin(t, blocks);
#if SEND
        const Results to = results_of(p, t, first_column(t, 0, half));     // fewer registers than the tile
#endif
        float total[ACCUMULATORS] = {};
        if (blocks > 0) {
            ColumnNumbers numbers;
            numbers.begin(grids, t, column);
            if (t.n <= 8) multiply_few<8>(s, stages, numbers_at, ring, sets, blocks, bytes, half, total, numbers);
            else if (t.n <= 16) multiply_few<16>(s, stages, numbers_at, ring, sets, blocks, bytes, half, total, numbers);
            else if (t.n <= 24) multiply_few<24>(s, stages, numbers_at, ring, sets, blocks, bytes, half, total, numbers);
            else multiply_few<32>(s, stages, numbers_at, ring, sets, blocks, bytes, half, total, numbers);
        }
#if SEND
        send_few(p, maps, to, half, staging, total);
#else
        finish_tile(p, l, t, 0, half, staging, total);
#endif
    }
#if SEND
    wait_until_written();
#endif
}

// ---- Which tile comes next ----

// announce_tiles for a block alone, by a warp that waits in a barrier of threads: there it takes no instructions from those who
// multiply. (At a barrier in shared memory it looked 3.8 million times in a call, a seventh of all instructions.)
__device__ __forceinline__ void announce_few(const Problem& p, const Launch& l, Shared& s) {
    const int lane = threadIdx.x & 31, blocks = gridDim.x;
    const int total = s.schedule.total;
    const bool one_each = total <= blocks;              // then nobody needs the counter
    int next = blockIdx.x;
#pragma unroll 1
    for (int number = 0;; ++number) {
        if (lane == 0) {
            Tile t = {};
            t.n = STOP;
            if (next < total) t = decode(p, s.schedule, next, l.swapped, CLUSTER_ROWS, CLUSTER_COLUMNS);
            announce(s, number, t);
        }
        if (next >= total) break;
        wait_for_ask();                                 // not too early: who is late shall take fewer
        if (lane == 0) next = one_each ? total : blocks + atomicAdd(l.counter, 1);
        next = __shfl_sync(~0u, next, 0);
    }
    // The last block to stop leaves the counter as it found it, for the next launch.
    if (lane == 0 && !one_each) {
        __threadfence();
        if (atomicAdd(l.counter + 1, 1) == blocks - 1) l.counter[0] = 0, l.counter[1] = 0;
    }
}
