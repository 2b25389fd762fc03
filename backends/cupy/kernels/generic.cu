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
// The large tiles of float32 and float64 are few and take long: the next one is found, and its first blocks of k are loaded, before
// the results of the last one are stored.
#define AHEAD (TILE == 128 && KIND >= KIND_F64 && !FUSED)
// Copies of a block of k start two by two between the products of another block: while threads start all of them at once, no tensor
// core has work. They take registers, so A's operands take the place of those that were multiplied just before.
#define SPREAD (AHEAD && KIND == KIND_F64)
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
static_assert(!SPREAD || STAGES > 2, "copies that start last have a block's time to come");
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
#if SPREAD
    CopyA::Parts a;
    CopyB::Parts b;
    __device__ __forceinline__ void begin_parts(const Group& g, const Sources& s, Element* stage, int block) {
        const int k_left = int(min64(g.k - i64(block) * BK, BK));
        a.begin(stage, s.a, g.a_row, g.a_col, block, k_left);
        b.begin(stage + A_TILE, s.b, g.b_col, g.b_row, block, k_left);
    }
    // Behind the `unit`-th of the STEPS * MI products of 16 rows.
    __device__ __forceinline__ void load_part(int unit) {
        static_assert(CopyA::Parts::COUNT * 2 == STEPS * MI && CopyB::Parts::COUNT * 2 == STEPS * MI, "all start");
        if (unit % 2) a.start(unit / 2), b.start(unit / 2);
    }
#endif
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

// A tile, and how far the walk over the groups has come: too much for registers that every thread would hold.
struct Place {
    Part group;
    Sources sources;
    int number, row, column;         // of the group, -1 behind the last tile; the tile's first row and column
};
struct Walk {
    TileWalk<BM, BN> of_lane[32];
    i64 tile;                        // the next one's number
};

// One warp finds the tile after `last`. Not inlined: it runs once per tile, and would take registers from the products.
__device__ __noinline__ void find_tile(const Given& p, Walk& w, const Place& last, Place& s) {
    const int lane = threadIdx.x & 31;
    TileWalk<BM, BN> walk = w.of_lane[lane];
    int number = -1;
    i64 local;
    const i64 tile = w.tile;
    __syncwarp();                    // all lanes have read it: the first one writes the next one there
    const bool found = walk.find(p, tile, number, local);
    w.of_lane[lane] = walk;
    if (lane != 0) return;
    w.tile = tile + gridDim.x;
#if AHEAD
    if (found && number == last.number) s.group = last.group;
#endif
#if FUSED
    if (found && number != last.number) s.group = resolve_fused(p, number, sizeof(Element)), s.sources.begin(p, s.group);
#else
    if (found && number != last.number) s.group = resolve(p, number, sizeof(Element));
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
    __shared__ Walk walk;
    __shared__ Place places[1 + AHEAD];
    if (threadIdx.x < 32) walk.of_lane[threadIdx.x] = TileWalk<BM, BN>();
    if (threadIdx.x == 0) places[AHEAD].number = -1, walk.tile = blockIdx.x;
    __syncwarp();
    Compute work;
    Loader loader;
#if AHEAD
    // The blocks of k of a tile that are loaded before its first products.
    const auto load_first = [&](const Place& place) {
        const int blocks = int(ceil_div(place.group.k, BK));
        for (int block = 0; block < STAGES - 1; ++block) {
            if (block < blocks) loader.load(place.group, place.sources, ring + block * (A_TILE + B_TILE), block);
            commit_copies();
        }
    };
    if (threadIdx.x < 32) find_tile(p, walk, places[1], places[0]);
    __syncthreads();
    if (places[0].number >= 0) load_first(places[0]);
#endif
    for (int turn = 0;; turn ^= AHEAD) {
        Place &place = places[turn], &then = places[turn ^ AHEAD];
        const Part& g = place.group;
#if !AHEAD
        if (threadIdx.x < 32) find_tile(p, walk, place, then);
        __syncthreads();
#endif
        if (place.number < 0) break;
#if FUSED
        place.sources.place_lines(p, g, place.row, place.column);
        __syncthreads();
#endif
        const int blocks = int(ceil_div(g.k, BK));
#if AHEAD
        wait_for_copies<STAGES - 2>();
        __syncthreads();                             // block 0 is there for all, the tile before is stored
        if (threadIdx.x < 32) find_tile(p, walk, place, then);
#else
        loader.begin(g, place.row, place.column);
#endif
#pragma unroll
        for (int e = 0; e < int(sizeof(work.acc) / sizeof(Acc)); ++e) ((Acc*)work.acc)[e] = 0;
        // Round kb multiplies block kb while block kb + STAGES - 1 is loaded; the first rounds only load. What a step multiplies
        // is read one step before, so a block's last step reads from the next block, and waits for it.
        Compute::Fragments f[2];
#if AHEAD
        if (blocks > 0) {
            Compute::read(f[0], ring, ring + A_TILE, 0);
#if SPREAD
#pragma unroll
            for (int i = 0; i < MI; ++i) Compute::read_a(f[0], ring, 0, i);
#endif
        }
#endif
        for (int kb = AHEAD ? 0 : 1 - STAGES; kb < blocks; ++kb) {
            const int next = kb + STAGES - 1;
            const Element* at = ring + (kb + STAGES) % STAGES * (A_TILE + B_TILE);
            Element* const to = ring + next % STAGES * (A_TILE + B_TILE);
#if SPREAD
            const bool in_parts = next < blocks && place.sources.a.wide && place.sources.b.wide;
            if (in_parts) loader.begin_parts(g, place.sources, to, next);
            else if (next < blocks) loader.load(g, place.sources, to, next);
            // Step `s`; A of step `then_s`, which lies in `at`, takes its place.
            const auto multiply = [&](int s, int then_s) {
                work.multiply(f[0], f[s % 2], [&](int i) {
                    Compute::read_a(f[0], at, then_s, i);
                    if (in_parts) loader.load_part(s * MI + i);
                });
            };
#else
            const auto multiply = [&](int s, int) { work.multiply(f[s % 2], f[s % 2], [](int) {}); };
            if (next < blocks) loader.load(g, place.sources, to, next);
            commit_copies();
#endif
            if (kb >= 0) {
#pragma unroll PAIRS_UNROLLED
                for (int s = 0; s + 2 < STEPS; s += 2) {
                    Compute::read(f[1], at, at + A_TILE, s + 1);
                    multiply(s, s + 1);
                    Compute::read(f[0], at, at + A_TILE, s + 2);
                    multiply(s + 1, s + 2);
                }
                Compute::read(f[1], at, at + A_TILE, STEPS - 1);
                multiply(STEPS - 2, STEPS - 1);
            }
            if (kb >= -1) {
                at = ring + (kb + 1) % STAGES * (A_TILE + B_TILE);
                wait_for_copies<STAGES - 2 - SPREAD>();
                __syncthreads();                     // block kb + 1 is there for all, block kb is done with
                Compute::read(f[0], at, at + A_TILE, 0);
            }
            if (kb >= 0) multiply(STEPS - 1, 0);
#if SPREAD
            commit_copies();
#endif
            if (next < blocks) loader.store(to);
        }
        wait_for_copies<0>();
        __syncthreads();
        const bool plain = !is_fused(p) && Compute::is_plain(p, g);
#if AHEAD
        if (then.number >= 0 && plain) load_first(then);                 // results do not pass through the ring
#endif
        if (plain) work.finish_plain(p, g, place.row, place.column);
        else work.finish(p, g, shared, place.row, place.column);
#if AHEAD
        if (plain) continue;
        __syncthreads();
        if (then.number >= 0) load_first(then);
#else
        __syncthreads();
#endif
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
