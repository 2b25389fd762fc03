// A gate joins two columns of the products, g and u, into one of the result. A tile's 128 columns are one warpgroup's, in two
// halves of its registers (PINGPONG), and 64 columns of the result come of them.
//
// GATE says where g and u of a result lie. IN_TWO_BOXES: at the same place of either half, as the copy engine loaded 64 columns
// of g, and 64 of u behind them. SIDE_BY_SIDE: in neighbouring columns, and so in lanes four apart, which exchange one of two rows.
// ACT is the activation of g, PREACT whether g and u are written as well.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The numbers of a gate. `slope`: of silu's exponent, to the base of 2.
struct GateNumbers {
    float limit, beta, slope;

    __device__ __forceinline__ float join(float g, float u) const {
        g = g > limit ? limit : g;                          // comparisons keep NaN
        u = u > limit ? limit : u < -limit ? -limit : u;
        u += beta;
        if (ACT == SILU) return g * reciprocal(1.0f + power_of_2(g * slope)) * u;
        if (ACT == SIGMOID) return reciprocal(1.0f + power_of_2(g * slope)) * u;
        return activate(g, ACT) * u;
    }
};
__device__ __forceinline__ GateNumbers gate_numbers(const Fused& f) {
    return {f.limited ? float(f.limit) : __uint_as_float(0x7F800000u), float(f.beta), float(-f.alpha * 1.4426950408889634)};
}

// Rows of 16 bits, 64 of them in the staging.
struct Lines {
    char* first;
    i64 pitch;
    int cols;

    // Rows `skip` to `rows` of those that begin at row r0 of the tile.
    __device__ __forceinline__ void take(u32 staging, int r0, int skip, int rows) const {
        const int tid = threadIdx.x & 127;
        char* const out = first + r0 * pitch;
        if (((u64(first) | u64(pitch)) & 15) == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 16 + (tid >> 3), chunk = tid & 7;
                if (row >= skip && row < rows && chunk * 8 < cols) {
                    const uint4 v = load_shared16(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
                    char* const at = out + row * pitch + chunk * 16;
                    if (chunk * 8 + 8 <= cols) *(uint4*)at = v;
                    else store_first(at, v, cols - chunk * 8);
                }
            }
        } else {
#pragma unroll
            for (int row = 0; row < 64; row += 4 * AT_ONCE) store_rows(out, pitch, staging, row + (tid >> 5), skip, rows, cols);
        }
    }
};

__device__ __forceinline__ void finish_gated(const Given& p, const Tile& t, u32 rank, int half, u32 staging, float (&d)[ACCUMULATORS]) {
    const Fused& f = p.fused;
    const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
    const i64 col = first_column(t, rank, 0), features = p.n / 2, feature = col / 2;
    const i64 row0 = p.jagged == JAG_M ? t.x_row : t.row0;
    const float alpha = float(p.alpha);
    const GateNumbers gate = gate_numbers(f);
    Lines out = {p.out.ptr + (t.group * p.out.group + row0 * p.out.row + feature) * 2, p.out.row * 2, int(min64(features - feature, 64))};

    // Column b * 64 + c of the tile, counted in the weights.
    const auto column_of = [&](int b, int c) {
        if (GATE == SIDE_BY_SIDE) return col + b * 64 + c;
        if (f.layout == PAIRS) return (feature + c) * 2 + b;
        return feature + c + (b != f.up_first ? features : 0);
    };
    float bias[2][2] = {};
    if (p.bias.ptr) {
        const int size = size_of(p.bias_type);
#pragma unroll
        for (int b = 0; b < 2; ++b)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int c = warp * 16 + (lane >> 2) + h * 8;
                const bool exists = GATE == SIDE_BY_SIDE ? col + b * 64 + c < p.n : feature + c < features;
                if (exists) bias[b][h] = load_as<float>(p.bias.ptr + (t.group * p.bias.group + column_of(b, c) * p.bias.col) * size, p.bias_type);
            }
    }
    const char* const scale = f.row_scale ? f.row_scale + (t.group * f.scale_group + row0) * size_of(f.scale_type) : nullptr;
    const auto scale_of = [&](int row) { return scale && row < t.rows ? load_as<float>(scale + row * size_of(f.scale_type), f.scale_type) : 1.0f; };
    const u32 turn = staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + (((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);

#pragma unroll
    for (int q = 0; q < ROWS / 64; ++q) {                   // 64 rows, 32 registers of either half
        const int r0 = q * 64, skip = max(rows_to_skip(p, t) - r0, 0), rows = min(t.rows - r0, 64);
        if (r0 >= t.rows) continue;
        float *const low = d + q * 32, *const high = low + ROWS / 2;
#pragma unroll
        for (int i = 0; i < 32; ++i) low[i] = low[i] * alpha + bias[0][(i >> 1) & 1], high[i] = high[i] * alpha + bias[1][(i >> 1) & 1];
#if PREACT
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const float* const v = b ? high : low;
            const bool pairs = GATE == IN_TWO_BOXES && f.layout == PAIRS;
            const i64 first = pairs ? col + b * 64 : column_of(b, 0);
            const Lines to = {f.preact + (t.group * f.preact_group + row0 * f.preact_row + first) * 2, f.preact_row * 2,
                              GATE == IN_TWO_BOXES && !pairs ? out.cols : int(min64(p.n - first, 64))};
            warpgroup_sync(half);                           // the staging of the round before has been read
            if (!pairs) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float* const w = v + j * 8;
                    store_transposed(turn + j * 16 * 128, pack_pair(w[0], w[1]), pack_pair(w[2], w[3]), pack_pair(w[4], w[5]), pack_pair(w[6], w[7]));
                }
            } else if (warp >> 1 == b) {                    // 32 pairs of columns, which two of the warps hold
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    const int row = (i >> 2) * 8 + (lane & 3) * 2 + (i & 1), c = (warp & 1) * 16 + (lane >> 2) + ((i >> 1) & 1) * 8;
                    store_shared(staging + row * 128 + (((c >> 2) ^ (row & 7)) << 4) + (c & 3) * 4, pack_pair(low[i], high[i]));
                }
            }
            warpgroup_sync(half);
            if (to.cols > 0) to.take(staging, r0, skip, rows);
        }
#endif
        warpgroup_sync(half);
#if GATE == IN_TWO_BOXES
#pragma unroll
        for (int j = 0; j < 4; ++j) {                       // 16 rows each
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = j * 8 + i * 2, row = r0 + j * 16 + (i >> 1) * 8 + (lane & 3) * 2;
                pair[i] = pack_pair(gate.join(low[at], high[at]) * scale_of(row), gate.join(low[at + 1], high[at + 1]) * scale_of(row + 1));
            }
            store_transposed(turn + j * 16 * 128, pair[0], pair[1], pair[2], pair[3]);
        }
#else
        const bool odd = lane & 4;                          // this lane holds u of two rows, the other one g
#pragma unroll
        for (int i = 0; i < 32; ++i) {                      // pairs of rows in either half
            const int b = i >> 4, j = (i >> 1) & 7, h = i & 1;
            const float* const v = (b ? high : low) + j * 4 + h * 2;
            const float got = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4);
            const int row = j * 8 + (lane & 3) * 2 + odd, c = b * 32 + warp * 8 + h * 4 + (lane >> 3);
            const float joined = gate.join(odd ? got : v[0], odd ? v[1] : got) * scale_of(r0 + row);
            store_shared(staging + row * 128 + (((c >> 3) ^ (row & 7)) << 4) + (c & 7) * 2, u16(pack_pair(joined, 0.0f)));
        }
#endif
        warpgroup_sync(half);
        if (out.cols > 0) out.take(staging, r0, skip, rows);
    }
}
