// The kernel that is right everywhere: any form, strides, alignment, size and dtype, on sm_80 and later.
//
// FUSED: what multigemm.problem.fused describes, but for sums of rows (sum_rows.cu), is part of the kernel. KIND picks the arithmetic (16-bit, tf32, int8 and float64 on tensor cores through mma.sync, float32 on the ordinary
// cores); A_K and B_K say whether k is the contiguous direction of A and of B; TILE is the side of a tile. Thread blocks stay
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
constexpr int BM = TILE, BN = TILE, BK = BLOCK_K, THREADS = BLOCK_THREADS;      // as config.SHAPES

#ifndef FUSED
#define FUSED 0
#endif
#ifndef COPIED
#define COPIED 0        // 16 bits, and all lines begin at multiples of 16 bytes: as config.is_copied
#endif
#include "products.cuh"
#include "tile_load.cuh"
#if FUSED
#include "picked_load.cuh"
typedef FusedProblem Given;
typedef FusedGroup Part;
#else
typedef Problem Given;
typedef Group Part;
#endif

// Enough for the ring, and for the staging of results after it. As config.generic_bytes.
constexpr int STAGE_BYTES = (A_TILE + B_TILE) * (int)sizeof(Element);
constexpr int STAGING_BYTES = THREADS / 32 * 16 * 36 * (int)sizeof(Acc);
// Pairs of steps that are unrolled: all, but not of a large tile of float32, whose code would leave the instruction cache.
constexpr int PAIRS_UNROLLED = KIND == KIND_F32 && TILE == 128 ? 5 : STEPS / 2;
static_assert(STEPS % 2 == 0, "registers of the operands take turns");
static_assert(SHARED >= STAGES * STAGE_BYTES && SHARED >= STAGING_BYTES, "shared memory of the launch");

// Tiles in bands of 8 rows, so that resident blocks share operand tiles in the L2 cache. No memory holds the results of a
// group of more tiles than 32 bits count.
__device__ __forceinline__ void tile_position(u32 local, u32 down, u32 across, int& row, int& column) {
    const u32 band = local / (8 * across), rest = local - band * 8 * across, height = min(8u, down - band * 8);
    row = int(band * 8 + rest % height) * BM, column = int(rest / height) * BN;
}

#if FUSED
// Both operands of one k-block on their way into a stage, by lines that each have an address of their own.
typedef PickedLoad<Element, BM, BK, A_K, A_LINES_K, A_PITCH, THREADS> CopyA;
typedef PickedLoad<Element, BN, BK, B_K, B_LINES_K, B_PITCH, THREADS> CopyB;
struct Sources {
    CopyA::Source a;
    CopyB::Source b;
    CopyA::Lines a_lines;
    CopyB::Lines b_lines;

    __device__ __forceinline__ void begin(const Given& p, const Part& g) {
        const Fused& f = p.fused;
        const bool by_k = p.jagged == JAG_K;
        a.begin(g.a, g.a_row, g.a_col, g.m, g.k, f.a_rows, by_k, f.a64, g.start_k, f.a_extent, 0);
        b.begin(g.b, g.b_col, g.b_row, g.n, g.k, f.b_rows, by_k, f.b64, g.start_k, f.b_extent, f.layout == IN_HALVES ? g.n / 2 * g.b_col : 0);
    }
    // By all threads, once per tile: where its lines lie.
    __device__ __forceinline__ void place_lines(const Given& p, const Part& g, int row, int column) {
        const Fused& f = p.fused;
        for (int i = threadIdx.x; i < BM; i += THREADS) {
            i64 number = row + i < g.m ? row + i : -1;
            if (f.a_rows && p.jagged == JAG_M && number >= 0) number = picked_row(f.a_rows, f.a64, g.start_m + number, f.a_extent);
            a_lines.at[i] = number < 0 ? -1 : number * g.a_row * i64(sizeof(Element));
            a_lines.run[i] = u8(max64(min64(g.m - row - i, CopyA::V), 0));
        }
        for (int c = threadIdx.x; c < BN; c += THREADS) {
            i64 number = column + c, left = g.n - number;
            if (f.layout == IN_HALVES) {            // eight columns of g and eight of u in turn
                const i64 feature = column / 2 + (c >> 4) * 8 + (c & 7);
                left = min64(g.n / 2 - feature, 8 - (c & 7));
                number = feature + (((c >> 3) & 1) != f.up_first ? g.n / 2 : 0);
            }
            if (left <= 0) number = -1;
            else if (f.b_rows && p.jagged == JAG_N) number = picked_row(f.b_rows, f.b64, g.start_n + number, f.b_extent);
            b_lines.at[c] = number < 0 ? -1 : number * g.b_col * i64(sizeof(Element));
            b_lines.run[c] = u8(max64(min64(left, CopyB::V), 0));
        }
    }
};
struct Loader {
    __device__ __forceinline__ void begin(const Part&, i64, i64) {}
    __device__ __forceinline__ void load(const Part& g, const Sources& s, Element* stage, int block) const {
        const int k_left = int(min64(g.k - i64(block) * BK, BK));
        CopyA::load(stage, s.a_lines, s.a, block, k_left);
        CopyB::load(stage + A_TILE, s.b_lines, s.b, block, k_left);
    }
    __device__ __forceinline__ void store(Element*) const {}
};
#elif COPIED || KIND == KIND_TF32 || KIND >= KIND_F64
// Both operands of one k-block on their way into a stage, all by cp.async.
typedef TileCopy<Element, BM, BK, A_K, A_LINES_K, A_PITCH, THREADS> CopyA;
typedef TileCopy<Element, BN, BK, B_K, B_LINES_K, B_PITCH, THREADS> CopyB;
struct Sources {
    CopyA::Source a;
    CopyB::Source b;

    __device__ __forceinline__ void begin(const Group& g, i64 i0, i64 j0) {
        a.begin(g.a + i0 * g.a_row * i64(sizeof(Element)), g.a_row, g.a_col, g.m - i0, g.k);
        b.begin(g.b + j0 * g.b_col * i64(sizeof(Element)), g.b_col, g.b_row, g.n - j0, g.k);
    }
};
struct Loader {
    __device__ __forceinline__ void begin(const Group&, i64, i64) {}
    __device__ __forceinline__ void load(const Group& g, const Sources& s, Element* stage, int block) const {
        const int k_left = int(min64(g.k - i64(block) * BK, BK));
        CopyA::start(stage, s.a, g.a_row, g.a_col, block, k_left);
        CopyB::start(stage + A_TILE, s.b, g.b_col, g.b_row, block, k_left);
    }
    __device__ __forceinline__ void store(Element*) const {}
};
#else
// What may travel by cp.async where it is aligned: all that keeps its direction.
constexpr bool A_COPIED = A_K || KIND != KIND_I8, B_COPIED = B_K || KIND != KIND_I8;

// Both operands of one k-block on their way into a stage: by cp.async at once, or through registers.
struct Sources {
    __device__ __forceinline__ void begin(const Group&, i64, i64) {}
};
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
    __device__ __forceinline__ void load(const Group& g, const Sources&, Element* stage, int) {
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

// The tile in hand, and how far the walk over the groups has come: too much for registers that every thread would hold.
struct Place {
    TileWalk<BM, BN> walk[32];
    Part group;
    Sources sources;
    i64 tile;                        // the next one's number
    int number, row, column;         // of the group, -1 behind the last tile; the tile's first row and column
};

// One warp finds the block's next tile. Not inlined: it runs once per tile, and would take registers from the products.
__device__ __noinline__ void find_tile(const Given& p, Place& s) {
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
#if FUSED
    if (found && number != s.number) s.group = resolve_fused(p, number, sizeof(Element)), s.sources.begin(p, s.group);
#else
    if (found && number != s.number) s.group = resolve(p, number, sizeof(Element));
#endif
    s.number = found ? number : -1;
    if (!found) return;
    tile_position(u32(local), (u32(s.group.m) + BM - 1) / BM, (u32(s.group.n) + BN - 1) / BN, s.row, s.column);
#if !FUSED
    s.sources.begin(s.group, s.row, s.column);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) generic(const __grid_constant__ Given p) {
    extern __shared__ __align__(16) char shared[];
    Element* const ring = (Element*)shared;
    __shared__ Place place;
    const Part& g = place.group;
    if (threadIdx.x < 32) place.walk[threadIdx.x] = TileWalk<BM, BN>();
    if (threadIdx.x == 0) place.number = -1, place.tile = blockIdx.x;
    __syncwarp();
    Compute work;
    Loader loader;
    while (true) {
        if (threadIdx.x < 32) find_tile(p, place);
        __syncthreads();
        if (place.number < 0) break;
#if FUSED
        place.sources.place_lines(p, g, place.row, place.column);
        __syncthreads();
#endif
        const int blocks = int(ceil_div(g.k, BK));
        loader.begin(g, place.row, place.column);
#pragma unroll
        for (int e = 0; e < int(sizeof(work.acc) / sizeof(Acc)); ++e) ((Acc*)work.acc)[e] = 0;
        // Round kb multiplies block kb while block kb + STAGES - 1 is loaded; the first rounds only load. What a step multiplies
        // is read one step before, so a block's last step reads from the next block, and waits for it.
        Compute::Fragments f[2];
        for (int kb = 1 - STAGES; kb < blocks; ++kb) {
            const int next = kb + STAGES - 1;
            const Element* at = ring + (kb + STAGES) % STAGES * (A_TILE + B_TILE);
            Element* const to = ring + next % STAGES * (A_TILE + B_TILE);
            if (next < blocks) loader.load(g, place.sources, to, next);
            commit_copies();
            if (kb >= 0) {
#pragma unroll PAIRS_UNROLLED
                for (int s = 0; s + 2 < STEPS; s += 2) {
                    Compute::read(f[1], at, at + A_TILE, s + 1);
                    work.multiply(f[0]);
                    Compute::read(f[0], at, at + A_TILE, s + 2);
                    work.multiply(f[1]);
                }
                Compute::read(f[1], at, at + A_TILE, STEPS - 1);
                work.multiply(f[0]);
            }
            if (kb >= -1) {
                at = ring + (kb + 1) % STAGES * (A_TILE + B_TILE);
                wait_for_copies<STAGES - 2>();
                __syncthreads();                     // block kb + 1 is there for all, block kb is done with
                Compute::read(f[0], at, at + A_TILE, 0);
            }
            if (kb >= 0) work.multiply(f[1]);
            if (next < blocks) loader.store(to);
        }
        wait_for_copies<0>();
        __syncthreads();
        work.finish(p, g, shared, place.row, place.column);
        __syncthreads();
    }
#if FUSED
    if (p.zero_unowned) {
        Problem result = p;
        result.n = p.fused.layout ? p.n / 2 : p.n;
        zero_unowned(result, i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, i64(gridDim.x) * (THREADS / 32));
    }
#else
    if (p.zero_unowned) zero_unowned(p, i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, i64(gridDim.x) * (THREADS / 32));
#endif
}
