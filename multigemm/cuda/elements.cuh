// Elements of a numbered type in memory, read as `calc` and rounded once when they are stored. Types: 0 float16, 1 bfloat16,
// 2 float32, 3 float64, 4 int32, 5 int8. Whoever includes this has defined `i64` and `calc`.

// Elements side by side: four of 32 bits, eight of 16.
struct alignas(16) Words { unsigned word[4]; };

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

template <int TYPE> __device__ __forceinline__ void store(i64 base, i64 at, calc value) {
    if constexpr (TYPE <= 1) ((unsigned short*)base)[at] = (unsigned short)to_16_bits<TYPE>(value);
    if constexpr (TYPE == 2) ((float*)base)[at] = (float)value;
    if constexpr (TYPE == 3) ((double*)base)[at] = (double)value;
    if constexpr (TYPE == 4) ((int*)base)[at] = (int)value;
}

__device__ __forceinline__ i64 clamp(i64 v, i64 low, i64 high) { return v < low ? low : v > high ? high : v; }
