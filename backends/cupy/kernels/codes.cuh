// The numbers that codes of 8 and 4 bits stand for, in float32, where each of them is exact. Free of instructions that only a
// GPU knows: a test compiles this file for the host and compares every code with the reference.
#pragma once
#include "common.cuh"

// As `CODES` in quantised.py. Bytes of b from INT4 on hold two numbers, the one with the lower k in their low four bits.
enum Code { CODE_F32, CODE_F16, CODE_BF16, CODE_I8, CODE_U8, CODE_E4M3, CODE_E5M2, CODE_E8M0, CODE_INT4, CODE_UINT4, CODE_E2M1 };

__device__ __forceinline__ constexpr int bytes_of(int code) { return code == CODE_F32 ? 4 : code <= CODE_BF16 ? 2 : 1; }

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float(u32(exponent + 127) << 23); }

// A code of EXPONENT and FRACTION bits below its sign: moved to where float32 has its own, it is too small by the difference of
// the biases, and so are subnormal codes.
template <int EXPONENT, int FRACTION> __device__ __forceinline__ float from_small_float(u32 code) {
    constexpr u32 SIGN = 1u << (EXPONENT + FRACTION);
    const float magnitude = __uint_as_float((code & (SIGN - 1)) << (23 - FRACTION)) * power_of_two(128 - (1 << (EXPONENT - 1)));
    return __uint_as_float(__float_as_uint(magnitude) | (code & SIGN ? 0x80000000u : 0));
}

template <int CODE> __device__ __forceinline__ float decode(u32 code) {
    if (CODE == CODE_F32) return __uint_as_float(code);
    if (CODE == CODE_F16) return to_float(f16{u16(code)});
    if (CODE == CODE_BF16) return __uint_as_float(code << 16);
    if (CODE == CODE_I8) return float((signed char)code);
    if (CODE == CODE_U8) return float(code & 0xFF);
    if (CODE == CODE_E4M3) return (code & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000u) : from_small_float<4, 3>(code);
    if (CODE == CODE_E5M2) {
        if ((code & 0x7C) != 0x7C) return from_small_float<5, 2>(code);
        return __uint_as_float((code & 3 ? 0x7FC00000u : 0x7F800000u) | (code & 0x80) << 24);
    }
    if (CODE == CODE_E8M0) return __uint_as_float(code == 0 ? 0x00400000u : code == 0xFF ? 0x7FC00000u : code << 23);   // 0 is 2^-127
    if (CODE == CODE_INT4) return float(int((code & 15) ^ 8) - 8);
    if (CODE == CODE_UINT4) return float(code & 15);
    return from_small_float<2, 1>(code & 15);       // CODE_E2M1
}

// A scale or a zero point, whose kind is known at run time.
__device__ __forceinline__ float load_number(const char* at, int code) {
    switch (code) {
    case CODE_F32: return *(const float*)at;
    case CODE_F16: return decode<CODE_F16>(*(const u16*)at);
    case CODE_BF16: return decode<CODE_BF16>(*(const u16*)at);
    case CODE_I8: return decode<CODE_I8>(*(const u8*)at);
    case CODE_U8: return decode<CODE_U8>(*(const u8*)at);
    default: return decode<CODE_E8M0>(*(const u8*)at);
    }
}
