// The fast kernel for float8 on Hopper (sm_90a): hopper.cu with operands of one byte, whose contiguous direction is k. A stage
// has 128 of k, in lines of 128 bytes as there. What differs: sums are promoted after each stage (consume_fp8.cuh), and a third
// warp loads the scales of the rows and columns into the stage that they belong to.
//
// Compile-time choices beside those of hopper.cu: W_E5M2 and X_E5M2 (which float8), BLOCK_SCALES (scales differ from one
// block of k to the next; else they are applied to a tile's last stage), W_LINES (columns of a tile have scales of their own).
#define ELEMENT 1
#define LOADERS 3
#define X_K 1
#define W_K 1
#define RAGGED_K 0
#define LISTED 0
#define PINGPONG 0
#define MOST_GROUPS (TILE_COLUMNS > 128 ? 448 : 960)
#define LATE (SEND && ROWS <= 128 && TILE_COLUMNS == 128)          // registers for a tile's packed results beside two sets of sums
#define HALVES_LAST (CLUSTER == 2)
#define EVEN (ROWS <= 128)                                         // as stage_bytes has it
#include "announce.cuh"
#include "consume_fp8.cuh"
#include "load.cuh"
#include "scales.cuh"

constexpr int SCALES_BYTES = PLACES * STAGE_SCALES * 4;
static_assert(SHARED_BYTES + SCALES_BYTES <= SHARED, "a launch asks for less shared memory than the layout takes");
constexpr int REGISTERS = 224, LOADING_REGISTERS = 56;

// The scales of both sides, of which both count lines as tensor maps count them: along a jagged extent from its start.
struct SideGrids { Grid x, w; i64 columns; };      // columns of the weight side

__device__ __forceinline__ void copy_number(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Where the scales of a lane's lines stand, of which it has every 32nd, and how far the next block's are: what a tile fixes is
// worked out before its loop over k, since one warp copies the scales of all stages.
template <int LINES> struct ScaleLines {
    static constexpr int COUNT = (LINES + 31) / 32;
    const char* at[COUNT];
    i64 step;
    int left;                       // lines from this lane's first one on

    // `apart`: columns or rows from one line to the next.
    __device__ __forceinline__ void begin(const GroupGrid& g, int lines, int apart) {
        const int lane = threadIdx.x & 31;
        step = g.k_shift < WHOLE_K ? g.k * 4 : 0, left = (g.ptr ? lines : 0) - lane;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) at[j] = entry_of(g, min(lane + j * 32, max(lines - 1, 0)) * apart, 0);
    }
    // `to`: of this lane's first line; lines of a stage are 4 bytes apart.
    __device__ __forceinline__ void copy(u32 to) const {
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
            if (j * 32 < left) copy_number(to + j * 128, at[j]);
    }
    __device__ __forceinline__ void next() {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) at[j] += step;
    }
};

// A warp's lanes copy the scales of 32 lines at a time; without blocks of k those of a tile's last stage only. Lines that do
// not exist keep what was there: their sums are never stored. So do sides without a scale: ones.
__device__ __forceinline__ void load_scales(const SideGrids& grids, Shared& s, u32 scales, u32 rank) {
    const int lane = threadIdx.x & 31;
    Ring ring;
    Room room;
#pragma unroll 1
    for (int number = 0;; ++number) {
        const Tile t = take_tile(s, number, ~0u);
        if (t.n == STOP) break;
        const int blocks = k_blocks(t);
        const u32 bytes = stage_bytes(t);
        const i64 col = first_column(t, rank, 0);
        ScaleLines<ROWS> x;
        ScaleLines<COLUMN_SCALES> w;
        x.begin(grid_of_group(grids.x, t.group, t.x_row, JAGGED_K ? t.extra : 0), t.rows, 1);
        w.begin(grid_of_group(grids.w, t.group, col, JAGGED_K ? t.extra : 0), int(max64(min64(ceil_div(grids.columns - col, SCALED_COLUMNS), COLUMN_SCALES), 0)), SCALED_COLUMNS);
        if (blocks > 0) ring.fit(bytes);
#pragma unroll 1
        for (int kb = 0; kb < blocks; ++kb, ring.next(bytes)) {
            room.take(s, s.begins[2], ring, bytes);
            __syncwarp();                               // no lane runs ahead and writes over what others still read of the ring
            const u32 to = scales + ring.place * STAGE_SCALES * 4;
            if (BLOCK_SCALES || kb == blocks - 1) {
                x.copy(to + row_slot(lane) * 4);
                w.copy(to + (ROWS + lane) * 4);
                x.next(), w.next();
            }
            arrive_when_copied(shared_address(&s.full[ring.place]));
        }
    }
    if (CLUSTER > 1) room.wait_for_all(s, ring);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
hopper_fp8(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ SideGrids grids, const __grid_constant__ Maps maps) {
    extern __shared__ char raw[];
    const u32 stages = (shared_address(raw) + 1023) & ~1023u;
    const u32 staging = stages + RING_BYTES, scales = staging + CONSUMERS * STAGING_BYTES;
    Shared& s = *(Shared*)(raw + (scales - shared_address(raw)) + SCALES_BYTES);
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp >> 2;      // known to be the same for a whole warp

    make_ready(s, maps, warp, 2 + 32);          // weights, rows, each lane that copies scales
    for (int i = threadIdx.x; i < SCALES_BYTES / 4; i += THREADS) store_shared(scales + i * 4, 1.0f);
    __syncwarp();
    start_next_launch();
    wait_for_last_launch();
    if (CLUSTER > 1) cluster_arrive();
    build_schedule(p, s.schedule, l.swapped, CLUSTER_ROWS, CLUSTER_COLUMNS, l.busy_rows);
    __syncthreads();
    if (CLUSTER > 1) cluster_wait();

    if (warpgroup == CONSUMERS) {
        registers_down<LOADING_REGISTERS>();
        const int role = warp - CONSUMERS * 4;
        if (role == 0) load_weights(p, l, maps, s, stages, rank);
        else if (role == 1) load_rows(p, l, maps, s, stages, rank);
        else if (role == 2) {
            if ((threadIdx.x & 31) == 0) announce_tiles(p, l, s, rank);
        } else {
            load_scales(grids, s, scales, rank);
            if (p.zero_unowned) zero_unowned(p, blockIdx.x, gridDim.x);
        }
        __syncwarp();
    } else {
        registers_up<REGISTERS>();
        consume_fp8(p, l, maps, s, stages, scales, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
    }
}
