"""How the epilogue reads, rounds and activates elements, one by one or eight at once; device code only.

Types are numbered as in TYPE_CODES. Each element is computed in `calc`, which is as wide as its
widest source, and is rounded once, when it is stored.
"""

from __future__ import annotations

import torch

TYPE_CODES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.int32: 4,
    torch.int8: 5,
}
ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}

ELEMENTS = r"""
#if ACC == 4
typedef int calc;
#elif ACC == 3 || C == 3 || BIAS == 3
typedef double calc;
#define RESIDENT 2
#else
typedef float calc;
#endif
#ifndef RESIDENT  // blocks on a multiprocessor: many loads in flight, but few spilled registers
#define RESIDENT 3
#endif

__device__ __forceinline__ calc of_half(unsigned short half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return (calc)wide;
}

template <int TYPE> __device__ __forceinline__ calc of_16_bits(unsigned short bits) {
    if constexpr (TYPE == 0) return of_half(bits); else return (calc)__uint_as_float((unsigned)bits << 16);
}

template <int TYPE> __device__ __forceinline__ calc load(i64 base, i64 at) {
    if constexpr (TYPE <= 1) return of_16_bits<TYPE>(((const unsigned short*)base)[at]);
    if constexpr (TYPE == 2) return (calc)((const float*)base)[at];
    if constexpr (TYPE == 3) return (calc)((const double*)base)[at];
    if constexpr (TYPE == 4) return (calc)((const int*)base)[at];
    if constexpr (TYPE == 5) return (calc)((const signed char*)base)[at];
}

// Eight elements that follow each other; those of 16 and 32 bits come in words of 16 bytes, which must be aligned.
struct alignas(16) Words { unsigned word[4]; };

// Whether eight elements from here on, and all that follow in steps of eight, are whole aligned words (if any).
template <int TYPE> __device__ __forceinline__ bool aligned(i64 base, i64 at) {
    constexpr int size = TYPE <= 1 ? 2 : TYPE == 2 || TYPE == 4 ? 4 : 16;
    return (base + at * size) % 16 == 0 || size == 16;
}

template <int TYPE> __device__ __forceinline__ void load_eight(i64 base, i64 at, calc* values) {
    if constexpr (TYPE <= 1) {
        Words packed = *(const Words*)(base + at * 2);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = of_16_bits<TYPE>((unsigned short)(packed.word[i / 2] >> (i % 2 * 16)));
    } else if constexpr (TYPE == 2 || TYPE == 4) {
        Words packed[2] = {((const Words*)(base + at * 4))[0], ((const Words*)(base + at * 4))[1]};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            unsigned bits = packed[i / 4].word[i % 4];
            if constexpr (TYPE == 2) values[i] = (calc)__uint_as_float(bits); else values[i] = (calc)(int)bits;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = load<TYPE>(base, at + i);
    }
}

// A float that rounds on to 16 bits as the double itself would: truncated, with the lost part kept as a last odd bit.
__device__ __forceinline__ float narrow(float value) { return value; }
__device__ __forceinline__ float narrow(double value) {
    float cut = __double2float_rz(value);
    return (double)cut == value ? cut : __uint_as_float(__float_as_uint(cut) | 1u);
}
__device__ __forceinline__ float narrow(int value) { return (float)value; }

template <int TYPE> __device__ __forceinline__ unsigned to_16_bits(calc value) {
    if constexpr (TYPE == 0) {
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(narrow(value)));
        return half;
    }
    float wide = narrow(value);
    unsigned bits = __float_as_uint(wide);
    return wide != wide ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Two at once: one instruction from compute capability 8.0 on.
template <int TYPE> __device__ __forceinline__ unsigned to_word(calc low, calc high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned word;
    if constexpr (TYPE == 0) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(narrow(high)), "f"(narrow(low)));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(narrow(high)), "f"(narrow(low)));
    return word;
#else
    return to_16_bits<TYPE>(low) | to_16_bits<TYPE>(high) << 16;
#endif
}

template <int TYPE> __device__ __forceinline__ void store(i64 base, i64 at, calc value) {
    if constexpr (TYPE <= 1) ((unsigned short*)base)[at] = (unsigned short)to_16_bits<TYPE>(value);
    if constexpr (TYPE == 2) ((float*)base)[at] = (float)value;
    if constexpr (TYPE == 3) ((double*)base)[at] = (double)value;
    if constexpr (TYPE == 4) ((int*)base)[at] = (int)value;
}

template <int TYPE> __device__ __forceinline__ void store_eight(i64 base, i64 at, const calc* values) {
    if constexpr (TYPE <= 1) {
        Words packed;
#pragma unroll
        for (int i = 0; i < 4; i++) packed.word[i] = to_word<TYPE>(values[2 * i], values[2 * i + 1]);
        *(Words*)(base + at * 2) = packed;
    } else if constexpr (TYPE == 2 || TYPE == 4) {
        Words packed[2];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if constexpr (TYPE == 2) packed[i / 4].word[i % 4] = __float_as_uint((float)values[i]);
            else packed[i / 4].word[i % 4] = (unsigned)(int)values[i];
        }
        ((Words*)(base + at * 4))[0] = packed[0];
        ((Words*)(base + at * 4))[1] = packed[1];
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) store<TYPE>(base, at + i, values[i]);
    }
}

__device__ __forceinline__ float ratio(float a, float b) { return __fdividef(a, b); }  // within 2 ulp
__device__ __forceinline__ double ratio(double a, double b) { return a / b; }
__device__ __forceinline__ int ratio(int a, int b) { return a / b; }

__device__ __forceinline__ calc activate(calc v) {
#if ACT == 1
    return v < (calc)0 ? (calc)0 : v;
#elif ACT == 2
    return (calc)0.5 * v * erfc(v * (calc)-0.70710678118654752440);  // 1 + erf would cancel for negative v
#elif ACT == 3
    // 1 + tanh(u) = 2 / (1 + exp(-2u)), which does not cancel
    return ratio(v, (calc)1 + exp((calc)-1.59576912160573071176 * (v + (calc)0.044715 * v * v * v)));
#elif ACT == 4
    return ratio(v, (calc)1 + exp(-v));
#else
    return v;
#endif
}
"""
