// The tensor cores as sm_80 knows them: one warp's operands by ldmatrix, products by mma.sync.
//
// A is 16 rows by 32 bytes of k, B 32 bytes of k by 8 columns; both lie in shared memory in rows of 16 bytes.
#pragma once
#include "common.cuh"

// Four 8 x 8 blocks of 16-bit values; lane l names row l % 8 of block l / 8. Bytes: 8 rows of 16.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const void* p, bool transposed) {
    if (transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

#define MMA(NAME, INSTRUCTION, ACC, LETTER)                                                                                     \
    __device__ __forceinline__ void NAME(ACC (&d)[4], const u32* a, const u32* b) {                                             \
        asm volatile("mma.sync.aligned." INSTRUCTION " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                   \
                     : "+" LETTER(d[0]), "+" LETTER(d[1]), "+" LETTER(d[2]), "+" LETTER(d[3])                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                       \
    }
MMA(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32", float, "f")
MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32", float, "f")
MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32", float, "f")
MMA(mma_s8, "m16n8k32.row.col.s32.s8.s8.s32", int, "r")
#undef MMA

// Four or eight k of float64: one instruction from sm_90 on, two of half the rows for each four of k before.
template <int K> __device__ __forceinline__ void mma_f64(double (&d)[4], const double* a, const double* b) {
#if __CUDA_ARCH__ >= 900
    if constexpr (K == 8)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3]) : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3]) : "d"(a[0]), "d"(a[1]), "d"(b[0]));
#else
#pragma unroll
    for (int k = 0; k < K / 4; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                         : "+d"(d[i * 2]), "+d"(d[i * 2 + 1]) : "d"(a[k * 2 + i]), "d"(b[k]));
#endif
}

// 16 rows of A, or 16 columns of B, by 32 bytes of k from a tile that is contiguous along k, or (16 bits only) across it.
template <bool CONTIG_K, int PITCH, class T>
__device__ __forceinline__ void load_a(u32 (&r)[4], const T* tile, int m, int k) {
    const int lane = threadIdx.x & 31, part = lane >> 3, row = lane & 7;
    constexpr int HALF = 16 / sizeof(T);
    if (CONTIG_K) ldmatrix(r, tile + (m + (part & 1) * 8 + row) * PITCH + k + (part >> 1) * HALF, false);
    else ldmatrix(r, tile + (k + (part >> 1) * 8 + row) * PITCH + m + (part & 1) * 8, true);
}
template <bool CONTIG_K, int PITCH, class T>
__device__ __forceinline__ void load_b(u32 (&r)[4], const T* tile, int n, int k) {
    const int lane = threadIdx.x & 31, part = lane >> 3, row = lane & 7;
    constexpr int HALF = 16 / sizeof(T);
    if (CONTIG_K) ldmatrix(r, tile + (n + (part >> 1) * 8 + row) * PITCH + k + (part & 1) * HALF, false);
    else ldmatrix(r, tile + (k + (part & 1) * 8 + row) * PITCH + n + (part >> 1) * 8, true);
}
