// Sums of rows in a fixed order: out[r] = sum over j of weights[r, j] * y[index[r, j]], j ascending, + beta * C; or, of
// sorted places, of the rows y[order[at]] whose place is r, ascending. An index that means no row, or one that no group
// owns, adds nothing: neither the row nor its weight is read.
//
// Y is the type of the rows, which lie one behind the other; a warp sums VECTOR columns per lane of one row.
#include "epilogue.cuh"

#if Y_TYPE == 4
typedef double Acc;
#else
typedef float Acc;
#endif
constexpr int SIZE = size_of(Y_TYPE), THREADS = 256, AHEAD = 8;
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
    int groups, head, ends64, index64, weights_type, out_type, c_type, whole_out;      // whole_out: rows of whole, aligned 16 bytes
};

// Rows that some group owns, whatever the offsets say.
struct Owned { i64 first, end; };
__device__ __forceinline__ Owned owned_rows(const Sum& s) {
    Owned r = {0, 0};
    if (s.groups == 0) return r;
    if (s.head) r.first = min64(max64(read_index(s.ends, s.ends64, -1), 0), s.tokens);
    r.end = min64(max64(read_index(s.ends, s.ends64, s.groups - 1), 0), s.tokens);
    return r;
}

// Neighbours of a row, as they lie in memory.
union Piece {
    uint4 words;
    char bytes[16];

    __device__ __forceinline__ void load(const char* from) {
        if constexpr (WIDE) words = *(const uint4*)from;
        else if constexpr (SIZE == 2) *(u16*)bytes = *(const u16*)from;
        else if constexpr (SIZE == 4) *(u32*)bytes = *(const u32*)from;
        else *(u64*)bytes = *(const u64*)from;
    }
    __device__ __forceinline__ void add_to(Acc (&sum)[VECTOR], Acc weight) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += weight * load_as<Acc>(bytes + i * SIZE, Y_TYPE);
    }
};

// The first of sorted places that is not before a row.
__device__ __forceinline__ i64 first_from(const Sum& s, i64 row) {
    i64 low = 0, high = s.tokens;
    while (low < high) {
        const i64 middle = (low + high) >> 1;
        if (read_index(s.index, s.index64, middle) < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_rows(const __grid_constant__ Sum s) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");           // the rows come from the launch before
#endif
    const i64 across = ceil_div(s.columns, 32 * VECTOR), unit = i64(blockIdx.x) * (THREADS / 32) + (threadIdx.x >> 5);
    const i64 row = unit / across, column = (unit - row * across) * (32 * VECTOR) + (threadIdx.x & 31) * VECTOR;
    if (row >= s.rows || column >= s.columns) return;
    const Owned owned = owned_rows(s);
    Acc sum[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] = 0;
    const char* const y = s.y + column * SIZE;
    const i64 first = s.order ? first_from(s, row) : row * s.terms, end = s.order ? first_from(s, row + 1) : first + s.terms;
#pragma unroll 1
    for (i64 at = first; at < end; at += AHEAD) {
        i64 token[AHEAD];
        Piece piece[AHEAD];
        Acc weight[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            token[j] = -1;
            if (at + j < end) token[j] = s.order ? __ldg(s.order + at + j) : read_index(s.index, s.index64, at + j);
            if (token[j] < owned.first || token[j] >= owned.end) token[j] = -1;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            if (token[j] < 0) continue;
            piece[j].load(y + token[j] * s.columns * SIZE);
            weight[j] = s.weights ? load_as<Acc>(s.weights + (at + j) * size_of(s.weights_type), s.weights_type) : Acc(1);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            if (token[j] >= 0) piece[j].add_to(sum, weight[j]);
    }
    char* const out = s.out + (row * s.out_row + column * s.out_col) * size_of(s.out_type);
    if (s.c) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += Acc(s.beta) * load_as<Acc>(s.c + (row * s.c_row + (column + i) * s.c_col) * size_of(s.c_type), s.c_type);
    }
    if (s.whole_out && s.out_type == Y_TYPE) {
        Piece piece;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) store_as<Acc>(piece.bytes + i * SIZE, Y_TYPE, sum[i]);
        *(uint4*)out = piece.words;
        return;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) store_as<Acc>(out + i * s.out_col * size_of(s.out_type), s.out_type, sum[i]);
}
