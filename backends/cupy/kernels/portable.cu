// The kernel that is right everywhere: any form, strides, alignment, size and dtype, on sm_80 and later.
//
// KIND picks the arithmetic (16-bit and tf32 on tensor cores through mma.sync; fp32, fp64 and int8 on
// the ordinary cores); A_K and B_K say whether k is the contiguous direction of A and of B. Thread
// blocks stay resident and take tiles in turn; each tile loads k-blocks through registers into two
// shared-memory buffers, so the loads of one block overlap the products of the block before.
#include "epilogue.cuh"
#include "tile_load.cuh"

#define KIND_F16 0
#define KIND_BF16 1
#define KIND_TF32 2
#define KIND_F32 3
#define KIND_F64 4
#define KIND_I8 5

#if KIND == KIND_F16 || KIND == KIND_BF16
typedef u16 Element;
typedef float Acc;
constexpr int BM = 128, BN = 128, BK = 32;
#elif KIND == KIND_TF32
typedef float Element;
typedef float Acc;
constexpr int BM = 128, BN = 128, BK = 16;
#elif KIND == KIND_F32
typedef float Element;
typedef float Acc;
constexpr int BM = 128, BN = 128, BK = 16;
#elif KIND == KIND_F64
typedef double Element;
typedef double Acc;
constexpr int BM = 64, BN = 64, BK = 16;
#else
typedef signed char Element;
typedef int Acc;
constexpr int BM = 64, BN = 64, BK = 64;
#endif
constexpr int THREADS = 256;
constexpr bool TENSOR_CORES = KIND <= KIND_TF32;

#if KIND <= KIND_TF32
// Each warp owns 64 x 32 of the 128 x 128 tile: 4 x 4 products of m16n8. Pitches are padded so that
// eight rows of 16 bytes fall into different banks.
constexpr int PAD = 16 / sizeof(Element);
constexpr int A_PITCH = A_K ? BK + (KIND == KIND_TF32 ? 4 : PAD) : BM + 8, B_PITCH = B_K ? BK + (KIND == KIND_TF32 ? 4 : PAD) : BN + 8;
constexpr int A_TILE = (A_K ? BM : BK) * A_PITCH, B_TILE = (B_K ? BN : BK) * B_PITCH;

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const void* p, bool transposed) {
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

__device__ __forceinline__ void mma(float (&d)[4], const u32* a, const u32* b) {
#if KIND == KIND_TF32
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#elif KIND == KIND_F16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ u32 tf32(Element x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"((float)x));
    return y;
}

struct Compute {
    float acc[4][4][4];

    __device__ __forceinline__ void step(const Element* a, const Element* b) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, m0 = (warp & 1) * 64, n0 = (warp >> 1) * 32;
#if KIND == KIND_TF32
        const int row = lane >> 2, col = lane & 3;
#define A_AT(m, k) tf32(A_K ? a[(m) * A_PITCH + (k)] : a[(k) * A_PITCH + (m)])
#define B_AT(n, k) tf32(B_K ? b[(n) * B_PITCH + (k)] : b[(k) * B_PITCH + (n)])
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
            u32 fa[4][4], fb[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int q = 0; q < 4; ++q) fa[i][q] = A_AT(m0 + i * 16 + row + (q & 1) * 8, k + col + (q >> 1) * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int q = 0; q < 2; ++q) fb[j][q] = B_AT(n0 + j * 8 + row, k + col + q * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) mma(acc[i][j], fa[i], fb[j]);
        }
#else
        const int half = lane >> 3, row = lane & 7;   // which of ldmatrix's four matrices, and its row
#pragma unroll
        for (int k = 0; k < BK; k += 16) {
            u32 fa[4][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = m0 + i * 16;
                ldmatrix(fa[i], A_K ? a + (m + (half & 1) * 8 + row) * A_PITCH + k + (half >> 1) * 8
                                    : a + (k + (half >> 1) * 8 + row) * A_PITCH + m + (half & 1) * 8, !A_K);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int n = n0 + j * 16;
                ldmatrix(fb[j], B_K ? b + (n + (half >> 1) * 8 + row) * B_PITCH + k + (half & 1) * 8
                                    : b + (k + (half & 1) * 8 + row) * B_PITCH + n + (half >> 1) * 8, !B_K);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) mma(acc[i][j], fa[i], fb[j >> 1] + (j & 1) * 2);
        }
#endif
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < 64; ++e) ((float*)acc)[e] = 0.0f;
    }

    // 16 x 32 at a time through the warp's own piece of shared memory.
    __device__ __forceinline__ void finish(const Problem& p, const Group& g, char* shared, i64 i0, i64 j0) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        constexpr int PITCH = 36;
        float* staged = (float*)shared + warp * 16 * PITCH;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(float2*)(staged + ((lane >> 2) + h * 8) * PITCH + j * 8 + (lane & 3) * 2) = make_float2(acc[i][j][h * 2], acc[i][j][h * 2 + 1]);
            __syncwarp();
            emit<float>(p, g, staged, 16, 32, PITCH, i0 + (warp & 1) * 64 + i * 16, j0 + (warp >> 1) * 32);
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

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < R * R; ++e) ((Acc*)acc)[e] = 0;
    }

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

// Enough for two pipeline stages, and for the staging of results after them.
constexpr int STAGE_BYTES = (A_TILE + B_TILE) * (int)sizeof(Element);
constexpr int STAGING_BYTES = TENSOR_CORES ? 8 * 16 * 36 * 4 : 16 * (BN + 4) * (int)sizeof(Acc);
constexpr int SHARED_BYTES = 2 * STAGE_BYTES > STAGING_BYTES ? 2 * STAGE_BYTES : STAGING_BYTES;

// Tiles in bands of 8 rows, so that resident blocks share operand tiles in the L2 cache.
__device__ __forceinline__ void tile_position(i64 local, i64 tiles_m, i64 tiles_n, i64& tm, i64& tn) {
    const i64 band = local / (8 * tiles_n), height = min64(8, tiles_m - band * 8), rest = local - band * 8 * tiles_n;
    tm = band * 8 + rest % height, tn = rest / height;
}

extern "C" __global__ void __launch_bounds__(THREADS) portable(const __grid_constant__ Problem p) {
    __shared__ alignas(16) char shared[SHARED_BYTES];
    Element* const stages = (Element*)shared;
    TileWalk<BM, BN> walk;
    int group = -1, last_group = -1;
    i64 local;
    Group g;
    Compute work;
    for (i64 tile = blockIdx.x; walk.find(p, tile, group, local); tile += gridDim.x) {
        if (group != last_group) g = resolve(p, group, sizeof(Element)), last_group = group;
        i64 tm, tn;
        tile_position(local, ceil_div(g.m, BM), ceil_div(g.n, BN), tm, tn);
        const i64 i0 = tm * BM, j0 = tn * BN;
        const char* a = g.a + i0 * g.a_row * i64(sizeof(Element));
        const char* b = g.b + j0 * g.b_col * i64(sizeof(Element));
        const int a_width = access_width<Element>(a, A_K ? g.a_col : g.a_row, A_K ? g.a_row : g.a_col, A_K ? g.k : g.m);
        const int b_width = access_width<Element>(b, B_K ? g.b_row : g.b_col, B_K ? g.b_col : g.b_row, B_K ? g.k : g.n);
        TileLoad<Element, BM, BK, A_K, THREADS> la;
        TileLoad<Element, BN, BK, B_K, THREADS> lb;
        const i64 blocks = ceil_div(g.k, BK);
        work.clear();
        for (i64 kb = -1; kb < blocks; ++kb) {      // one step ahead: load block kb + 1, multiply block kb
            const i64 next = kb + 1, k0 = next * BK;
            if (next < blocks) {
                la.load(a + k0 * g.a_col * i64(sizeof(Element)), g.a_row, g.a_col, g.m - i0, g.k - k0, a_width);
                lb.load(b + k0 * g.b_row * i64(sizeof(Element)), g.b_col, g.b_row, g.n - j0, g.k - k0, b_width);
            }
            if (kb >= 0) work.step(stages + (kb & 1) * (A_TILE + B_TILE), stages + (kb & 1) * (A_TILE + B_TILE) + A_TILE);
            if (next < blocks) {
                Element* to = stages + (next & 1) * (A_TILE + B_TILE);
                if (TENSOR_CORES) {
                    la.template store<A_PITCH>(to), lb.template store<B_PITCH>(to + A_TILE);
                } else {
                    la.template store_k_major<A_PITCH>(to), lb.template store_k_major<B_PITCH>(to + A_TILE);
                }
            }
            __syncthreads();
        }
        work.finish(p, g, shared, i0, j0);
        __syncthreads();
    }
    if (p.zero_unowned) zero_unowned(p, i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32, i64(gridDim.x) * (THREADS / 32));
}
