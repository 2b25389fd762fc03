// Scales and zero points of quantised weights on their way into shared memory, by cp.async, in sets that serve SET_STAGES stages of a
// tile, or all of it. It copies 4, 8 or 16 bytes from a multiple of as many: so numbers that are smaller, or lie otherwise, come in
// the aligned words that hold them, and who reads them knows how far in they begin. A set has room for several stages because
// memory is read 32 bytes at a time, which is what a column's numbers of so many stages often take.
//
// Compile-time choices: SCALE_K, SCALE_CODE, ZERO_CODE as in weights.cuh; SET_STAGES; SCALE_RUN: how many of a column's numbers in a
// set lie side by side (all or one), SCALE_ALIGN: what each of these runs begins at a multiple of, in bytes. Where single
// numbers are aligned to more than their size, columns lie side by side, and lines of them begin there. Zero points lie as scales do.
#pragma once
#include "pipeline.cuh"
#include "scales.cuh"

constexpr int STAGE_NUMBERS = SCALE_K ? BK / (SCALE_K ? SCALE_K : 1) : 0;      // of a column
constexpr int SET_NUMBERS = SCALE_K ? SET_STAGES * STAGE_NUMBERS : 1;
static_assert(SCALE_K == 0 || STAGE_NUMBERS > 0, "a stage holds a block of k");

// Where the numbers of a set lie: of each run one column after the other, in pieces. ACROSS: pieces are of several columns.
template <int CODE, int RUN, int ALIGN> struct NumberPieces {
    static constexpr int SIZE = bytes_of(CODE), RUNS = SET_NUMBERS / RUN, LENGTH = RUN * SIZE;
    static constexpr bool ACROSS = RUN == 1 && ALIGN > SIZE && ALIGN >= 4;
    static constexpr int POWER = LENGTH & -LENGTH, ALIGNED = ACROSS || ALIGN < POWER ? ALIGN : POWER;      // runs begin at multiples of it
    static constexpr bool WHOLE = ALIGNED >= 4;                                 // pieces begin and end with their run
    static constexpr int PIECE = ALIGNED >= 16 ? 16 : ALIGNED >= 8 ? 8 : 4, PIECES = WHOLE ? LENGTH / PIECE : (LENGTH + 4 - ALIGNED + 3) / 4;
    static constexpr int COLUMN = ACROSS ? SIZE : PIECES * PIECE, BYTES = RUNS * COLUMNS * COLUMN;
};

// The warp that copies them, lanes side by side along a run, or across columns if ACROSS. Blocks of k that do not exist have zeros,
// which meet zeros; columns that do not exist have the numbers of the last one, or zeros if ACROSS.
template <int CODE, int RUN, int ALIGN> struct NumberCopies : NumberPieces<CODE, RUN, ALIGN> {
    typedef NumberPieces<CODE, RUN, ALIGN> Pieces;
    const char* at;                 // the first column's first number of the next set
    i64 pitch, step;                // bytes from one column to the next, from one block of k to the next
    int last, left;                 // the last column; blocks of k from the next set on

    __device__ __forceinline__ void begin(const GroupGrid& g, i64 column, i64 columns, int k) {
        at = g.ptr ? entry_of(g, column, 0) : nullptr, pitch = g.line_shift ? 0 : g.line * Pieces::SIZE, step = g.k * Pieces::SIZE;
        last = int(min64(columns - column, COLUMNS)) - 1, left = SCALE_K ? (k + SCALE_K - 1) / (SCALE_K ? SCALE_K : 1) : 1;
    }
    // Of columns that lie side by side.
    __device__ __forceinline__ void copy_lines(u32 to) const {
        constexpr int LINE = COLUMNS * Pieces::SIZE / Pieces::PIECE;
#pragma unroll 4
        for (int x = threadIdx.x & 31; x < Pieces::RUNS * LINE; x += 32) {
            const int run = x / LINE, start = x % LINE * Pieces::PIECE, bytes = run < left ? (last + 1) * Pieces::SIZE - start : 0;
            copy_part<Pieces::PIECE>(to + x * Pieces::PIECE, at + run * step + start, min(max(bytes, 0), Pieces::PIECE));
        }
    }
    __device__ __forceinline__ void copy(u32 to) {
        if (!at) return;
        if (Pieces::ACROSS) copy_lines(to);
#pragma unroll 1
        for (int run = 0; !Pieces::ACROSS && run < Pieces::RUNS; ++run) {
            const int numbers = min(left - run * RUN, RUN);
#pragma unroll 4
            for (int i = 0; i < COLUMNS * Pieces::PIECES / 32; ++i) {
                const int x = i * 32 + (threadIdx.x & 31), column = x / Pieces::PIECES, start = x % Pieces::PIECES * Pieces::PIECE;
                const char* const from = at + min(column, last) * pitch + run * step;
                const int before = Pieces::WHOLE ? 0 : int(u64(from) & 3), bytes = numbers > 0 ? before + numbers * Pieces::SIZE - start : 0;
                copy_part<Pieces::PIECE>(to + (run * COLUMNS * Pieces::PIECES + x) * Pieces::PIECE, from - before + start, min(max(bytes, 0), Pieces::PIECE));
            }
        }
        at += step * SET_NUMBERS, left -= SET_NUMBERS;
    }
};

// The numbers of a lane's two columns, eight apart, in its blocks of k: PASS_NUMBERS further on in a stage's second pass.
template <int CODE, int RUN, int ALIGN, int PASS_NUMBERS> struct LaneNumbers {
    typedef NumberPieces<CODE, RUN, ALIGN> Pieces;
    int column, first;              // of the tile's columns; the block of the first pass in a stage
    u32 low[2], step;               // how far in a run begins: the last bits of the first numbers' addresses, the same for each set
    static_assert(Pieces::WHOLE || SCALE_K == 0 || SET_NUMBERS % 4 == 0, "sets are a whole number of words apart");

    __device__ __forceinline__ void begin(const GroupGrid& g, i64 tile_column, int own, i64 columns, int block) {
        column = own, first = block, step = u32(g.k) * Pieces::SIZE;
        if (Pieces::WHOLE) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) low[i] = g.ptr ? u32(u64(entry_of(g, min64(tile_column + column + i * 8, columns - 1), 0))) : 0;
    }
    // `numbers`: where the set lies; `stage` of those that it serves.
    __device__ __forceinline__ u32 code(u32 numbers, int stage, int i, int pass) const {
        const int block = first + stage * STAGE_NUMBERS + pass * PASS_NUMBERS;
        u32 from = numbers + (column + i * 8) * Pieces::COLUMN + block * (RUN == 1 ? COLUMNS * Pieces::COLUMN : Pieces::SIZE);
        if (!Pieces::WHOLE) from += (RUN == 1 ? low[i] + block * step : low[i]) & 3;
        return Pieces::SIZE == 4 ? load_shared_word(from) : Pieces::SIZE == 2 ? load_shared_half(from) : load_shared_byte(from);
    }
};
