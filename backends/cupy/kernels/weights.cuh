// Quantised weights of a stage on their way into registers: codes become pairs of bfloat16 or float16, as wgmma takes its first
// operand from registers. A thread holds two columns, eight apart, at k = 2c, 2c + 1, 2c + 8 and 2c + 9 of each 16 (c: its lane
// modulo 4).
//
// Compile-time choices: W_CODE (codes.cuh), BFLOAT, SCALE_K (the k that one scale covers: 0 all, else 32, 64 or 128), SCALE_CODE,
// ZERO_CODE (-1: no zero points), FOLD (scales multiply the weights, else sums), PAIRS (two scales of 32 of k are read at once).
#pragma once
#include "consume.cuh"
#include "scales.cuh"
static_assert(DEEP == 1 || ROWS <= 128, "stages of one size");

constexpr bool PARTS = SCALE_K && !FOLD;               // sums of a block of k wait for their scale
constexpr bool FOUR_BITS = W_CODE >= CODE_INT4, ZEROS = ZERO_CODE >= 0;
// Numbers of e2m1 are lifted and scaled by one product, where products would else take longer than the memory.
constexpr bool AT_ONCE_LIFTED = W_CODE == CODE_E2M1 && FOLD && ROWS <= 64;

// ---- Arithmetic of two numbers of 16 bits ----

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 d;
#if BFLOAT
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
    return d;
}
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
    u32 d;
#if BFLOAT
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
    return d;
}
__device__ __forceinline__ u32 fma_pairs(u32 a, u32 b, u32 c) {
    u32 d;
#if BFLOAT
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
    return d;
}
// The bits of a where the mask has ones, else those of b: one instruction, which the compiler would make two of.
__device__ __forceinline__ u32 chosen_bits(u32 mask, u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}
// Two codes of e4m3 as float16, which holds them all.
__device__ __forceinline__ u32 halves_of_e4m3(u32 codes) {
    u32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(u16(codes)));
    return d;
}
__device__ __forceinline__ u32 both(u32 v) { return __byte_perm(v, v, 0x1010); }

// ---- Codes to numbers ----

constexpr u32 MAGIC = BFLOAT ? 0x43004300u : 0x64006400u;      // 128 or 1024, whose last bits count ones
// What a pair of e2m1 is multiplied by, whose bits stand where those of the 16-bit format do: 2^126 or 2^14.
constexpr u32 LIFT = BFLOAT ? 0x7E807E80u : 0x74007400u;

// What codes are joined with. An instruction has room for one constant, and the assembler would load the other one into a register
// each time: so these are no constants, but have `nothing` added, which is zero and only known when the kernel runs.
struct Masks {
    u32 count = 0x000F000Fu, magic = MAGIC;
    __device__ __forceinline__ void keep(u32 nothing) { count += nothing, magic += nothing; }
};

// The codes of int4 or uint4 in the low four bits of both halves.
__device__ __forceinline__ u32 pair_of_counts(u32 v, const Masks& masks = {}) {
    const u32 shift = W_CODE == CODE_INT4 ? 0x00080008u : 0;    // of two's complement to counting from -8
    return subtract_pairs((v & masks.count) ^ (MAGIC | shift), MAGIC | shift);
}

// Byte c of a word: two codes of four bits, the one with the lower k in its low half. `place` puts it twice into t, so that they
// are the upper half of t's second and of its fourth byte. Numbers of e2m1 are still to be lifted.
__device__ __forceinline__ u32 place_of_byte(int c) { return u32(c << 12 | (4 + c) << 4); }
__device__ __forceinline__ u32 pair_of_nibbles(u32 word, u32 place) {
    const u32 t = __byte_perm(word, word << 4, place);
    if (W_CODE == CODE_E2M1) return (t & 0x80008000u) | (BFLOAT ? t >> 6 & 0x01C001C0u : t >> 3 & 0x0E000E00u);
    return pair_of_counts(t >> 12);
}

// The bytes of int8 in the low half of both halves; what is above them does not count.
__device__ __forceinline__ u32 pair_of_even_bytes(u32 v, const Masks& masks = {}) {
    if (BFLOAT) return subtract_pairs((v & 0x007F007Fu) | masks.magic, (v & 0x00800080u) | masks.magic);        // 7 bits less 0 or 128
    return subtract_pairs((v & 0x00FF00FFu) ^ (MAGIC | 0x00800080u), 0x64806480u);
}

// Two bytes, the one with the lower k first.
__device__ __forceinline__ u32 pair_of_bytes(u32 codes) {
    if (W_CODE == CODE_I8) return pair_of_even_bytes(__byte_perm(codes, 0, 0x4140));
    const u32 halves = W_CODE == CODE_E4M3 ? halves_of_e4m3(codes) : __byte_perm(codes, 0, 0x1404);
    return BFLOAT ? pack_bf16(to_float(f16{u16(halves)}), to_float(f16{u16(halves >> 16)})) : halves;
}

// What a pair of weights is multiplied by for its scale in e8m0, both halves alike. Lifting e2m1 as well reaches to
// 2^0: larger scales are multiplied by `factor_of` that limit, and by `rest_of` themselves.
__device__ __forceinline__ u32 factor_of(u32 code) {
    if (AT_ONCE_LIFTED) return code * 0x00800080u + 0x3F003F00u;
    return code * 0x00800080u | (code == 0 ? 0x00400040u : 0u) | (code == 255 ? 0x00400040u : 0u);
}
__device__ __forceinline__ u32 rest_of(u32 code) { return code == 255 ? 0x7FC07FC0u : max(code, 127u) * 0x00800080u; }

#if !LOW
// ---- The bytes of a stage ----

// One thread's bytes of 64 of k. Columns of 64 bytes lie swizzled (hopper_weights.py), those of 32 bytes as they are.
struct Codes {
    uint4 line[2][2];               // four bits: all 64 codes of both columns
    u32 at[4];                      // else: where the codes of each 16 of k stand

    // `piece`: which 64 of a stage's k.
    __device__ __forceinline__ void load(u32 stage, int half, int piece) {
        const int lane = threadIdx.x & 31, column = half * 64 + ((threadIdx.x & 127) >> 5) * 16 + (lane >> 2);
        constexpr int IN_BOX = DEEP / W_BOXES;          // pieces of a box
        const u32 start = stage + piece / IN_BOX * (COLUMNS * W_LINE) + column * W_LINE, turn = W_LINE == 64 ? column >> 1 & 3 : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (FOUR_BITS) line[i >> 1][i & 1] = load_shared16(start + (i >> 1) * 8 * W_LINE + ((piece % IN_BOX * 2 + (i & 1)) ^ turn) * 16);
            else at[i] = start + (i ^ turn) * 16 + (lane & 3) * 2;
        }
    }
    // The first operand of 16 of k: columns lower and upper at the lower k, then both at the upper.
    __device__ __forceinline__ u32 pair(int k, int i, u32 place) const {
        const int column = i & 1, upper = i >> 1;
        if (!FOUR_BITS) return pair_of_bytes(load_shared_half(at[k] + column * 8 * W_LINE + upper * 8));
        const uint4& v = line[column][k >> 1];
        return pair_of_nibbles((k & 1) ? (upper ? v.w : v.z) : (upper ? v.y : v.x), place);
    }
};

// ---- Scales and zero points of a thread's columns, which it reads from memory itself ----

constexpr int PER_STAGE = SCALE_K == 32 ? 2 * DEEP : SCALE_K == 64 ? DEEP : SCALE_K == 128 && DEEP > 2 ? DEEP / 2 : 1;      // blocks of k that a stage has numbers of
constexpr int AHEAD = SCALE_K == 0 ? 1 : ROWS > 64 || DEEP > 1 ? 2 : 4;      // stages whose numbers are held or on their way

template <int CODE> __device__ __forceinline__ u32 load_code(const char* at) {
    return bytes_of(CODE) == 4 ? *(const u32*)at : bytes_of(CODE) == 2 ? *(const u16*)at : *(const u8*)at;
}

// One column's numbers of AHEAD stages, each in registers of its own, which nothing else touches until they are used: a move
// would wait for the memory. TWO: two blocks' are bytes side by side, of an even number.
template <int CODE, bool TWO> struct Queue {
    static constexpr int COUNT = TWO ? PER_STAGE / 2 : PER_STAGE;
    const char* at;
    i64 step;                       // bytes from block to block
    u32 held[AHEAD][COUNT];

    // Blocks behind the last one have its number: there rows and codes are zeros, and a NaN is that of the column's results.
    __device__ __forceinline__ void ask(int slot, int stage, int blocks) {
        const int first = SCALE_K == 128 && DEEP == 1 ? stage >> 1 : stage * PER_STAGE;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (TWO) held[slot][i] = *(const u16*)(at + min(first + 2 * i, blocks - 2));
            else held[slot][i] = load_code<CODE>(at + min(first + i, blocks - 1) * step);
        }
    }
    __device__ __forceinline__ void begin(const GroupGrid& g, i64 column, int blocks, u32 absent) {
        at = g.ptr ? entry_of(g, column, 0) : nullptr, step = g.k * bytes_of(CODE);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (at) ask(i, i, blocks);
            else held[i][0] = absent;           // one for all of k
        }
    }
    __device__ __forceinline__ u32 code(int slot, int block) const {
        return TWO ? held[slot][block / 2] >> (8 * (block & 1)) & 0xFF : held[slot][block < COUNT ? block : 0];
    }
};

__device__ __forceinline__ constexpr u32 one_of(int code) {
    return code == CODE_F32 ? 0x3F800000u : code == CODE_F16 ? 0x3C00u : code == CODE_BF16 ? 0x3F80u : code == CODE_E8M0 ? 127u : 0u;
}

// Both columns.
struct Numbers {
    Queue<SCALE_CODE, PAIRS> scale[2];
    Queue<ZEROS ? ZERO_CODE : CODE_U8, false> zero[2];
    int blocks;                     // of the group's k

    // Columns that do not exist have the numbers of the last one: their results are never stored.
    __device__ __forceinline__ void begin(const GroupGrid& scales, const GroupGrid& zeros, i64 column, i64 columns, int k) {
        blocks = SCALE_K ? (k + SCALE_K - 1) / (SCALE_K ? SCALE_K : 1) : 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const i64 known = min64(column + i * 8, columns - 1);
            scale[i].begin(scales, known, blocks, one_of(SCALE_CODE));
            if (ZEROS) zero[i].begin(zeros, known, blocks, 0);
        }
    }
    // A slot's numbers were the last time used: those of a later stage are asked for.
    __device__ __forceinline__ void ask(int slot, int stage) {
        if (SCALE_K == 0) return;                               // one holds for all of k
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scale[i].ask(slot, stage, blocks);
            if (ZEROS) zero[i].ask(slot, stage, blocks);
        }
    }
    __device__ __forceinline__ float factor(int slot, int column, int block) const { return decode<SCALE_CODE>(scale[column].code(slot, block)); }
    __device__ __forceinline__ u32 zeros(int slot, int column, int block) const {
        const float z = decode<ZEROS ? ZERO_CODE : CODE_U8>(zero[column].code(slot, block));
        return pack_pair(z, z);
    }
    // Whether some scale of e2m1 is beyond what `factor_of` reaches.
    __device__ __forceinline__ bool large(int slot) const {
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < Queue<SCALE_CODE, PAIRS>::COUNT; ++j) codes |= scale[i].held[slot][j];
        return codes & 0x8080u;
    }
};
#endif
