// mma.cuh and fragments.cuh for a host: wgmma of 16 bits, whose operands lie along k, or across it in blocks of 64; of tf32 and
// int8, which lie along k in shared memory, while weights may come in registers.
#pragma once
#include "ptx.cuh"
#ifndef BFLOAT
#define BFLOAT 0
#endif
constexpr int ACCUMULATORS = PINGPONG ? ROWS : ROWS / 2;
#if !defined(W_CODE) && !defined(W_E5M2)
constexpr int SIZE_OF_ONE = TF32 ? 4 : INT8 ? 1 : 2;
#if INT8
typedef i64 Exact;
#else
typedef double Exact;
#endif
#pragma GCC push_options
#pragma GCC optimize("O2")
__attribute__((always_inline)) inline Exact number_of(u32 bits) {
    if (INT8) return (signed char)bits;
    if (!TF32) return BFLOAT ? to_float(bf16{u16(bits)}) : to_float(f16{u16(bits)});
    bits &= ~0x1FFFu;                       // the tensor cores do not read the low bits
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
__attribute__((always_inline)) inline Exact element_at(u64 descriptor, bool along_k, int mn, int k) {
    const u32 base = u32(descriptor & 0x3FFF) << 4, apart = u32(descriptor >> 16 & 0x3FFF) << 4;
    if (SIZE_OF_ONE != 2 && !along_k) fail("an operand across k");
    u32 bits = 0;
    memcpy(&bits, at(swizzled(along_k ? base + mn * 128 + k * SIZE_OF_ONE : base + mn / 64 * apart + k * 128 + mn % 64 * 2)), SIZE_OF_ONE);
    return number_of(bits);
}
// Both lines of weights that a lane multiplies, as wgmma found them.
struct OwnLines { Exact of[2][32 / SIZE_OF_ONE]; };
inline void multiply(int n, Sum* d, const OwnLines& weights, u64 x) {
    const int lane = threadIdx.x & 31;
    for (int i = 0; i < n / 2; i += i & 1 ? 3 : 1) {        // i and i + 2: both lines of weights by a row
        const int row = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
        Exact low = d[i], high = d[i + 2];
        for (int k = 0; k < 32 / SIZE_OF_ONE; ++k) {
            const Exact number = element_at(x, X_K, row, k);
            low += weights.of[0][k] * number, high += weights.of[1][k] * number;
        }
        d[i] = Sum(low), d[i + 2] = Sum(high);
    }
}
inline void multiply_shared(int n, Sum* d, u64 w, u64 x) {
    const int own = (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4;
    OwnLines weights;
    for (int upper = 0; upper < 2; ++upper)
        for (int k = 0; k < 32 / SIZE_OF_ONE; ++k) weights.of[upper][k] = element_at(w, W_K, own + upper * 8, k);
    multiply(n, d, weights, x);
}
#pragma GCC pop_options
inline void multiply_later(int n, Sum* d, u64 w, u64 x) {
    products().push_back([=] { multiply_shared(n, d, w, x); });
}
#endif
template <int N, int FIRST> struct Mma {
    static void run(Sum (&d)[ACCUMULATORS], u64 w, u64 x) {
#if !defined(W_CODE) && !defined(W_E5M2)
        multiply_later(N, d + FIRST, w, x);
#endif
    }
};
#if WORD_RESULTS
// Register v of lane l holds line l / 4 + v % 2 * 8, and words l % 4 + v / 2 * 4 of 32 bytes of k. They must not change before
// the products have been waited for.
inline void multiply_registers_later(int n, Sum* d, const u32* w, u64 x) {
    Slots& s = slots();
    const int lane = threadIdx.x & 31;
    for (int v = 0; v < 4; ++v) s.of[lane][v] = w[v];
    wait_for_warp();
    constexpr int IN_WORD = 4 / SIZE_OF_ONE;
    OwnLines own;
    for (int upper = 0; upper < 2; ++upper)
        for (int k = 0; k < 8 * IN_WORD; ++k)
            own.of[upper][k] = number_of(u32(s.of[(lane & ~3) + k / IN_WORD % 4][upper + k / IN_WORD / 4 * 2]) >> k % IN_WORD * 8 * SIZE_OF_ONE);
    wait_for_warp();
    const uint4 issued = {w[0], w[1], w[2], w[3]};
    products().push_back([=] {
        if (memcmp(&issued, w, 16)) fail("registers of products under way were written");
        multiply(n, d, own, x);
    });
}
template <int N> struct MmaFragment {
    static void run(Sum (&d)[ROWS / 2], const u32* w, u64 x) { multiply_registers_later(N, d, w, x); }
};
#endif
