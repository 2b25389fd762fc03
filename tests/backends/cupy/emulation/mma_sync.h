// tensor_cores.cuh for a host: the products that quantised.cu asks for. An operand that is no tf32 number ends the run.
#pragma once
#include "common.cuh"

inline unsigned part_of_a(const float* tile, int pitch, int line, int k, int q) {
    const int lane = threadIdx.x & 31;
    return __float_as_uint(tile[(line + (q & 1) * 8 + lane / 4) * pitch + k + (q >> 1) * 4 + lane % 4]);
}
template <bool CONTIG_K, int PITCH> void load_a(u32 (&r)[4], const float* tile, int m, int k) {
    for (int q = 0; q < 4; ++q) r[q] = part_of_a(tile, PITCH, m, k, q);
}
template <bool CONTIG_K, int PITCH> void load_b(u32 (&r)[4], const float* tile, int n, int k) {
    for (int q = 0; q < 4; ++q) r[q] = part_of_a(tile, PITCH, n, k, (q & 1) << 1 | q >> 1);
}
inline void mma_tf32(float (&d)[4], const u32* a, const u32* b) {
    const int lane = threadIdx.x & 31;
    Slots& s = slots();
    for (int i = 0; i < 6; ++i) {
        const u32 bits = i < 4 ? a[i] : b[i - 4];
        if (bits & 0x1FFF && (bits & 0x7F800000) != 0x7F800000) fail("an operand is no tf32 number");
        s.of[lane][i] = bits;
    }
    wait_for_warp();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4, column = (lane & 3) * 2 + (e & 1);
        double sum = d[e];
        for (int k = 0; k < 8; ++k)
            sum += double(__uint_as_float(u32(s.of[row * 4 + k % 4][k / 4 * 2 + (e >> 1)]))) * double(__uint_as_float(u32(s.of[column * 4 + k % 4][4 + k / 4])));
        d[e] = float(sum);
    }
    wait_for_warp();
}
