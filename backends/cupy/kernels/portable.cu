// The kernel that is right everywhere: any form, strides, alignment, size and dtype, on sm_80 and later.
//
// KIND picks the arithmetic (16-bit, tf32, int8 and float64 on tensor cores through mma.sync, float32 on the ordinary
// cores); A_K and B_K say whether k is the contiguous direction of A and of B; a tile has TILE_M x TILE_N results. Thread blocks stay
// resident and take tiles in turn. A ring of STAGES k-blocks in shared memory lets loads run ahead of the products.
#define KIND_F16 0
#define KIND_BF16 1
#define KIND_TF32 2
#define KIND_I8 3
#define KIND_F64 4
#define KIND_F32 5

#if KIND == KIND_F16 || KIND == KIND_BF16
typedef unsigned short Element;
typedef float Acc;
#elif KIND == KIND_I8
typedef signed char Element;
typedef int Acc;
#elif KIND == KIND_F64
typedef double Element;
typedef double Acc;
#else
typedef float Element;
typedef float Acc;
#endif
constexpr int BM = TILE_M, BN = TILE_N, BK = BLOCK_K, THREADS = BLOCK_THREADS;      // as portable.SHAPES

#if KIND <= KIND_F64
#include "mma_tile.cuh"
#else
#include "ordinary_cores.cuh"
constexpr bool A_LINES_K = false, B_LINES_K = false;
constexpr int A_PITCH = BM + 4, B_PITCH = BN + 4, A_TILE = BK * A_PITCH, B_TILE = BK * B_PITCH;
typedef OrdinaryCores<BM, BN, BK, BM == 32 ? 4 : 8, BM == 128 ? 8 : 4, BM == 64 ? 4 : 8, THREADS, A_PITCH, B_PITCH> Compute;
#endif
#include "tile_copy.cuh"
#include "tile_load.cuh"

// Enough for the ring, and for the staging of results after it. As portable.shared_bytes.
constexpr int STAGE_BYTES = (A_TILE + B_TILE) * (int)sizeof(Element);
constexpr int STAGING_BYTES = THREADS / 32 * 16 * 36 * (int)sizeof(Acc);
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

#if KIND == KIND_TF32 || KIND >= KIND_F64
// Both operands of one k-block on their way into a stage, all by cp.async.
struct Loader {
    TileCopy<Element, BM, BK, A_K, A_LINES_K, A_PITCH, THREADS> la;
    TileCopy<Element, BN, BK, B_K, B_LINES_K, B_PITCH, THREADS> lb;

    __device__ __forceinline__ void begin(const Group& g, i64 i0, i64 j0) {
        la.begin(g.a + i0 * g.a_row * i64(sizeof(Element)), g.a_row, g.a_col, g.m - i0, g.k);
        lb.begin(g.b + j0 * g.b_col * i64(sizeof(Element)), g.b_col, g.b_row, g.n - j0, g.k);
    }
    __device__ __forceinline__ void load(const Group& g, Element* stage, int block) {
        const int k_left = int(min64(g.k - i64(block) * BK, BK));
        la.start(stage, g.a_row, g.a_col, k_left);
        lb.start(stage + A_TILE, g.b_col, g.b_row, k_left);
    }
    __device__ __forceinline__ void store(Element*) const {}
};
#else
// What may travel by cp.async where it is aligned: all that keeps its direction.
constexpr bool A_COPIED = A_K || KIND != KIND_I8, B_COPIED = B_K || KIND != KIND_I8;

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
    __device__ __forceinline__ void load(const Group& g, Element* stage, int) {
        const int k_left = int(min64(left, 2 * BK));
        if (A_COPIED && la.width == 16) la.template start<A_PITCH>(stage, a, k_left);
        else la.load(a, A_K ? g.a_col : g.a_row, k_left);
        if (B_COPIED && lb.width == 16) lb.template start<B_PITCH>(stage + A_TILE, b, k_left);
        else lb.load(b, B_K ? g.b_row : g.b_col, k_left);
        a += a_step, b += b_step, left -= BK;
    }
    __device__ __forceinline__ void store(Element* stage) const {
        if (KIND == KIND_I8 && !A_K) la.template store_turned<A_PITCH>(stage);
        else if (la.width != 16) la.template store<A_PITCH>(stage);
        if (KIND == KIND_I8 && !B_K) lb.template store_turned<B_PITCH>(stage + A_TILE);
        else if (lb.width != 16) lb.template store<B_PITCH>(stage + A_TILE);
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) portable(const __grid_constant__ Problem p) {
    extern __shared__ __align__(16) char shared[];
    Element* const ring = (Element*)shared;
    TileWalk<BM, BN> walk;
    int group = -1;
    i64 local;
    __shared__ Group g;                              // too much for registers that every thread would hold
    __shared__ int corner[2];
    Compute work;
    Loader loader;
    for (i64 tile = blockIdx.x;; tile += gridDim.x) {
        const int last_group = group;
        if (!walk.find(p, tile, group, local)) break;
        if (group != last_group) {
            if (threadIdx.x == 0) g = resolve(p, group, sizeof(Element));
            __syncthreads();
        }
        i64 tm, tn;
        tile_position(local, ceil_div(g.m, BM), ceil_div(g.n, BN), tm, tn);
        const int i0 = int(tm) * BM, j0 = int(tn) * BN;       // a group's rows and columns are counted in 31 bits
        if (threadIdx.x == 0) corner[0] = i0, corner[1] = j0;
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
            if (next < blocks) loader.load(g, to, next);
            commit_copies();
            if (kb >= 0) work.step(at, at + A_TILE);
            if (next < blocks) loader.store(to);
        }
        wait_for_copies<0>();
        __syncthreads();
        work.finish(p, g, shared, corner[0], corner[1]);
        __syncthreads();
    }
    if (p.zero_unowned) zero_unowned(p, i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, i64(gridDim.x) * (THREADS / 32));
}
