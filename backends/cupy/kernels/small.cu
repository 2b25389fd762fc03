// Small problems of 16-bit operands: one thread block per tile, and nothing that takes time besides.
//
// A small product is a chain of latencies: launch, one trip to memory, a few products, one trip back. So
// there is no schedule, no counter and no tensor map; addresses are worked out before the launch before this one is over,
// unless sizes in memory decide them; all of k (up to STAGES blocks of 64) is asked for at once by cp.async, and results
// leave straight from the registers. sm_80 and later.
//
// Compile-time choices: BFLOAT, A_K and B_K (is k the contiguous direction), TILE_M, TILE_N, LISTED (a
// list's groups come as an argument), A_ODD and B_ODD (do lines begin anywhere, lines.cuh), DEPTH (blocks of k in
// flight), PLAIN (alpha * acc in the operands' type, rows contiguous), PAIRS (of results, at addresses that are
// multiples of 4).
#include "epilogue.cuh"

constexpr int BM = TILE_M, BN = TILE_N, BK = 64, STAGES = DEPTH, WARPS_N = BN / 16, THREADS = WARPS_N * 64;
constexpr int COLS = BN / WARPS_N, MI = BM / 32, NJ = COLS / 8;      // columns, and products of m16n8, of each of 2 x WARPS_N warps
#include "lines.cuh"

constexpr int LIST = 16;                       // as small.LIST
struct Listed {                                // a list's groups: everything that a plain product needs
    int first[LIST];                           // number of the first tile; past the last group: never reached
    int across[LIST];                          // tiles side by side
    int m[LIST], n[LIST], k[LIST];
    u64 a[LIST], b[LIST], out[LIST];
    i64 a_pitch[LIST], b_pitch[LIST], out_pitch[LIST];   // bytes
};

struct Tile {
    const char *a, *b;          // first elements of the group
    i64 a_pitch, b_pitch;       // bytes between lines of the contiguous direction
    int m, n, k, i0, j0, group;
    int first, last;            // rows that count; the others are not stored, or zeroed
};

typedef LinesOf<BM, A_K, A_ODD>::Type SideA;
typedef LinesOf<BN, B_K, B_ODD>::Type SideB;
constexpr int A_TILE = SideA::SIZE, B_TILE = SideB::SIZE, RING_BYTES = STAGES * (A_TILE + B_TILE) * 2, STAGED_PITCH = COLS + 4;
static_assert(SHARED >= RING_BYTES && SHARED >= THREADS / 32 * 16 * STAGED_PITCH * 4, "shared memory of the launch");

__device__ __forceinline__ void load_stage(const Tile& t, const SideA& a, const SideB& b, u32 ring, int kb) {
    const u32 stage = ring + kb % STAGES * (A_TILE + B_TILE) * 2;
    const int m = t.m - t.i0, n = t.n - t.j0, k = t.k - kb * BK;
    if (m >= BM && n >= BN && k >= BK) a.load(stage, kb, true, t.a, m, k), b.load(stage + A_TILE * 2, kb, true, t.b, n, k);
    else a.load(stage, kb, false, t.a, m, k), b.load(stage + A_TILE * 2, kb, false, t.b, n, k);
}

__device__ __forceinline__ void multiply(const SideA& a, const SideB& b, const u16* stage, float (&acc)[MI][NJ][4]) {
    const int warp = threadIdx.x >> 5, m0 = (warp & 1) * (BM / 2), n0 = (warp >> 1) * COLS;
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
        u32 fa[MI][4], fb[NJ / 2][4];
#pragma unroll
        for (int i = 0; i < MI; ++i) a.rows(fa[i], stage, m0 + i * 16, k);
#pragma unroll
        for (int j = 0; j < NJ / 2; ++j) b.columns(fb[j], stage + A_TILE, n0 + j * 16, k);
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                if (BFLOAT) mma_bf16(acc[i][j], fa[i], fb[j >> 1] + (j & 1) * 2);
                else mma_f16(acc[i][j], fa[i], fb[j >> 1] + (j & 1) * 2);
            }
    }
}

// The group of tile number `number` along the jagged direction, and its first row or column there.
// A warp looks at 32 groups at a time. False past the last tile; `at` is then the number of tiles.
__device__ __forceinline__ bool find_jagged(const Problem& p, int number, int side, int& group, int& start, int& end, int& at) {
    const int lane = threadIdx.x & 31;
    int before = 0;
    for (int first = 0; first < p.groups; first += 32) {
        i64 low = 0, high = 0;
        if (first + lane < p.groups) jagged_span(p, first + lane, low, high);
        const int mine = (int(high - low) + side - 1) / side;
        int upto = mine;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int other = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += other;
        }
        const u32 reached = __ballot_sync(~0u, number < before + upto);
        if (reached) {
            const int who = __ffs(reached) - 1;
            group = first + who;
            start = __shfl_sync(~0u, int(low), who), end = __shfl_sync(~0u, int(high), who);
            at = (number - before - __shfl_sync(~0u, upto - mine, who)) * side;
            return true;
        }
        before += __shfl_sync(~0u, upto, 31);
    }
    at = before;
    return false;
}

// Rows or columns before the first group and after the last one, by the blocks that have no tile: there is
// always one, for the grid has room for a part of a tile more per group than `tiles` can be.
__device__ __forceinline__ void zero_ends(const Problem& p, int tiles) {
    const i64 block = i64(blockIdx.y - tiles) * gridDim.x + blockIdx.x, blocks = i64(gridDim.y - tiles) * gridDim.x;
    zero_unowned(p, block * (THREADS / 32) + threadIdx.x / 32, blocks * (THREADS / 32));
}

__device__ __forceinline__ void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Fills in a tile and where its group's results start; false if this block has none.
#if LISTED
__device__ __forceinline__ bool find_tile(const Problem& p, const Listed& l, Tile& t, char*& out, i64& out_pitch) {
    int g = -1;
#pragma unroll
    for (int i = 0; i < LIST; ++i) g += int(blockIdx.x) >= l.first[i];
    const int local = blockIdx.x - l.first[g], across = l.across[g], down = local / across;
    t.group = g, t.m = l.m[g], t.n = l.n[g], t.k = p.read_ab ? l.k[g] : 0, t.i0 = down * BM, t.j0 = (local - down * across) * BN;
    t.a = (const char*)l.a[g], t.b = (const char*)l.b[g], t.a_pitch = l.a_pitch[g], t.b_pitch = l.b_pitch[g];
    out = (char*)l.out[g], out_pitch = l.out_pitch[g];
    t.first = 0, t.last = t.m;
    return true;
}
#else
__device__ __forceinline__ bool find_tile(const Problem& p, Tile& t, char*& out, i64& out_pitch) {
    int start = 0, end = 0;
    t.m = int(p.m), t.n = int(p.n), t.k = int(p.k);
    i64 sm = 0, sn = 0, sk = 0;
    if (p.jagged != JAG_NONE || p.valid) wait_for_last_launch();
    if (PLAIN && p.jagged == JAG_M && p.b.group == 0) {       // one B for all: where groups meet does not matter
        i64 first, last, unused;
        jagged_span(p, 0, first, unused), jagged_span(p, p.groups - 1, unused, last);
        t.group = 0, t.i0 = blockIdx.y * BM, t.j0 = blockIdx.x * BN, t.first = int(first), t.last = int(last);
        if (t.i0 >= t.m) return false;
    } else if (p.jagged == JAG_M || p.jagged == JAG_N) {
        const bool rows = p.jagged == JAG_M;
        int at;
        if (!find_jagged(p, blockIdx.y, rows ? BM : BN, t.group, start, end, at)) {
            if (p.zero_unowned) zero_ends(p, at);
            return false;
        }
        (rows ? t.i0 : t.j0) = at;
        (rows ? t.j0 : t.i0) = blockIdx.x * (rows ? BN : BM);
        (rows ? t.m : t.n) = end - start, (rows ? sm : sn) = start;
        t.first = 0, t.last = t.m;
    } else {
        t.group = blockIdx.z, t.i0 = blockIdx.y * BM, t.j0 = blockIdx.x * BN, t.first = 0, t.last = t.m;
        if (p.jagged == JAG_K) {
            i64 low, high;
            jagged_span(p, t.group, low, high);
            t.k = int(high - low), sk = low;
        } else if (p.valid) {
            t.last = int(valid_rows(p, t.group));
            if (t.i0 >= t.last) t.k = 0;
        }
    }
    if (!p.read_ab) t.k = 0;
    const i64 g = t.group;
    t.a = p.a.ptr + (g * p.a.group + sm * p.a.row + sk * p.a.col) * 2;
    t.b = p.b.ptr + (g * p.b.group + sk * p.b.row + sn * p.b.col) * 2;
    t.a_pitch = (A_K ? p.a.row : p.a.col) * 2, t.b_pitch = (B_K ? p.b.col : p.b.row) * 2;
    out = p.out.ptr + (g * p.out.group + sm * p.out.row + sn * p.out.col) * size_of(p.out_type), out_pitch = p.out.row * 2;
    return true;
}
#endif

__device__ __forceinline__ void store_plain(const Problem& p, const Tile& t, char* out, i64 pitch, const float (&acc)[MI][NJ][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row = t.i0 + (warp & 1) * (BM / 2) + (lane >> 2), col = t.j0 + (warp >> 1) * COLS + (lane & 3) * 2;
    const float alpha = float(p.alpha);
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + i * 16 + h * 8;
            const bool counts = r >= t.first && r < t.last;
            char* line = out + r * pitch + col * 2;
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                const int left = r < t.m && (counts || p.zero_unowned) ? t.n - col - j * 8 : 0;
                const float low = counts ? acc[i][j][h * 2] * alpha : 0.0f, high = counts ? acc[i][j][h * 2 + 1] * alpha : 0.0f;
                const u32 pair = BFLOAT ? pack_bf16(low, high) : pack_f16(low, high);
                if (PAIRS && left > 1) {
                    *(u32*)(line + j * 16) = pair;
                } else {
                    if (left > 0) *(u16*)(line + j * 16) = u16(pair);
                    if (left > 1) *(u16*)(line + j * 16 + 2) = u16(pair >> 16);
                }
            }
        }
}

// Any other epilogue: 16 rows at a time through the warp's own piece of shared memory.
__device__ __forceinline__ void store_any(const Problem& p, const Tile& t, char* shared, const float (&acc)[MI][NJ][4]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* staged = (float*)shared + warp * 16 * STAGED_PITCH;
    const Group g = resolve(p, t.group, 2);
    __syncthreads();                            // the ring is done with
#pragma unroll
    for (int i = 0; i < MI; ++i) {
#pragma unroll
        for (int j = 0; j < NJ; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *(float2*)(staged + ((lane >> 2) + h * 8) * STAGED_PITCH + j * 8 + (lane & 3) * 2) = make_float2(acc[i][j][h * 2], acc[i][j][h * 2 + 1]);
        __syncwarp();
        emit<float>(p, g, staged, 16, COLS, STAGED_PITCH, t.i0 + (warp & 1) * (BM / 2) + i * 16, t.j0 + (warp >> 1) * COLS);
        __syncwarp();
    }
}

// The part of a tile past the rows of a mask that count.
__device__ __forceinline__ void zero_rows(const Problem& p, const Tile& t) {
    const int from = max(t.i0, t.last), rows = min(t.i0 + BM, t.m) - from, size = size_of(p.out_type);
    if (!p.zero_unowned || rows <= 0) return;
    char* const at = p.out.ptr + (i64(t.group) * p.out.group + from * p.out.row + t.j0 * p.out.col) * size;
    zero_block(at, rows, min(BN, t.n - t.j0), p.out.row, p.out.col, size, threadIdx.x / 32, THREADS / 32);
}

#if LISTED
extern "C" __global__ void __launch_bounds__(THREADS, BM == 32 ? 6 : 3) small(const __grid_constant__ Problem p, const __grid_constant__ Listed l) {
#else
extern "C" __global__ void __launch_bounds__(THREADS, BM == 32 ? 6 : 3) small(const __grid_constant__ Problem p) {
#endif
    extern __shared__ __align__(16) char shared[];
    const u32 ring = shared_address(shared);
    Tile t;
    char* out;
    i64 out_pitch;
#if LISTED
    const bool mine = find_tile(p, l, t, out, out_pitch);
#else
    const bool mine = find_tile(p, t, out, out_pitch);
#endif
    if (mine) {
        t.a += A_K ? t.i0 * t.a_pitch : i64(t.i0) * 2;
        t.b += B_K ? t.j0 * t.b_pitch : i64(t.j0) * 2;
        const int blocks = (t.k + BK - 1) / BK;
        SideA a;
        SideB b;
        a.begin(t.a, t.a_pitch), b.begin(t.b, t.b_pitch);
        asm volatile("" : "+l"(out), "+l"(out_pitch));
#if __CUDA_ARCH__ >= 900
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");         // not before: its blocks would be in the way
#endif
        wait_for_last_launch();
#pragma unroll
        for (int kb = 0; kb < STAGES; ++kb) {
            if (kb < blocks) load_stage(t, a, b, ring, kb);
            commit_copies();
        }
        float acc[MI][NJ][4];
#pragma unroll
        for (int e = 0; e < MI * NJ * 4; ++e) ((float*)acc)[e] = 0.0f;
        for (int kb = 0; kb < blocks; ++kb) {
            wait_for_copies<STAGES - 1>();
            __syncthreads();                    // block kb is there for all
            multiply(a, b, (const u16*)shared + kb % STAGES * (A_TILE + B_TILE), acc);
            if (kb + STAGES < blocks) {
                __syncthreads();                // and done with by all
                load_stage(t, a, b, ring, kb + STAGES);
            }
            commit_copies();
        }
        if (PLAIN) store_plain(p, t, out, out_pitch, acc);
        else store_any(p, t, shared, acc), zero_rows(p, t);
    }
}
