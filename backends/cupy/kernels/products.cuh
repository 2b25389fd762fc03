// A tile's products, by KIND: on the tensor cores, or on the ordinary ones (float32 as IEEE arithmetic has it).
#pragma once
#include "epilogue.cuh"
#include "tensor_cores.cuh"

#if KIND <= KIND_F64

// ---- The tensor cores, by mma.sync: 16 bits, tf32, int8, and float64 as IEEE arithmetic has it.
//
// A warp owns half of the tile's rows and NJ * 8 of its columns: MI x NJ products of m16n8.

constexpr int MI = BM / 32, NJ = BN / 8 / (THREADS / 64);
// Bytes are multiplied along k only: lines of shared memory lie along k whatever they do in memory.
constexpr bool A_LINES_K = A_K || KIND == KIND_I8, B_LINES_K = B_K || KIND == KIND_I8;
// Padded so that what is read together lies in different banks: eight rows of 16 bytes (ldmatrix), four by four elements of
// float64 (half a warp), or eight by four of tf32 across k.
constexpr int PAD_K = KIND == KIND_F64 ? 4 : 16 / int(sizeof(Element)), PAD_MN = KIND == KIND_F64 ? 4 : 8;
constexpr int A_PITCH = A_LINES_K ? BK + PAD_K : BM + PAD_MN, B_PITCH = B_LINES_K ? BK + PAD_K : BN + PAD_MN;
constexpr int A_TILE = (A_LINES_K ? BM : BK) * A_PITCH, B_TILE = (B_LINES_K ? BN : BK) * B_PITCH;

template <class T> struct alignas(2 * sizeof(T)) Pair { T low, high; };

#if KIND == KIND_F64
typedef double Fragment;
constexpr int K = FUSED ? 4 : 8, WORDS = K / 2;   // k of one product, and registers of its operands: fused ones leave fewer
#else
typedef u32 Fragment;
constexpr int K = 32 / int(sizeof(Element)), WORDS = 4;
#endif
constexpr int STEPS = BK / K;

// To 11 significant bits, ties away from zero, as cvt.rna.tf32 does: the instruction itself drops the low 13 bits.
__device__ __forceinline__ u32 tf32(u32 bits) {
    return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7F800000u) ? bits + 0x1000 : bits;
}

// Element `i` of eight by four, of which every lane has one: line mn + lane / 4, k + lane % 4.
template <bool LINES_K, int PITCH, class T> __device__ __forceinline__ T one(const T* tile, int mn, int k) {
    const int line = mn + ((threadIdx.x & 31) >> 2), deep = k + (threadIdx.x & 3);
    return LINES_K ? tile[line * PITCH + deep] : tile[deep * PITCH + line];
}

// 16 rows of A, or 16 columns of B, by the k of one product.
template <bool LINES_K, int PITCH> __device__ __forceinline__ void fragment_a(u32 (&r)[4], const float* tile, int m, int k) {
    if constexpr (LINES_K) load_a<true, PITCH>(r, tile, m, k);
#pragma unroll
    for (int q = 0; q < 4; ++q)
        r[q] = tf32(LINES_K ? r[q] : __float_as_uint(one<false, PITCH>(tile, m + (q & 1) * 8, k + (q >> 1) * 4)));
}
template <bool LINES_K, int PITCH> __device__ __forceinline__ void fragment_b(u32 (&r)[4], const float* tile, int n, int k) {
    if constexpr (LINES_K) load_b<true, PITCH>(r, tile, n, k);
#pragma unroll
    for (int q = 0; q < 4; ++q)
        r[q] = tf32(LINES_K ? r[q] : __float_as_uint(one<false, PITCH>(tile, n + (q >> 1) * 8, k + (q & 1) * 4)));
}
template <bool LINES_K, int PITCH, int COUNT> __device__ __forceinline__ void fragment_a(double (&r)[COUNT], const double* tile, int m, int k) {
#pragma unroll
    for (int q = 0; q < COUNT; ++q) r[q] = one<LINES_K, PITCH>(tile, m + (q & 1) * 8, k + (q >> 1) * 4);
}
template <bool LINES_K, int PITCH, int COUNT> __device__ __forceinline__ void fragment_b(double (&r)[COUNT], const double* tile, int n, int k) {
#pragma unroll
    for (int q = 0; q < COUNT; ++q) r[q] = one<LINES_K, PITCH>(tile, n + q / (COUNT / 2) * 8, k + q % (COUNT / 2) * 4);
}
// 16 bits and bytes, by 32 bytes of k.
template <bool LINES_K, int PITCH, class T> __device__ __forceinline__ void fragment_a(u32 (&r)[4], const T* tile, int m, int k) {
    load_a<LINES_K, PITCH>(r, tile, m, k);
}
template <bool LINES_K, int PITCH, class T> __device__ __forceinline__ void fragment_b(u32 (&r)[4], const T* tile, int n, int k) {
    load_b<LINES_K, PITCH>(r, tile, n, k);
}

struct Compute {
    Acc acc[MI][NJ][4];

    static __device__ __forceinline__ int row() { return ((threadIdx.x >> 5) & 1) * (BM / 2); }
    static __device__ __forceinline__ int column() { return (threadIdx.x >> 6) * (NJ * 8); }

    struct Fragments {
        Fragment a[MI][WORDS], b[NJ / 2][WORDS];
    };

    // The operands of step `s` of a stage; with SPREAD those of A come one by one.
    static __device__ __forceinline__ void read(Fragments& f, const Element* a, const Element* b, int s) {
#pragma unroll
        for (int i = 0; !SPREAD && i < MI; ++i) read_a(f, a, s, i);
#pragma unroll
        for (int j = 0; j < NJ / 2; ++j) fragment_b<B_LINES_K, B_PITCH>(f.b[j], b, column() + j * 16, s * K);
    }
    static __device__ __forceinline__ void read_a(Fragments& f, const Element* a, int s, int i) {
        fragment_a<A_LINES_K, A_PITCH>(f.a[i], a, row() + i * 16, s * K);
    }

    // A of `f` and B of `g`; `after(i)` comes behind the products of the warp's i-th 16 rows.
    template <class After> __device__ __forceinline__ void multiply(const Fragments& f, const Fragments& g, const After& after) {
#pragma unroll
        for (int i = 0; i < MI; ++i) {
#pragma unroll
            for (int j = 0; j < NJ; ++j) {
                const Fragment* const columns = g.b[j >> 1] + (j & 1) * (WORDS / 2);
#if KIND == KIND_I8
                mma_s8(acc[i][j], f.a[i], columns);
#elif KIND == KIND_BF16
                mma_bf16(acc[i][j], f.a[i], columns);
#elif KIND == KIND_F16
                mma_f16(acc[i][j], f.a[i], columns);
#elif KIND == KIND_TF32
                mma_tf32(acc[i][j], f.a[i], columns);
#else
                mma_f64<K>(acc[i][j], f.a[i], columns);
#endif
            }
            after(i);
        }
    }

    // Two neighbours of a row, of which the second may lie past the edge; 16 bits, or the sums' own type.
    template <int SIZE> static __device__ __forceinline__ void put(char* at, Acc low, Acc high, bool bfloat, bool both) {
        if constexpr (SIZE == 2) {
            const u32 pair = bfloat ? pack_bf16(low, high) : pack_f16(low, high);
            if (both) *(u32*)at = pair;
            else *(u16*)at = u16(pair);
        } else {
            if (both) *(Pair<Acc>*)at = {low, high};
            else *(Acc*)at = low;
        }
    }
    template <int SIZE> __device__ __forceinline__ void put_rows(const Problem& p, const Group& g, i64 i0, i64 j0) const {
        const int lane = threadIdx.x & 31;
        const bool bfloat = p.out_type == BF16;
        const Acc alpha = p.read_ab ? scalar<Acc>(p.alpha) : Acc(0);
        const i64 r0 = i0 + row() + (lane >> 2), c0 = j0 + column() + (lane & 3) * 2, pitch = g.out_row * SIZE;
        const int rows = int(min64(g.m - r0, BM)), columns = int(min64(g.n - c0, BN));
        char* line = g.out + r0 * pitch + c0 * SIZE;
#pragma unroll
        for (int i = 0; i < MI * 2; ++i, line += 8 * pitch)
            if (i * 8 < rows) {
#pragma unroll
                for (int j = 0; j < NJ; ++j) {
                    const Acc* const v = acc[i >> 1][j] + (i & 1) * 2;
                    if (j * 8 < columns) put<SIZE>(line + j * 8 * SIZE, v[0] * alpha, v[1] * alpha, bfloat, j * 8 + 1 < columns);
                }
            }
    }

    // alpha * acc in 16 bits or in the sums' own type, rows that pairs are aligned to: straight from the registers.
    static __device__ __forceinline__ bool is_plain(const Problem& p, const Group& g) {
        if (g.c || g.bias || p.activation != IDENTITY || g.out_col != 1) return false;
        const int size = size_of(p.out_type);
        if ((u64(g.out) | u64(g.out_row * size)) & (2 * size - 1)) return false;
        return size == sizeof(Acc) || (KIND <= KIND_TF32 && size == 2);
    }
    __device__ __forceinline__ void finish_plain(const Problem& p, const Group& g, i64 i0, i64 j0) const {
        if constexpr (KIND <= KIND_TF32) {
            if (size_of(p.out_type) == 2) return put_rows<2>(p, g, i0, j0);
        }
        put_rows<sizeof(Acc)>(p, g, i0, j0);
    }

    // 16 x 32 at a time through the warp's own piece of shared memory.
    template <class P, class G> __device__ __forceinline__ void finish(const P& p, const G& g, char* shared, i64 i0, i64 j0) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        constexpr int PITCH = 36;
        Acc* staged = (Acc*)shared + warp * 16 * PITCH;
#pragma unroll
        for (int i = 0; i < MI; ++i)
#pragma unroll
            for (int part = 0; part < NJ; part += 4) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const Acc* const v = acc[i][part + j] + h * 2;
                        *(Pair<Acc>*)(staged + ((lane >> 2) + h * 8) * PITCH + j * 8 + (lane & 3) * 2) = {v[0], v[1]};
                    }
                __syncwarp();
                emit<Acc>(p, g, staged, 16, 32, PITCH, i0 + row() + i * 16, j0 + column() + part * 8);
                __syncwarp();
            }
    }
};

#else

// ---- The ordinary cores: float32 as IEEE arithmetic has it.
//
// Both operands lie in shared memory as [k][mn]. A thread's rows and columns are fours of neighbours, so that it reads them as
// vectors of 16 bytes; the lanes of a warp lie so that eight of them that are served together read 128 different bytes or the
// same ones.

template <int BM, int BN, int BK, int RM, int RN, int LANES_M, int THREADS, int A_PITCH, int B_PITCH>
struct OrdinaryCores {
    static constexpr int LANES_N = 32 / LANES_M, WARP_M = LANES_M * RM, WARP_N = LANES_N * RN, WARPS_M = BM / WARP_M;
    static_assert(WARPS_M * (BN / WARP_N) * 32 == THREADS, "warps cover the tile");
    float acc[RM][RN];

    static __device__ __forceinline__ int lane_wide() { return (threadIdx.x >> 1) & 7; }
    static __device__ __forceinline__ int lane_narrow() { return (threadIdx.x & 1) | ((threadIdx.x >> 3) & 2); }
    static __device__ __forceinline__ int lane_m() { return LANES_M == 8 ? lane_wide() : lane_narrow(); }
    static __device__ __forceinline__ int lane_n() { return LANES_M == 8 ? lane_narrow() : lane_wide(); }
    // First row and column of a thread; the others of its fours are LANES * 4 further on.
    static __device__ __forceinline__ int row() { return (threadIdx.x >> 5) % WARPS_M * WARP_M + lane_m() * 4; }
    static __device__ __forceinline__ int column() { return (threadIdx.x >> 5) / WARPS_M * WARP_N + lane_n() * 4; }

    template <int COUNT, int APART>
    static __device__ __forceinline__ void vectors(float (&to)[COUNT], const float* from) {
#pragma unroll
        for (int q = 0; q < COUNT / 4; ++q) {
            const float4 v = *(const float4*)(from + q * APART);
            to[q * 4] = v.x, to[q * 4 + 1] = v.y, to[q * 4 + 2] = v.z, to[q * 4 + 3] = v.w;
        }
    }

    struct Fragments {
        float a[RM], b[RN];
    };

    // The operands of k `s` of a stage.
    static __device__ __forceinline__ void read(Fragments& f, const float* a, const float* b, int s) {
        vectors<RM, LANES_M * 4>(f.a, a + s * A_PITCH + row());
        vectors<RN, LANES_N * 4>(f.b, b + s * B_PITCH + column());
    }

    template <class After> __device__ __forceinline__ void multiply(const Fragments& f, const Fragments&, const After&) {
#pragma unroll
        for (int i = 0; i < RM; ++i)
#pragma unroll
            for (int j = 0; j < RN; ++j) acc[i][j] += f.a[i] * f.b[j];
    }

    // alpha * acc in float32, rows that are contiguous: straight from the registers.
    static __device__ __forceinline__ bool is_plain(const Problem& p, const Group& g) {
        return !g.c && !g.bias && p.activation == IDENTITY && p.out_type == F32 && g.out_col == 1;
    }
    __device__ __forceinline__ void finish_plain(const Problem& p, const Group& g, i64 i0, i64 j0) const {
        const float alpha = p.read_ab ? float(p.alpha) : 0.0f;
        const bool aligned = ((u64(g.out) | u64(g.out_row * 4)) & 15) == 0;
        const i64 j = j0 + column();
#pragma unroll
        for (int i = 0; i < RM; ++i) {
            const i64 r = i0 + row() + (i >> 2) * (LANES_M * 4) + (i & 3);
            if (r >= g.m) continue;
            float* const line = (float*)g.out + r * g.out_row;
#pragma unroll
            for (int q = 0; q < RN / 4; ++q) {
                const i64 c = j + q * (LANES_N * 4);
                const float* const v = acc[i] + q * 4;
                if (aligned && c + 4 <= g.n) {
                    *(float4*)(line + c) = make_float4(v[0] * alpha, v[1] * alpha, v[2] * alpha, v[3] * alpha);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (c + e < g.n) line[c + e] = v[e] * alpha;
                }
            }
        }
    }

    // One row of each lane at a time: a warp stages LANES_M rows of WARP_N values in its own piece of shared memory.
    template <class P, class G> __device__ __forceinline__ void finish(const P& p, const G& g, char* shared, i64 i0, i64 j0) {
        constexpr int PITCH = WARP_N + 4;
        const int warp = threadIdx.x >> 5;
        float* const staged = (float*)shared + warp * LANES_M * PITCH;
#pragma unroll
        for (int i = 0; i < RM; ++i) {
#pragma unroll
            for (int q = 0; q < RN / 4; ++q)
                *(float4*)(staged + lane_m() * PITCH + lane_n() * 4 + q * (LANES_N * 4)) =
                    make_float4(acc[i][q * 4], acc[i][q * 4 + 1], acc[i][q * 4 + 2], acc[i][q * 4 + 3]);
            __syncwarp();
            const i64 first = i0 + warp % WARPS_M * WARP_M + (i >> 2) * (LANES_M * 4) + (i & 3);
#pragma unroll 1
            for (int r = 0; r < LANES_M; ++r)
                emit<float>(p, g, staged + r * PITCH, 1, WARP_N, PITCH, first + r * 4, j0 + warp / WARPS_M * WARP_N);
            __syncwarp();
        }
    }
};

constexpr bool A_LINES_K = false, B_LINES_K = false;
constexpr int STEPS = BK, A_PITCH = BM + 4, B_PITCH = BN + 4, A_TILE = BK * A_PITCH, B_TILE = BK * B_PITCH;
// Each thread has 16 x 8 sums of the largest tile, 8 x 4 or 4 x 4 of the others.
typedef OrdinaryCores<BM, BN, BK, BM == 128 ? 16 : BM == 64 ? 8 : 4, BM == 128 ? 8 : 4, BM == 32 ? 8 : 4, THREADS, A_PITCH, B_PITCH> Compute;

#endif
