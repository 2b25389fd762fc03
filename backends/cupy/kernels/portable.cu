// The kernel that is right everywhere: any form, strides, alignment, size and dtype, on sm_80 and later.
//
// KIND picks the arithmetic (16-bit, tf32 and int8 on tensor cores through mma.sync; fp32 and fp64 on
// the ordinary cores); A_K and B_K say whether k is the contiguous direction of A and of B; TILE is the
// side of a tensor-core tile, 128, or 64 for small problems. Thread blocks stay resident and take tiles
// in turn. A ring of STAGES k-blocks in shared memory lets loads run ahead of the products.
#include "epilogue.cuh"
#include "tensor_cores.cuh"
#include "tile_load.cuh"

#define KIND_F16 0
#define KIND_BF16 1
#define KIND_TF32 2
#define KIND_I8 3
#define KIND_F32 4
#define KIND_F64 5

#if KIND == KIND_F16 || KIND == KIND_BF16
typedef u16 Element;
typedef float Acc;
constexpr int BM = TILE, BN = TILE, BK = TILE == 64 ? 64 : 32, STAGES = 4;
#elif KIND == KIND_TF32
typedef float Element;
typedef float Acc;
constexpr int BM = TILE, BN = TILE, BK = TILE == 64 ? 32 : 16, STAGES = 4;
#elif KIND == KIND_F32
typedef float Element;
typedef float Acc;
constexpr int BM = 128, BN = 128, BK = 16, STAGES = 2;
#elif KIND == KIND_F64
typedef double Element;
typedef double Acc;
constexpr int BM = 64, BN = 64, BK = 16, STAGES = 2;
#else
typedef signed char Element;
typedef int Acc;
constexpr int BM = TILE, BN = TILE, BK = TILE == 64 ? 128 : 64, STAGES = 4;
#endif
constexpr bool TENSOR_CORES = KIND <= KIND_I8;
constexpr int THREADS = TENSOR_CORES && TILE == 64 ? 128 : 256;
constexpr int RESIDENT = THREADS == 128 ? 3 : 1;       // thread blocks per multiprocessor; more would spill

#if KIND <= KIND_I8
// Each warp owns half of the tile's rows and 32 of its columns: MI x 4 products of m16n8. Pitches are
// padded so that eight rows of 16 bytes fall into different banks.
constexpr int MI = BM / 32;
constexpr int PAD = 16 / sizeof(Element);
constexpr bool A_ROWS = A_K || KIND == KIND_I8, B_ROWS = B_K || KIND == KIND_I8;      // bytes are multiplied along k only
constexpr int A_PITCH = A_ROWS ? BK + PAD : BM + 8, B_PITCH = B_ROWS ? BK + PAD : BN + 8;
constexpr int A_TILE = (A_ROWS ? BM : BK) * A_PITCH, B_TILE = (B_ROWS ? BN : BK) * B_PITCH;

__device__ __forceinline__ u32 tf32(Element x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"((float)x));
    return y;
}

struct alignas(8) Pair { Acc low, high; };

struct Compute {
    Acc acc[MI][4][4];

    __device__ __forceinline__ void step(const Element* a, const Element* b) {
        const int warp = threadIdx.x >> 5, m0 = (warp & 1) * (BM / 2), n0 = (warp >> 1) * 32;
#if KIND == KIND_TF32
        const int lane = threadIdx.x & 31, row = lane >> 2, col = lane & 3;
#define A_AT(m, k) tf32(A_K ? a[(m) * A_PITCH + (k)] : a[(k) * A_PITCH + (m)])
#define B_AT(n, k) tf32(B_K ? b[(n) * B_PITCH + (k)] : b[(k) * B_PITCH + (n)])
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
            u32 fa[MI][4], fb[4][2];
#pragma unroll
            for (int i = 0; i < MI; ++i)
#pragma unroll
                for (int q = 0; q < 4; ++q) fa[i][q] = A_AT(m0 + i * 16 + row + (q & 1) * 8, k + col + (q >> 1) * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int q = 0; q < 2; ++q) fb[j][q] = B_AT(n0 + j * 8 + row, k + col + q * 4);
#pragma unroll
            for (int i = 0; i < MI; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) mma_tf32(acc[i][j], fa[i], fb[j]);
        }
#else
#pragma unroll
        for (int k = 0; k < BK; k += 32 / sizeof(Element)) {
            u32 fa[MI][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < MI; ++i) load_a<A_ROWS, A_PITCH>(fa[i], a, m0 + i * 16, k);
#pragma unroll
            for (int j = 0; j < 2; ++j) load_b<B_ROWS, B_PITCH>(fb[j], b, n0 + j * 16, k);
#pragma unroll
            for (int i = 0; i < MI; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const u32* const columns = fb[j >> 1] + (j & 1) * 2;
#if KIND == KIND_I8
                    mma_s8(acc[i][j], fa[i], columns);
#elif KIND == KIND_BF16
                    mma_bf16(acc[i][j], fa[i], columns);
#else
                    mma_f16(acc[i][j], fa[i], columns);
#endif
                }
        }
#endif
    }

    // alpha * acc in 16 bits and rows of even addresses: pairs leave straight from the registers.
    __device__ __forceinline__ bool finish_plain(const Problem& p, const Group& g, i64 i0, i64 j0) const {
        const bool plain = !g.c && !g.bias && p.activation == IDENTITY && (p.out_type == F16 || p.out_type == BF16) && g.out_col == 1;
        if (!plain || ((u64(g.out) | u64(g.out_row * 2)) & 3)) return false;
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const float alpha = p.read_ab ? float(p.alpha) : 0.0f;
        const i64 row = i0 + (warp & 1) * (BM / 2) + (lane >> 2), col = j0 + (warp >> 1) * 32 + (lane & 3) * 2;
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const i64 r = row + i * 16 + h * 8, c = col + j * 8;
                    if (r >= g.m || c >= g.n) continue;
                    const float low = acc[i][j][h * 2] * alpha, high = acc[i][j][h * 2 + 1] * alpha;
                    const u32 pair = p.out_type == BF16 ? pack_bf16(low, high) : pack_f16(low, high);
                    char* at = g.out + (r * g.out_row + c) * 2;
                    if (c + 1 < g.n) *(u32*)at = pair;
                    else *(u16*)at = u16(pair);
                }
        return true;
    }

    // 16 x 32 at a time through the warp's own piece of shared memory.
    __device__ __forceinline__ void finish(const Problem& p, const Group& g, char* shared, i64 i0, i64 j0) {
        if (KIND != KIND_I8 && finish_plain(p, g, i0, j0)) return;
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        constexpr int PITCH = 36;
        Acc* staged = (Acc*)shared + warp * 16 * PITCH;
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(Pair*)(staged + ((lane >> 2) + h * 8) * PITCH + j * 8 + (lane & 3) * 2) = {acc[i][j][h * 2], acc[i][j][h * 2 + 1]};
            __syncwarp();
            emit<Acc>(p, g, staged, 16, 32, PITCH, i0 + (warp & 1) * (BM / 2) + i * 16, j0 + (warp >> 1) * 32);
            __syncwarp();
        }
    }
};
#else
// Ordinary cores: a grid of 16 x 16 threads, each with an R x R block; both tiles lie as [k][mn].
constexpr int R = BM / 16;
constexpr int A_PITCH = BM + 16 / sizeof(Element), B_PITCH = BN + 16 / sizeof(Element);
constexpr int A_TILE = BK * A_PITCH, B_TILE = BK * B_PITCH;

struct Compute {
    Acc acc[R][R];

    // A thread's rows are 4 neighbours, and 4 more half a tile away: neighbours read as one vector.
    static __device__ __forceinline__ int at(int t, int r) { return (r >> 2) * 64 + t * 4 + (r & 3); }

    __device__ __forceinline__ void step(const Element* a, const Element* b) {
        const int tm = threadIdx.x >> 4, tn = threadIdx.x & 15;
#pragma unroll 8
        for (int k = 0; k < BK; ++k) {
            Acc x[R], y[R];
#pragma unroll
            for (int r = 0; r < R; ++r) x[r] = a[k * A_PITCH + at(tm, r)], y[r] = b[k * B_PITCH + at(tn, r)];
#pragma unroll
            for (int i = 0; i < R; ++i)
#pragma unroll
                for (int j = 0; j < R; ++j) acc[i][j] += x[i] * y[j];
        }
    }

    // One row of each thread at a time: 16 rows of BN values, two rows for each of the 8 warps.
    __device__ __forceinline__ void finish(const Problem& p, const Group& g, char* shared, i64 i0, i64 j0) {
        const int tm = threadIdx.x >> 4, tn = threadIdx.x & 15, warp = threadIdx.x >> 5;
        constexpr int PITCH = BN + 4;
        Acc* staged = (Acc*)shared;
#pragma unroll
        for (int i = 0; i < R; ++i) {
#pragma unroll
            for (int j = 0; j < R; ++j) staged[tm * PITCH + at(tn, j)] = acc[i][j];
            __syncwarp();
#pragma unroll 1
            for (int w = warp * 2; w < warp * 2 + 2; ++w) emit<Acc>(p, g, staged + w * PITCH, 1, BN, PITCH, i0 + at(w, i), j0);
            __syncwarp();
        }
    }
};
#endif

// Enough for the ring, and for the staging of results after it. As portable.shared_bytes.
constexpr int STAGE_BYTES = (A_TILE + B_TILE) * (int)sizeof(Element);
constexpr int STAGING_BYTES = TENSOR_CORES ? THREADS / 32 * 16 * 36 * 4 : 16 * (BN + 4) * (int)sizeof(Acc);
static_assert(SHARED >= STAGES * STAGE_BYTES && SHARED >= STAGING_BYTES, "shared memory of the launch");

// Tiles in bands of 8 rows, so that resident blocks share operand tiles in the L2 cache.
__device__ __forceinline__ void tile_position(i64 local, i64 tiles_m, i64 tiles_n, i64& tm, i64& tn) {
    if (tiles_m * tiles_n < (i64(1) << 31) / 8) {     // the usual case, with divisions of 32 bits
        const u32 across = u32(tiles_n), band = u32(local) / (8 * across), rest = u32(local) - band * 8 * across;
        const u32 height = min(8u, u32(tiles_m) - band * 8);
        tm = band * 8 + rest % height, tn = rest / height;
        return;
    }
    const i64 band = local / (8 * tiles_n), height = min64(8, tiles_m - band * 8), rest = local - band * 8 * tiles_n;
    tm = band * 8 + rest % height, tn = rest / height;
}

// What may travel by cp.async where it is aligned: all that keeps its direction.
constexpr bool A_COPIED = TENSOR_CORES && (A_K || KIND != KIND_I8), B_COPIED = TENSOR_CORES && (B_K || KIND != KIND_I8);

// Both operands of one k-block on their way into a stage: by cp.async at once, or through registers.
struct Loader {
    TileLoad<Element, BM, BK, A_K, THREADS> la;
    TileLoad<Element, BN, BK, B_K, THREADS> lb;
    const char *a, *b;               // the next k-block's first elements
    i64 a_step, b_step;              // bytes from one k-block to the next
    i64 left;                        // k that remains

    __device__ __forceinline__ void begin(const Group& g, i64 i0, i64 j0) {
        a = g.a + i0 * g.a_row * i64(sizeof(Element)), b = g.b + j0 * g.b_col * i64(sizeof(Element));
        a_step = g.a_col * i64(BK * sizeof(Element)), b_step = g.b_row * i64(BK * sizeof(Element)), left = g.k;
        la.begin(a, g.a_row, g.a_col, g.m - i0, g.k);
        lb.begin(b, g.b_col, g.b_row, g.n - j0, g.k);
    }
    __device__ __forceinline__ void load(const Group& g, Element* stage) {
        const int k_left = int(min64(left, 2 * BK));
        if (A_COPIED && la.width == 16) la.template start<A_PITCH>(stage, a, k_left);
        else la.load(a, A_K ? g.a_col : g.a_row, k_left);
        if (B_COPIED && lb.width == 16) lb.template start<B_PITCH>(stage + A_TILE, b, k_left);
        else lb.load(b, B_K ? g.b_row : g.b_col, k_left);
        a += a_step, b += b_step, left -= BK;
    }
    __device__ __forceinline__ void store(Element* stage) const {
        if (!TENSOR_CORES) {
            la.template store_k_major<A_PITCH>(stage), lb.template store_k_major<B_PITCH>(stage + A_TILE);
            return;
        }
        if (KIND == KIND_I8 && !A_K) la.template store_turned<A_PITCH>(stage);
        else if (la.width != 16) la.template store<A_PITCH>(stage);
        if (KIND == KIND_I8 && !B_K) lb.template store_turned<B_PITCH>(stage + A_TILE);
        else if (lb.width != 16) lb.template store<B_PITCH>(stage + A_TILE);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) portable(const __grid_constant__ Problem p) {
    extern __shared__ __align__(16) char shared[];
    Element* const ring = (Element*)shared;
    TileWalk<BM, BN> walk;
    int group = -1, last_group = -1;
    i64 local;
    __shared__ Group g;                              // too much for registers that every thread would hold
    Compute work;
    Loader loader;
    for (i64 tile = blockIdx.x; walk.find(p, tile, group, local); tile += gridDim.x) {
        if (group != last_group) {
            if (threadIdx.x == 0) g = resolve(p, group, sizeof(Element));
            last_group = group;
            __syncthreads();
        }
        i64 tm, tn;
        tile_position(local, ceil_div(g.m, BM), ceil_div(g.n, BN), tm, tn);
        const i64 i0 = tm * BM, j0 = tn * BN;
        const int blocks = int(ceil_div(g.k, BK));
        loader.begin(g, i0, j0);
#pragma unroll
        for (int e = 0; e < int(sizeof(work.acc) / sizeof(Acc)); ++e) ((Acc*)work.acc)[e] = 0;
        // Step kb multiplies block kb while block kb + STAGES - 1 is loaded; the first steps only load.
        for (int kb = 1 - STAGES; kb < blocks; ++kb) {
            const int next = kb + STAGES - 1;
            Element *to = ring + next % STAGES * (A_TILE + B_TILE), *at = ring + kb % STAGES * (A_TILE + B_TILE);
            if (kb >= 0) {
                wait_for_copies<STAGES - 2>();
                __syncthreads();                     // block kb is there for all, block kb - 1 is done with
            }
            if (next < blocks) loader.load(g, to);
            commit_copies();
            if (kb >= 0) work.step(at, at + A_TILE);
            if (next < blocks) loader.store(to);
        }
        wait_for_copies<0>();
        __syncthreads();
        work.finish(p, g, shared, i0, j0);
        __syncthreads();
    }
    if (p.zero_unowned) zero_unowned(p, i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, i64(gridDim.x) * (THREADS / 32));
}
