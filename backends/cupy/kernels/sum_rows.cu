// Sums of rows in a fixed order: out[r] = sum over j of weights[r, j] * y[index[r, j]], j ascending, + beta * C; or, of
// sorted places, of the rows y[order[at]] whose place is r, ascending. An index that means no row, or one that no group
// owns, adds nothing: the row is not read, and its weight not used.
//
// Y_TYPE is the type of the rows, which lie one behind the other; a block sums columns of one row, VECTOR of them per thread, and a
// thread has AHEAD of them under way. SORTED: places come with an order. WEIGHTS: their type, or 0. INDEX64: the numbers' width.
#include "epilogue.cuh"

#if Y_TYPE == 4
typedef double Acc;
#else
typedef float Acc;
#endif
constexpr int SIZE = size_of(Y_TYPE), MOST_THREADS = 128;
// Blocks of a multiprocessor: a block waits for its indices and then for its rows, and others have to fill that time.
constexpr int RESIDENT = SIZE != 2 || !WIDE ? 5 : AHEAD > 4 ? 8 : INDEX64 ? 10 : 12;
constexpr int VECTOR = WIDE ? 16 / SIZE : 1;

// Field by field as `SUM` in fused.py.
struct Sum {
    const char *y, *c;
    char* out;
    const void *ends, *index;
    const i64* order;               // of sorted places: which row goes there; else null
    const char* weights;
    i64 tokens, columns, rows, terms, out_row, out_col, c_row, c_col;
    double beta;
    int groups, head, ends64, out_type, c_type;
    int whole_out, across;          // rows of whole, aligned 16 bytes; blocks of a row
};

// Numbers as they lie in memory. What is loaded is converted as late as possible: a conversion waits for the memory.
template <int BYTES> struct Bits { typedef u64 Type; };
template <> struct Bits<4> { typedef int Type; };
template <> struct Bits<2> { typedef u16 Type; };
typedef Bits<SORTED || INDEX64 ? 8 : 4>::Type Number;
typedef Bits<WEIGHTS ? size_of(WEIGHTS) : 2>::Type Weight;

// Rows that some group owns, whatever the offsets say. Even lanes ask for where the groups begin, odd ones for where they end: what
// is the same for a whole warp, the compiler would keep once for it, and wait for it at once.
struct Owned {
    i64 mine = 0;

    __device__ __forceinline__ void load(const Sum& s) {
        const bool end = threadIdx.x & 1;
        if (s.groups > 0 && (end || s.head)) mine = read_index(s.ends, s.ends64, end ? s.groups - 1 : -1);
    }
    __device__ __forceinline__ int row(const Sum& s, i64 named) const {
        const int bound = int(min64(max64(mine, 0), s.tokens)), first = __shfl_sync(~0u, bound, 0), end = __shfl_sync(~0u, bound, 1);
        return named >= first && named < end ? int(named) : -1;
    }
};

// Neighbours of a row, as they lie in memory.
union Piece {
    uint4 words;
    u32 word[4];
    u64 pair[2];

    __device__ __forceinline__ void load(const char* from) {
        if constexpr (WIDE) words = *(const uint4*)from;
        else if constexpr (SIZE == 2) word[0] = *(const u16*)from;
        else if constexpr (SIZE == 4) word[0] = *(const u32*)from;
        else pair[0] = *(const u64*)from;
    }
    __device__ __forceinline__ Acc at(int i) const {
        if constexpr (Y_TYPE == F16) return to_float(f16{u16(word[i / 2] >> 16 * (i % 2))});
        else if constexpr (Y_TYPE == BF16) return to_float(bf16{u16(word[i / 2] >> 16 * (i % 2))});
        else return load_as<Acc>((const char*)word + i * SIZE, Y_TYPE);
    }
    __device__ __forceinline__ void add_to(Acc (&sum)[VECTOR], Acc weight) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += weight * at(i);
    }
    // What is summed, in the rows' type.
    __device__ __forceinline__ void round(const Acc (&sum)[VECTOR]) {
        if constexpr (SIZE == 2) {
#pragma unroll
            for (int i = 0; i < VECTOR / 2; ++i) word[i] = Y_TYPE == F16 ? pack_f16(sum[i * 2], sum[i * 2 + 1]) : pack_bf16(sum[i * 2], sum[i * 2 + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) store_as<Acc>((char*)word + i * SIZE, Y_TYPE, sum[i]);
        }
    }
};

// The first of sorted places that is not before a row.
__device__ __forceinline__ i64 first_from(const Sum& s, i64 row) {
    i64 low = 0, high = s.tokens;
    while (low < high) {
        const i64 middle = (low + high) >> 1;
        if (read_index(s.index, INDEX64, middle) < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

// `count` rows that the index names from `first` on. Each lane of a warp reads the number and the weight of one of AHEAD rows, and
// all lanes get them from it; then the loads of the rows are on their way at once.
__device__ __forceinline__ void add_rows(const Sum& s, const char* y, bool inside, i64 first, int count, Acc (&sum)[VECTOR]) {
    const Number* const numbers = (const Number*)(SORTED ? (const void*)s.order : s.index) + first;
    const Weight* const weights = (const Weight*)s.weights + first;
    const i64 pitch = s.columns * SIZE;
    Owned owned;
#pragma unroll 1
    for (int at = 0; at < count; at += AHEAD) {
        const int mine = at + (threadIdx.x & (AHEAD - 1)), known = min(mine, count - 1);
        const Number number = numbers[known];
        const Weight weight = WEIGHTS ? weights[known] : Weight(0);
        if (at == 0) owned.load(s);                 // here, so that it is on its way together with the first numbers
        int own_row = owned.row(s, i64(number));
        if (mine >= count) own_row = -1;
        Piece piece[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int row = __shfl_sync(~0u, own_row, j);
            if (row >= 0 && inside) piece[j].load(y + row * pitch);
        }
        const Acc own_weight = WEIGHTS ? load_as<Acc>((const char*)&weight, WEIGHTS) : Acc(1);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const Acc factor = __shfl_sync(~0u, own_weight, j);
            if (__shfl_sync(~0u, own_row, j) >= 0) piece[j].add_to(sum, factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, RESIDENT) sum_rows(const __grid_constant__ Sum s) {
    start_next_launch();
    wait_for_last_launch();                     // the rows come from the launch before
    const u32 block = blockIdx.x, across = s.across;
    const i64 row = block / across, column = i64((block % across) * blockDim.x + threadIdx.x) * VECTOR;
    Acc sum[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] = 0;
    const char* const y = s.y + column * SIZE;
    const i64 first = SORTED ? first_from(s, row) : row * s.terms, end = SORTED ? first_from(s, row + 1) : first + s.terms;
    add_rows(s, y, column < s.columns, first, int(end - first), sum);
    if (column >= s.columns) return;
    char* const out = s.out + (row * s.out_row + column * s.out_col) * size_of(s.out_type);
    if (s.c) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += Acc(s.beta) * load_as<Acc>(s.c + (row * s.c_row + (column + i) * s.c_col) * size_of(s.c_type), s.c_type);
    }
    if (s.whole_out && s.out_type == Y_TYPE) {
        Piece piece;
        piece.round(sum);
        *(uint4*)out = piece.words;
        return;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) store_as<Acc>(out + i * s.out_col * size_of(s.out_type), s.out_type, sum[i]);
}
