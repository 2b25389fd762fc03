// tensor_cores.cuh for a host. The products of quantised.cu (no KIND): an operand that is no tf32 number ends the run.
#pragma once
#include "common.cuh"
#ifdef KIND
constexpr bool EXACT = false;
#else
constexpr bool EXACT = true;
#endif

#pragma GCC push_options
#pragma GCC optimize("O2")              // products take most of a run
// Register `q` of 16 lines (a) or of twice 8 (b), which holds 4 bytes along k.
template <bool CONTIG_K, int PITCH, class T> u32 part(const T* tile, int line, int k) {
    constexpr int EACH = 4 / sizeof(T);
    const int lane = threadIdx.x & 31;
    T v[EACH];
    for (int i = 0; i < EACH; ++i) {
        const int mn = line + lane / 4, deep = k + lane % 4 * EACH + i;
        v[i] = CONTIG_K ? tile[mn * PITCH + deep] : tile[deep * PITCH + mn];
    }
    u32 r;
    memcpy(&r, v, 4);
    return r;
}
template <bool CONTIG_K, int PITCH, class T> void load_a(u32 (&r)[4], const T* tile, int m, int k) {
    for (int q = 0; q < 4; ++q) r[q] = part<CONTIG_K, PITCH>(tile, m + (q & 1) * 8, k + (q >> 1) * int(16 / sizeof(T)));
}
template <bool CONTIG_K, int PITCH, class T> void load_b(u32 (&r)[4], const T* tile, int n, int k) {
    for (int q = 0; q < 4; ++q) r[q] = part<CONTIG_K, PITCH>(tile, n + (q >> 1) * 8, k + (q & 1) * int(16 / sizeof(T)));
}

inline double value_of(u32 bits, int, float) {
    if (EXACT && bits & 0x1FFF && (bits & 0x7F800000) != 0x7F800000) fail("an operand is no tf32 number");
    return __uint_as_float((bits & 0x7F800000) == 0x7F800000 ? bits : bits & ~0x1FFFu);
}
inline double value_of(u32 bits, int i, f16) { return to_float(f16{u16(bits >> (16 * i))}); }
inline double value_of(u32 bits, int i, bf16) { return to_float(bf16{u16(bits >> (16 * i))}); }
inline double value_of(u32 bits, int i, signed char) { return (signed char)(bits >> (8 * i)); }

// 16 rows by 32 bytes of k, times 8 columns.
template <class T, class Acc> void multiply_registers(Acc (&d)[4], const u32* a, const u32* b) {
    constexpr int EACH = 4 / sizeof(T);
    const int lane = threadIdx.x & 31;
    Slots& s = slots();
    for (int i = 0; i < 6; ++i) s.of[lane][i] = i < 4 ? a[i] : b[i - 4];
    wait_for_warp();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4, column = (lane & 3) * 2 + (e & 1);
        double sum = d[e];
        for (int k = 0; k < 8; ++k)
            for (int i = 0; i < EACH; ++i)
                sum += value_of(u32(s.of[row * 4 + k % 4][k / 4 * 2 + (e >> 1)]), i, T()) * value_of(u32(s.of[column * 4 + k % 4][4 + k / 4]), i, T());
        d[e] = Acc(sum);
    }
    wait_for_warp();
}
inline void mma_tf32(float (&d)[4], const u32* a, const u32* b) { multiply_registers<float>(d, a, b); }
inline void mma_f16(float (&d)[4], const u32* a, const u32* b) { multiply_registers<f16>(d, a, b); }
inline void mma_bf16(float (&d)[4], const u32* a, const u32* b) { multiply_registers<bf16>(d, a, b); }
inline void mma_s8(int (&d)[4], const u32* a, const u32* b) { multiply_registers<signed char>(d, a, b); }
// Eight k are four and four more: a lane holds k and k + 4 of its line of B, and of both its rows of A.
template <int K> void mma_f64(double (&d)[4], const double* a, const double* b) {
    const int lane = threadIdx.x & 31;
    Slots& s = slots();
    for (int i = 0; i < K / 4 * 3; ++i) memcpy(&s.of[lane][i], i < K / 2 ? &a[i] : &b[i - K / 2], 8);
    wait_for_warp();
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < K; ++k) {
            double x, y;
            memcpy(&x, &s.of[lane / 4 * 4 + k % 4][k / 4 * 2 + (e >> 1)], 8);
            memcpy(&y, &s.of[((lane & 3) * 2 + (e & 1)) * 4 + k % 4][K / 2 + k / 4], 8);
            d[e] += x * y;
        }
    wait_for_warp();
}
#pragma GCC pop_options
