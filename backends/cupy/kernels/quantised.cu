// Products of quantised operands, right for every problem: float8 on both sides, or quantised weights under 16 bits, any form,
// strides, alignment and scales, on sm_80 and later. The fast kernel for float8 is hopper_fp8.cu.
//
// A_CODE and B_CODE say what the operands hold (codes.cuh), A_K and B_K whether k is their contiguous direction. Each number
// less its zero point fits tf32 exactly, so the products are exact. Sums of SUB of k or more are promoted: multiplied by the
// scales of their block and added to sums in float32. A scale reaches nothing but a sum, and so no result of another group.
#include "epilogue.cuh"
#include "scales.cuh"
#include "tensor_cores.cuh"
#include "tile_load.cuh"

constexpr int BM = 64, BN = 64, BK = 64, SUB = 32, SUBS = BK / SUB, THREADS = 128, RESIDENT = 2;
constexpr bool PACKED = B_CODE >= CODE_INT4;
constexpr int B_DEPTH = PACKED ? BK / 2 : BK;           // bytes of b in a line of a k-block
template <int BYTES> struct Raw { typedef u8 Type; };
template <> struct Raw<2> { typedef u16 Type; };
typedef Raw<bytes_of(A_CODE)>::Type A;
constexpr int PITCH = BK + 4;                           // numbers; eight lines of 16 bytes lie in different banks
constexpr int MI = BM / 2 / 16, NJ = BN / 2 / 8;        // of a warp, which has half of the rows and half of the columns

// A line's numbers that belong to one SUB of a k-block.
struct LineNumbers { float a[SUBS][BM], b[SUBS][BN], zero[SUBS][BN]; };

// The tile in hand, and how far the walk over the groups has come.
struct Place {
    TileWalk<BM, BN> walk[32];
    Group group;
    GroupGrid a, b, zero;
    i64 tile;                        // the next one's number
    int number, row, column;         // of the group, -1 behind the last tile; the tile's first row and column
    int promote;                     // log2 of the k after which sums are promoted
};

__shared__ __align__(16) float tiles[(BM + BN) * PITCH];
__shared__ LineNumbers numbers[2];

// One warp finds the block's next tile.
__device__ __noinline__ void find_tile(const Problem& p, const Grids& grids, Place& s) {
    const int lane = threadIdx.x & 31;
    TileWalk<BM, BN> walk = s.walk[lane];
    int number = -1;
    i64 local;
    const i64 tile = s.tile;
    __syncwarp();                    // all lanes have read it: the first one writes the next one there
    const bool found = walk.find(p, tile, number, local);
    s.walk[lane] = walk;
    if (lane != 0) return;
    s.tile = tile + gridDim.x;
    if (found && number != s.number) {
        Group g = resolve(p, number, 1);
        const char* const b = g.b;
        g = resolve(p, number, sizeof(A)), g.b = (char*)b;
        s.group = g;
        const Starts at = starts_of(p, number);
        const Grid* const own = grids.listed ? grids.listed + i64(number) * 3 : &grids.a;
        const i64 group = grids.listed ? 0 : number;
        s.a = grid_of_group(own[0], group, at.a, at.k), s.b = grid_of_group(own[1], group, at.b, at.k), s.zero = grid_of_group(own[2], group, at.b, at.k);
        s.promote = min(30, min(s.a.ptr ? s.a.k_shift : WHOLE_K, s.b.ptr ? s.b.k_shift : WHOLE_K));
    }
    s.number = found ? number : -1;
    if (!found) return;
    const u32 down = (u32(s.group.m) + BM - 1) / BM, across = (u32(s.group.n) + BN - 1) / BN;
    const u32 band = u32(local) / (8 * across), rest = u32(local) - band * 8 * across, height = min(8u, down - band * 8);
    s.row = int(band * 8 + rest % height) * BM, s.column = int(rest / height) * BN;
}

// What a thread has on its way to shared memory: its parts of both operands, and the numbers of a line of one of them.
struct Loader {
    TileLoad<A, BM, BK, A_K, THREADS> la;
    TileLoad<u8, BN, B_DEPTH, B_K, THREADS> lb;
    const char *a, *b;               // the next k-block's first elements
    int left;                        // k that remains
    float scale[SUBS], zero[SUBS];

    static __device__ __forceinline__ bool of_b() { return threadIdx.x >= BM; }
    static __device__ __forceinline__ int line() { return threadIdx.x % BM; }

    __device__ __forceinline__ void begin(const Place& s) {
        const Group& g = s.group;
        a = g.a + s.row * g.a_row * i64(sizeof(A)), b = g.b + s.column * g.b_col, left = int(g.k);
        la.begin(a, g.a_row, g.a_col, g.m - s.row, g.k);
        lb.begin(b, g.b_col, g.b_row, g.n - s.column, PACKED ? g.k / 2 : g.k);
    }
    __device__ __forceinline__ void load(const Place& s) {
        const Group& g = s.group;
        const int k_left = min(left, 2 * BK);
        la.load(a, A_K ? g.a_col : g.a_row, k_left);
        lb.load(b, B_K ? g.b_row : g.b_col, PACKED ? k_left / 2 : k_left);
        const int first = of_b() ? s.column : s.row, k0 = int(g.k) - left;
        const bool exists = first + line() < (of_b() ? g.n : g.m);
#pragma unroll
        for (int h = 0; h < SUBS; ++h) {
            scale[h] = 1.0f, zero[h] = 0.0f;
            if (!exists || h * SUB >= k_left) continue;         // entries there may be NaN, or beyond the grid
            scale[h] = number_of(of_b() ? s.b : s.a, first + line(), k0 + h * SUB, 1.0f);
            if (of_b()) zero[h] = number_of(s.zero, first + line(), k0 + h * SUB, 0.0f);
        }
        a += g.a_col * i64(BK * sizeof(A)), b += g.b_row * B_DEPTH, left -= BK;
    }
    __device__ __forceinline__ void store_numbers(LineNumbers& to) const {
#pragma unroll
        for (int h = 0; h < SUBS; ++h) {
            if (of_b()) to.b[h][line()] = scale[h], to.zero[h][line()] = zero[h];
            else to.a[h][line()] = scale[h];
        }
    }
    // Decoded, in lines along k.
    __device__ __forceinline__ void store(const LineNumbers& own) const {
#pragma unroll
        for (int c = 0; c < la.CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < la.V; ++i) {
                const int line = A_K ? la.across(c) : la.along(c) + i, k = A_K ? la.along(c) + i : la.across(c);
                tiles[line * PITCH + k] = decode<A_CODE>(la.chunk[c].e[i]);
            }
        float* const of_b = tiles + BM * PITCH;
#pragma unroll
        for (int c = 0; c < lb.CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < lb.V; ++i) {
                const int line = B_K ? lb.across(c) : lb.along(c) + i, deep = B_K ? lb.along(c) + i : lb.across(c);
                const u32 code = lb.chunk[c].e[i];
                if (PACKED) {
                    const float z = own.zero[deep * 2 / SUB][line];
                    *(float2*)(of_b + line * PITCH + deep * 2) = make_float2(decode<B_CODE>(code & 15) - z, decode<B_CODE>(code >> 4) - z);
                } else {
                    of_b[line * PITCH + deep] = decode<B_CODE>(code) - own.zero[deep / SUB][line];
                }
            }
    }
};

// A warp's sums: those of the block of k in hand, and all before it with their scales.
struct Sums {
    float part[MI][NJ][4], total[MI][NJ][4];

    static __device__ __forceinline__ int row() { return ((threadIdx.x >> 5) & 1) * (BM / 2); }
    static __device__ __forceinline__ int column() { return (threadIdx.x >> 6) * (BN / 2); }

    static __device__ __forceinline__ void clear(float (&sums)[MI][NJ][4]) {
#pragma unroll
        for (int e = 0; e < MI * NJ * 4; ++e) ((float*)sums)[e] = 0.0f;
    }
    __device__ __forceinline__ void multiply(int k) {
        u32 a[MI][4], b[NJ / 2][4];
#pragma unroll
        for (int i = 0; i < MI; ++i) load_a<true, PITCH>(a[i], tiles, row() + i * 16, k);
#pragma unroll
        for (int j = 0; j < NJ / 2; ++j) load_b<true, PITCH>(b[j], tiles + BM * PITCH, column() + j * 16, k);
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int j = 0; j < NJ; ++j) mma_tf32(part[i][j], a[i], b[j >> 1] + (j & 1) * 2);
    }
    __device__ __forceinline__ void promote(const LineNumbers& own, int h) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int j = 0; j < NJ; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    total[i][j][e] += part[i][j][e] * (own.a[h][row() + i * 16 + (e >> 1) * 8 + (lane >> 2)] * own.b[h][column() + j * 8 + (lane & 3) * 2 + (e & 1)]);
        clear(part);
    }
    // 16 x 32 at a time through the warp's own piece of shared memory.
    __device__ __forceinline__ void finish(const Problem& p, const Place& s) const {
        constexpr int STAGED = 36;
        static_assert(THREADS / 32 * 16 * STAGED <= (BM + BN) * PITCH && NJ == 4, "room for results");
        const int lane = threadIdx.x & 31;
        float* const staged = tiles + (threadIdx.x >> 5) * 16 * STAGED;
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int j = 0; j < NJ; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(float2*)(staged + ((lane >> 2) + h * 8) * STAGED + j * 8 + (lane & 3) * 2) = make_float2(total[i][j][h * 2], total[i][j][h * 2 + 1]);
            __syncwarp();
            emit<float>(p, s.group, staged, 16, 32, STAGED, s.row + row() + i * 16, s.column + column());
            __syncwarp();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
quantised(const __grid_constant__ Problem p, const __grid_constant__ Grids grids) {
    __shared__ Place place;
    if (threadIdx.x < 32) place.walk[threadIdx.x] = TileWalk<BM, BN>();
    if (threadIdx.x == 0) place.number = -1, place.tile = blockIdx.x;
    __syncwarp();
    Sums sums;
    Loader loader;
    while (true) {
        if (threadIdx.x < 32) find_tile(p, grids, place);
        __syncthreads();
        if (place.number < 0) break;
        const int k = int(place.group.k);
        loader.begin(place);
        Sums::clear(sums.part), Sums::clear(sums.total);
        if (k > 0) {
            loader.load(place);
            loader.store_numbers(numbers[0]);
        }
        __syncthreads();
        for (int k0 = 0; k0 < k; k0 += BK) {
            const LineNumbers& own = numbers[(k0 / BK) & 1];
            loader.store(own);
            const bool more = k0 + BK < k;
            if (more) loader.load(place);
            __syncthreads();
#pragma unroll
            for (int h = 0; h < SUBS; ++h) {
                const int end = k0 + (h + 1) * SUB;
                if (end - SUB >= k) break;
#pragma unroll
                for (int s = 0; s < SUB; s += 8) sums.multiply(h * SUB + s);
                if (end >= k || (end & ((1 << place.promote) - 1)) == 0) sums.promote(own, h);
            }
            if (more) loader.store_numbers(numbers[(k0 / BK + 1) & 1]);
            __syncthreads();
        }
        sums.finish(p, place);
        __syncthreads();
    }
    if (p.zero_unowned) zero_unowned(p, i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, i64(gridDim.x) * (THREADS / 32));
}
