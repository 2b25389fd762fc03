// A tile's products on the ordinary cores: float32 as IEEE arithmetic has it.
//
// Both operands lie in shared memory as [k][mn]. A thread's rows and columns are fours of neighbours, so that it reads them as
// vectors of 16 bytes; the lanes of a warp lie so that eight of them that are served together read 128 different bytes or the
// same ones.
#pragma once
#include "epilogue.cuh"

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

    __device__ __forceinline__ void multiply(const Fragments& f) {
#pragma unroll
        for (int i = 0; i < RM; ++i)
#pragma unroll
            for (int j = 0; j < RN; ++j) acc[i][j] += f.a[i] * f.b[j];
    }

    // alpha * acc in float32, rows that are contiguous: straight from the registers.
    __device__ __forceinline__ bool finish_plain(const Problem& p, const Group& g, i64 i0, i64 j0) const {
        if (g.c || g.bias || p.activation != IDENTITY || p.out_type != F32 || g.out_col != 1) return false;
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
        return true;
    }

    // One row of each lane at a time: a warp stages LANES_M rows of WARP_N values in its own piece of shared memory.
    __device__ __forceinline__ void finish(const Problem& p, const Group& g, char* shared, i64 i0, i64 j0) {
        if (finish_plain(p, g, i0, j0)) return;
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
