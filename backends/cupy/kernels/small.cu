// Small problems of 16-bit operands: one thread block per tile, and nothing that takes time besides.
//
// A small product is a chain of latencies: launch, one trip to memory, a few products, one trip back. So
// there is no schedule, no counter and no tensor map; addresses are worked out before the launch before this one is over,
// unless sizes in memory decide them; all of k (up to STAGES blocks of 64) is asked for at once by cp.async, and results
// leave straight from the registers. sm_80 and later.
//
// Compile-time choices: BFLOAT, A_K and B_K (is k the contiguous direction), TILE_M, TILE_N, LISTED (a
// list's groups come as an argument), A_ODD and B_ODD (do lines begin anywhere), DEPTH (blocks of k in
// flight), PLAIN (alpha * acc in the operands' type, rows contiguous), PAIRS (of results, at addresses that are
// multiples of 4).
#include "epilogue.cuh"
#include "tensor_cores.cuh"

constexpr int BM = TILE_M, BN = TILE_N, BK = 64, STAGES = DEPTH, WARPS_N = BN / 16, THREADS = WARPS_N * 64;
constexpr int COLS = BN / WARPS_N, MI = BM / 32, NJ = COLS / 8;      // columns, and products of m16n8, of each of 2 x WARPS_N warps

// ---- An operand's way: by cp.async into a stage of the ring, block of k by block, and on into registers.
//
// A line lies along the contiguous direction of memory, and so in a stage. What each thread copies is worked out once; what
// lies past an edge arrives as zeros. The k-blocks' size BK and the number of THREADS are the kernel's.

// Lines that begin at multiples of 16 bytes: as they are, and by ldmatrix into registers.
template <int MN, bool CONTIG_K>
struct EvenLines {
    static constexpr int LINE = (CONTIG_K ? BK : MN) / 8, LINES = THREADS / LINE;    // pieces of a line; lines that all threads take at once
    static constexpr int PIECES = MN * BK / 8 / THREADS, PITCH = (CONTIG_K ? BK : MN) + 8, SIZE = (CONTIG_K ? MN : BK) * PITCH;
    const char* from;
    i64 lines, next;            // bytes from one of this thread's lines to the next one, from block to block
    u32 to;

    __device__ __forceinline__ void begin(const char* base, i64 pitch) {
        const u32 across = threadIdx.x / LINE, along = threadIdx.x % LINE;
        from = base + across * pitch + along * 16, to = across * PITCH * 2 + along * 16;
        lines = LINES * pitch, next = CONTIG_K ? BK * 2 : BK * pitch;
        asm volatile("" : "+l"(from), "+l"(lines), "+l"(next), "+r"(to));            // here: the compiler may not put it off
    }
    // `left`: elements of mn and of k that exist from the tile's and the block's first one on; what lies outside arrives as zeros.
    __device__ __forceinline__ void load(u32 stage, int kb, bool inside, const char* base, int mn_left, int k_left) const {
        const int line = threadIdx.x / LINE, along = threadIdx.x % LINE * 8;
        const char* at = from + kb * next;
#pragma unroll
        for (int c = 0; c < PIECES; ++c, at += lines) {
            const u32 there = stage + to + c * LINES * PITCH * 2;
            const int across = line + c * LINES;
            const int left = CONTIG_K ? (across < mn_left ? k_left - along : 0) : (across < k_left ? mn_left - along : 0);
            const int bytes = min(max(left, 0), 8) * 2;
            if (inside) copy_async(there, at);
            else copy_async(there, bytes ? at : base, bytes);
        }
    }
    __device__ __forceinline__ void rows(u32 (&r)[4], const u16* stage, int m, int k) const {
        load_a<CONTIG_K, PITCH>(r, stage, m, k);
    }
    __device__ __forceinline__ void columns(u32 (&r)[4], const u16* stage, int n, int k) const {
        load_b<CONTIG_K, PITCH>(r, stage, n, k);
    }
};

// Lines that begin at any element: the aligned pieces of 16 bytes that hold them, so that a line begins up to 14 bytes behind
// its place in the stage. Eight lines on, and a block of k on, it is as many: they are multiples of 16 bytes away.
template <int MN, bool CONTIG_K>
struct OddLines {
    static constexpr int ALONG = CONTIG_K ? BK : MN, LINES = CONTIG_K ? MN : BK, LINE = ALONG / 8 + 1, PITCH = LINE * 8;
    static constexpr int PIECES = (LINES * LINE + THREADS - 1) / THREADS, SIZE = LINES * PITCH;     // of a line and a stage: elements
    const char* from[PIECES];   // this thread's pieces of the first block
    int ahead[PIECES];          // bytes from each to its line's begin
    i64 next;
    u32 low, high;              // places in a stage of the two elements of a register, if it is the first of a tile's

    static __device__ __forceinline__ int number(int c) { return threadIdx.x + c * THREADS; }

    __device__ __forceinline__ void begin(const char* base, i64 pitch) {
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            const char* const line = base + number(c) / LINE * pitch;
            const int piece = number(c) % LINE * 16, past = int(u64(line) & 15);
            from[c] = line - past + piece, ahead[c] = past - piece;
            asm volatile("" : "+l"(from[c]), "+r"(ahead[c]));
        }
        next = CONTIG_K ? BK * 2 : BK * pitch;
        const u32 eighth = (threadIdx.x & 31) >> 2, two = (threadIdx.x & 3) * 2;
        const auto place = [&](u32 line, u32 along) { return line * PITCH + ((u32(u64(base)) + line * u32(pitch)) & 15) / 2 + along; };
        low = CONTIG_K ? place(eighth, two) : place(two, eighth), high = CONTIG_K ? low + 1 : place(two + 1, eighth);
        asm volatile("" : "+l"(next), "+r"(low), "+r"(high));
    }
    __device__ __forceinline__ void load(u32 stage, int kb, bool, const char* base, int mn_left, int k_left) const {
        const int lines = CONTIG_K ? mn_left : k_left, bytes = min(CONTIG_K ? k_left : mn_left, ALONG) * 2;
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            if (LINES * LINE % THREADS && c == PIECES - 1 && number(c) >= LINES * LINE) break;
            const int exist = number(c) / LINE < lines ? min(max(ahead[c] + bytes, 0), 16) : 0;
            copy_async(stage + number(c) * 16, exist ? from[c] + kb * next : (const char*)(u64(base) & ~15ull), exist);
        }
    }
    // Neighbours along k, 8 x 8 blocks away from the first ones.
    __device__ __forceinline__ u32 pair(const u16* stage, int mn, int k) const {
        const int away = CONTIG_K ? mn * PITCH + k : k * PITCH + mn;
        return stage[low + away] | u32(stage[high + away]) << 16;
    }
    __device__ __forceinline__ void rows(u32 (&r)[4], const u16* stage, int m, int k) const {
        r[0] = pair(stage, m, k), r[1] = pair(stage, m + 8, k), r[2] = pair(stage, m, k + 8), r[3] = pair(stage, m + 8, k + 8);
    }
    __device__ __forceinline__ void columns(u32 (&r)[4], const u16* stage, int n, int k) const {
        r[0] = pair(stage, n, k), r[1] = pair(stage, n, k + 8), r[2] = pair(stage, n + 8, k), r[3] = pair(stage, n + 8, k + 8);
    }
};

template <int MN, bool CONTIG_K, bool ODD> struct LinesOf { typedef EvenLines<MN, CONTIG_K> Type; };
template <int MN, bool CONTIG_K> struct LinesOf<MN, CONTIG_K, true> { typedef OddLines<MN, CONTIG_K> Type; };

// ---- The kernel ----


constexpr int LIST = 16;                       // as support.MAX_LISTED_GROUPS
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
                const u32 pair = pack_pair(low, high);
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
        start_next_launch();                    // not before: its blocks would be in the way
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
