// mma.cuh for a host: wgmma of 16 bits, whose operands lie along k, or across it in blocks of 64.
#pragma once
#include "ptx.cuh"
constexpr int ACCUMULATORS = PINGPONG ? ROWS : ROWS / 2;
#if defined(BFLOAT) && !defined(W_CODE)
inline float element_at(u64 descriptor, bool along_k, int mn, int k) {
    const u32 base = u32(descriptor & 0x3FFF) << 4, apart = u32(descriptor >> 16 & 0x3FFF) << 4;
    u16 bits;
    memcpy(&bits, at(swizzled(along_k ? base + mn * 128 + k * 2 : base + mn / 64 * apart + k * 128 + mn % 64 * 2)), 2);
    return BFLOAT ? to_float(bf16{bits}) : to_float(f16{bits});
}
#endif
template <int N, int FIRST> struct Mma {
    static void run(float (&d)[ACCUMULATORS], u64 w, u64 x) {
#if defined(BFLOAT) && !defined(W_CODE)
        products().push_back([=, &d] {
            const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
            for (int i = 0; i < N / 2; ++i) {
                const int column = warp * 16 + lane / 4 + (i >> 1 & 1) * 8, row = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
                double sum = d[FIRST + i];
                for (int k = 0; k < 16; ++k) sum += double(element_at(w, W_K, column, k)) * double(element_at(x, X_K, row, k));
                d[FIRST + i] = float(sum);
            }
        });
#endif
    }
};

#ifdef WSTAGES
// Weights in registers, which must not change before the products have been waited for.
template <int N> struct MmaFragment {
    static void run(float (&d)[ROWS / 2], const u32* w, u64 x) {
        Slots& s = slots();
        const int lane = threadIdx.x & 31;
        const uint4 mine = {w[0], w[1], w[2], w[3]};
        for (int i = 0; i < 4; ++i) s.of[lane][i] = w[i];
        wait_for_warp();
        struct { u32 of[4][4]; } own[2];        // both columns: of each lane of a quarter, for the lower and upper eight of k
        for (int c = 0; c < 4; ++c)
            for (int i = 0; i < 4; ++i) own[i & 1].of[c][i >> 1] = u32(s.of[(lane & ~3) + c][i]);
        wait_for_warp();
        products().push_back([=, &d] {
            if (memcmp(&mine, w, 16)) fail("registers that products under way read were written");
            for (int i = 0; i < N / 2; ++i) {
                const int row = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
                double sum = d[i];
                for (int k = 0; k < 16; ++k) {
                    const u16 bits = u16(own[i >> 1 & 1].of[k % 8 / 2][k / 8] >> (k & 1) * 16);
                    sum += double(BFLOAT ? to_float(bf16{bits}) : to_float(f16{bits})) * double(element_at(x, X_K, row, k));
                }
                d[i] = float(sum);
            }
        });
    }
};
#endif
