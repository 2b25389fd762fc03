// What the two consumer warpgroups of hopper.cu do with a tile of float64, which the tensor cores take from registers alone (mma.sync).
//
// A warpgroup has 64 of a block's columns, a warp 32 of these and every second unit of eight rows. A product of 16 columns, eight
// rows and eight k: lane 4 g + t has columns 2 g and 2 g + 1, one of the rows, and two of the k. Reads of 16 bytes give neighbours
// along the contiguous direction; only those that lie in neighbouring registers in a product, too, are read so: two columns, and
// two k of a row. Else 8 bytes are read. Which rows and k are a lane's is free, but for both operands alike: they are chosen such
// that the lanes that read at once meet all banks.
#pragma once
#include "results.cuh"
#include "tensor_cores.cuh"

static_assert(PLAIN == 1 && !PINGPONG && ROWS <= 128, "plain results, along the columns, of tiles that registers hold");
static_assert(X_K || !W_K, "rows across k want their neighbours where weights along k have none");
constexpr int UNITS = ROWS / 8 / 2;                    // of a warp
constexpr bool BY_8_BYTES = X_K && W_K;                // both operands are read 8 bytes at a time
constexpr u32 NEXT = 16 * LINE_BYTES;                  // the next 16 columns, or the next unit of a warp

struct alignas(16) Pair64 { double first, second; };

__device__ __forceinline__ Pair64 load_pair(u32 address) {
    Pair64 v;
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(v.first), "=d"(v.second) : "r"(address));
    return v;
}
__device__ __forceinline__ double load_double(u32 address) {
    double v;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(v) : "r"(address));
    return v;
}

// 16 bytes of a swizzled line of 128.
__device__ __forceinline__ u32 piece_of(u32 box, int line, int piece) { return box + line * LINE_BYTES + ((piece ^ (line & 7)) << 4); }

// A unit's row of lane group g.
__device__ __forceinline__ int row_of(int g) { return BY_8_BYTES ? (g & 3) * 2 + (g >> 2) : X_K ? (g >> 1) + (g & 1) * 4 : g; }

// Where a thread's operands lie in a stage.
struct Places {
    u32 w[2], x[2];         // along k: of both columns, and of a row; across k: of both k

    __device__ __forceinline__ Places(int side, int column) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const u32 half = BY_8_BYTES ? (t & 1) * 8 : 0;  // of a piece of 16 bytes
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            w[e] = W_K ? piece_of(half, column + g * 2 + e, t >> 1) : piece_of(column / ACROSS * ACROSS_BYTES, t * 2 + e, g);
            x[e] = X_K ? piece_of(W_BYTES + half, side * 8 + row_of(g), BY_8_BYTES ? t >> 1 : t)
                       : piece_of(W_BYTES + (g & 1) * 8, t * 2 + e, side * 4 + (g >> 1));
        }
    }
    // The i-th 16 columns, at the `step`-th eight k, in the order in which a product takes them.
    __device__ __forceinline__ void load_columns(double (&a)[4], u32 stage, int step, int i) const {
#pragma unroll
        for (int e = 0; e < 2; ++e) {                   // k
            if (W_K) {
#pragma unroll
                for (int c = 0; c < 2; ++c) a[e * 2 + c] = load_double(stage + (w[c] ^ (step * 64 + e * 32)) + i * NEXT);
            } else {
                const Pair64 v = load_pair(stage + w[e] + step * (8 * LINE_BYTES) + i * NEXT);
                a[e * 2] = v.first, a[e * 2 + 1] = v.second;
            }
        }
    }
    // The u-th unit of rows.
    __device__ __forceinline__ void load_rows(double (&b)[2], u32 stage, int step, int u) const {
        if (X_K && !W_K) {
            const Pair64 v = load_pair(stage + (x[0] ^ step * 64) + u * NEXT);
            b[0] = v.first, b[1] = v.second;
        } else {
#pragma unroll
            for (int e = 0; e < 2; ++e) b[e] = load_double(stage + (X_K ? x[0] ^ (step * 64 + e * 32) : x[e] + step * (8 * LINE_BYTES)) + u * NEXT);
        }
    }
};

// COUNT units of rows by 32 columns.
template <int COUNT>
__device__ __forceinline__ void multiply_f64(Shared& s, u32 stages, Ring& ring, int blocks, u32 bytes, const Places& own, double (&d)[2][UNITS][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int kb = 0; kb < blocks; ++kb) {
        const u32 stage = stages + ring.at, empty = shared_address(&s.empty[ring.place]);
        barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
#pragma unroll
        for (int step = 0; step < BK / 8; ++step) {
            double a[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) own.load_columns(a[i], stage, step, i);
#pragma unroll
            for (int u = 0; u < COUNT; ++u) {
                double b[2];
                own.load_rows(b, stage, step, u);
#pragma unroll
                for (int i = 0; i < 2; ++i) mma_f64<8>(d[i][u], a[i], b);
            }
        }
        __syncwarp();
        if (lane < CLUSTER) barrier_arrive(empty, lane);
        ring.next(bytes);
    }
}

// alpha * acc, in pieces of 16 bytes where the result is aligned.
__device__ __forceinline__ void store_f64(const Problem& p, const Launch& l, const Tile& t, i64 column, int side, const double (&d)[2][UNITS][4]) {
    int lane = threadIdx.x & 31;
    keep_in_register(lane);                             // what follows from it is worked out here: registers are short before
    const int g = lane >> 2, skip = rows_to_skip(p, t);
    const Target to = target_of(p, l, t, column);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = (u * 2 + side) * 8 + row_of((lane & 3) * 2 + e);
            if (row < skip || row >= t.rows) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int c = i * 16 + g * 2;
                const double low = d[i][u][e] * p.alpha, high = d[i][u][e + 2] * p.alpha;
                double* const at = (double*)(to.out + row * to.row_step) + c;
                if (l.vector_out && c + 1 < to.cols) {
                    *(Pair64*)at = {low, high};
                } else {
                    if (c < to.cols) at[0] = low;
                    if (c + 1 < to.cols) at[1] = high;
                }
            }
        }
    }
}

// Registers are short while a tile is multiplied: what is stored then waits in shared memory.
__device__ __forceinline__ void keep_tile(const Tile& t, u32 to) {
    store_shared16(to, make_uint4(t.group, t.n, t.rows, t.row0)), store_shared16(to + 16, make_uint4(t.col0, t.k_len, t.x_row, t.extra));
}
__device__ __forceinline__ Tile kept_tile(u32 from) {
    const uint4 a = load_shared16(from), b = load_shared16(from + 16);
    return {int(a.x), int(a.y), int(a.z), int(a.w), int(b.x), int(b.y), int(b.z), int(b.w)};
}

#define OF_UNITS(count) \
    case count: \
        if constexpr (count <= UNITS) multiply_f64<count>(s, stages, ring, blocks, bytes, own, d); \
        break;

__device__ __forceinline__ void consume(const Problem& p, const Launch& l, const Maps&, Shared& s, u32 stages, u32 staging, u32 rank, int half) {
    const int warp = (threadIdx.x & 127) >> 5, side = warp >> 1;
    const Places own(side, half * 64 + (warp & 1) * 32);
    staging += warp * sizeof(Tile);
    Ring ring;
#pragma unroll 1
    for (int number = 0;; ++number) {
        Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        keep_tile(t, staging);
        const int blocks = k_blocks(t);
        const u32 bytes = ring.begin(t, blocks);
        double d[2][UNITS][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int e = 0; e < 4; ++e) d[i][u][e] = 0.0;
        switch ((t.n / 8 + 1 - side) / 2) { OF_UNITS(0) OF_UNITS(1) OF_UNITS(2) OF_UNITS(3) OF_UNITS(4) OF_UNITS(5) OF_UNITS(6) OF_UNITS(7) OF_UNITS(8) }
        t = kept_tile(staging);
        store_f64(p, l, t, first_column(t, rank, half) + (warp & 1) * 32, side, d);
    }
}
