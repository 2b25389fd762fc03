// The fast kernel for quantised weights under 16-bit activations on Hopper (sm_90a): hopper.cu whose weights pass through
// registers. Stages hold their codes as they are in memory, with k contiguous: DEEP times 64 of k in W_BOXES boxes. Each consumer
// turns its columns' codes into numbers (weights.cuh), and wgmma takes them from there. So memory and the copy engine move codes
// alone.
//
// Scales multiply the weights where that is exact (FOLD: powers of two under bfloat16), else the sums of their block of k, in
// float32, before they join the tile's sums; scales that hold for all of k are applied to those at the end.
#define W_LINE ((W_CODE >= 8 ? 32 : 64) * DEEP / W_BOXES)
#define W_SHIFT (W_CODE >= 8 ? 1 : 0)
#define X_K 1
#define W_K 1
#define RAGGED_K 0
#define LISTED 0
#define PINGPONG 0
#define LATE 0
#define HALVES_LAST (CLUSTER == 2)
#if LOW
#define MOST_GROUPS 640         // as config.LOW_GROUPS
#endif
#include "announce.cuh"
#include "load.cuh"
#include "mma_weights.cuh"
#include "scales.cuh"

// The weights' scales and zero points, and how many columns there are.
struct WeightGrids { Grid scale, zero; i64 columns; };

#include "weights.cuh"

// Registers j * 4 + i hold columns i / 2 of a thread's two.
template <int N, class Change> __device__ __forceinline__ void for_columns(float low, float high, Change change) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) change(i, i & 2 ? high : low);
}

#if LOW
#include "few_rows.cuh"
#else
// Which of a stage's numbers belong to a quarter of a piece of 64 of k.
__device__ __forceinline__ constexpr int block_of(int piece, int quarter) {
    return SCALE_K == 32 ? piece * 2 + quarter / 2 : SCALE_K == 64 ? piece : SCALE_K == 128 ? piece / 2 : 0;
}

// The products of one stage, whose numbers are those of a slot; `odd`: the second half of 128 of k, `last`: of the tile.
template <int N>
__device__ __forceinline__ void multiply_stage(u32 stage, int half, u32 place, const Numbers& numbers, int slot, bool odd, bool last, float (&total)[ACCUMULATORS], float (&part)[PARTS ? N / 2 : 1]) {
    const bool large = AT_ONCE_LIFTED && numbers.large(slot);
#pragma unroll
    for (int piece = 0; piece < DEEP; ++piece) {
        const u64 x = smem_descriptor(stage + W_BYTES + piece * (ROWS * LINE_BYTES), BLOCK, 1024);
        Codes codes;
        codes.load(stage, half, piece);
        u32 w[4][4];
        const auto turn = [&](int k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                w[k][i] = codes.pair(k, i, place);
                if (W_CODE == CODE_E2M1 && !AT_ONCE_LIFTED) w[k][i] = multiply_pairs(w[k][i], LIFT);
                if (ZEROS) w[k][i] = subtract_pairs(w[k][i], numbers.zeros(slot, i & 1, block_of(piece, k)));
                if (FOLD) w[k][i] = multiply_pairs(w[k][i], factor_of(numbers.scale[i & 1].code(slot, block_of(piece, k))));
            }
        };
        // A quarter is multiplied while the next one is turned, but where large scales take another way for all of them.
        constexpr bool QUARTERS = !AT_ONCE_LIFTED;
        if (!QUARTERS) {
#pragma unroll
            for (int k = 0; k < 4; ++k) turn(k);
        }
        if (large) {
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 code = numbers.scale[i & 1].code(slot, block_of(piece, k));
                    w[k][i] = multiply_pairs(multiply_pairs(codes.pair(k, i, place), factor_of(min(code, 127u))), rest_of(code));
                }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            // Of a block's sums the first product starts anew, and behind the last one they join the tile's.
            const bool first_half = DEEP == 1 ? !odd : (piece & 1) == 0;
            const int begins = SCALE_K == 128 ? k == 0 && first_half : SCALE_K == 64 ? k == 0 : (k & 1) == 0;
            if (QUARTERS) turn(k);
            if (QUARTERS || k == 0) wgmma_fence();
            if constexpr (PARTS) MmaWeights<N>::run(part, w[k], x + k * (32 >> 4), !begins);
            else MmaWeights<N>::run(total, w[k], x + k * (32 >> 4), 1);
            if (k == 3 || (PARTS && SCALE_K == 32 && k == 1)) {
                wgmma_commit();
                if constexpr (PARTS) {
                    wgmma_wait<0>();
                    settle(part, N / 2);
                    const int block = block_of(piece, k);
                    if (SCALE_K <= 64 || !first_half || (DEEP == 1 && last))
                        for_columns<N>(numbers.factor(slot, 0, block), numbers.factor(slot, 1, block), [&](int i, float scale) { total[i] = fmaf(scale, part[i], total[i]); });
                }
            }
        }
    }
    if (!PARTS) wgmma_wait<0>();
    settle(total, N / 2);
}

// All k-blocks of a tile. While one warpgroup turns codes into numbers, the other one multiplies.
template <int N>
__device__ __forceinline__ void multiply_weights(Shared& s, u32 stages, Ring& ring, int blocks, u32 bytes, int half, float (&total)[ACCUMULATORS], Numbers& numbers) {
    const int lane = threadIdx.x & 31;
    u32 place = place_of_byte(lane & 3);
    keep_in_register(place);
    float part[PARTS ? N / 2 : 1];
    if (PARTS) clear(part);
#pragma unroll 1
    for (int first = 0; first < blocks; first += AHEAD) {
#pragma unroll
        for (int slot = 0; slot < AHEAD; ++slot) {
            const int kb = first + slot;
            if (kb >= blocks) break;
            barrier_wait(shared_address(&s.full[ring.place]), ring.parity);
            multiply_stage<N>(stages + ring.at, half, place, numbers, slot, AHEAD == 1 ? kb & 1 : slot & 1, kb == blocks - 1, total, part);
            __syncwarp();                               // all lanes have their codes: what follows lets others write over them
            if (lane < CLUSTER) barrier_arrive(shared_address(&s.empty[ring.place]), lane);
            ring.next(bytes);
            numbers.ask(slot, kb + AHEAD);
        }
    }
    if (SCALE_K == 0) for_columns<N>(numbers.factor(0, 0, 0), numbers.factor(0, 1, 0), [&](int i, float scale) { total[i] *= scale; });
}

// The first of a thread's two columns.
__device__ __forceinline__ i64 column_of(const Tile& t, u32 rank, int half) {
    return first_column(t, rank, half) + ((threadIdx.x & 127) >> 5) * 16 + ((threadIdx.x & 31) >> 2);
}

__device__ __forceinline__ void consume_weights(const Problem& p, const Launch& l, const WeightGrids& grids, const Maps& maps, Shared& s, u32 stages, u32 staging, u32 rank, int half) {
    Ring ring;
    int taken = 0;
    Tile next = take_tile(s, taken++, ~0u);
    bool first = true;
#pragma unroll 1
    while (next.n != STOP) {
        const Tile t = next;
        const int blocks = k_blocks(t);
        const u32 bytes = ring.begin(t, blocks);
        float total[ACCUMULATORS];
        clear(total);
        if (blocks > 0) {
            if (first && half == 1) wait_for_other(half);       // apart from the start, so that they take turns
            if (first && half == 0) let_other(half);
            first = false;
            Numbers numbers;
            numbers.begin(grid_of_group(grids.scale, t.group, 0, 0), grid_of_group(grids.zero, t.group, 0, 0), column_of(t, rank, half), grids.columns, t.k_len);
            BY_WIDTH(t.n, multiply_weights<WIDTH>(s, stages, ring, blocks, bytes, half, total, numbers));
        }
#if SEND
        send_tile(p, maps, t, rank, half, staging, total);
#else
        finish_tile(p, l, t, rank, half, staging, total);
#endif
        next = take_tile(s, taken++, ~0u);
    }
#if SEND
    wait_until_written();
#endif
}
constexpr int NUMBERS_BYTES = 0;                        // a thread reads them itself
#endif

constexpr int ALL_NUMBERS_BYTES = 2 * NUMBERS_BYTES;
static_assert(SHARED_BYTES + ALL_NUMBERS_BYTES <= SHARED, "a launch asks for less shared memory than the layout takes");

// Registers of a thread that multiplies, and of one that does not: together those of all threads at the launch.
constexpr int OWN_REGISTERS = LOW ? 88 : 224, LOADER_REGISTERS = LOW ? 64 : 56;

extern "C" __global__ void __launch_bounds__(THREADS, LOW ? 2 : 1)
hopper_weights(const __grid_constant__ Problem p, const __grid_constant__ Launch l, const __grid_constant__ WeightGrids grids, const __grid_constant__ Maps maps) {
    extern __shared__ char raw[];
    const u32 stages = (shared_address(raw) + 1023) & ~1023u;
    const u32 staging = stages + RING_BYTES;
    Shared& s = *(Shared*)(raw + (staging - shared_address(raw)) + CONSUMERS * STAGING_BYTES + ALL_NUMBERS_BYTES);
#if LOW
    const u32 numbers = staging + CONSUMERS * STAGING_BYTES;
#endif
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp >> 2;      // known to be the same for a whole warp

    make_ready(s, maps, warp, 2);               // weights, and rows that came or were handed on
#if LOW
    if (!grids.scale.ptr) {
#pragma unroll 1
        for (int i = threadIdx.x; i < ALL_NUMBERS_BYTES / 4; i += THREADS) store_shared(numbers + i * 4, 1.0f);
    }
#endif
    __syncwarp();
    start_next_launch();
    wait_for_last_launch();
    if (CLUSTER > 1) cluster_arrive();
    build_schedule(p, s.schedule, l.swapped, CLUSTER_ROWS, CLUSTER_COLUMNS, l.busy_rows);
    __syncthreads();
    if (CLUSTER > 1) cluster_wait();

    if (warpgroup == CONSUMERS) {
        registers_down<LOADER_REGISTERS>();
        const int role = warp - CONSUMERS * 4;
        if (role == 0) load_weights(p, l, maps, s, stages, rank);
#if LOW
        else if (role == 1) load_rows(p, l, maps, s, stages, rank, LoadedNumbers(grids, numbers));
#else
        else if (role == 1) load_rows(p, l, maps, s, stages, rank);
#endif
        else if (role == 2) {
#if LOW
            announce_few(p, l, s);
#else
            if ((threadIdx.x & 31) == 0) announce_tiles(p, l, s, rank);
#endif
        } else {
#if LOW
            arrange_rows(s, stages);
#endif
            if (p.zero_unowned) zero_unowned(p, blockIdx.x, gridDim.x);
        }
        __syncwarp();
    } else {
        registers_up<OWN_REGISTERS>();
#if LOW
        consume_few(p, l, grids, maps, s, stages, numbers, staging + warpgroup * STAGING_BYTES, warpgroup);
#else
        consume_weights(p, l, grids, maps, s, stages, staging + warpgroup * STAGING_BYTES, rank, warpgroup);
#endif
    }
}
