// Offsets of groups that come with the launch as its argument, so that nothing is copied to the device before. The first
// block writes ends for torch's grouped_mm (`ends`, from the first offset on), and where the products of one
// cublasGemmGroupedBatchedEx lie (`table`). The others, if there are any, zero what no group owns: rows before the first
// and behind the last group of a result that groups share, or the results of groups without tokens (`each` has its own).
//
// Defined by the compiler's options: MOST (groups).
typedef long long i64;
struct Groups {
    i64* table;
    int* ends;
    char* out;
    i64 bases[3], of_group[3], of_token[3];  // bytes, of the first operands, the second ones and the results
    i64 line, lines;                         // bytes of a row, or of a group's result, a multiple of 16; rows
    int groups, count, each;                 // groups, products, whether each group has its own result
    int offsets[MOST + 1];
    unsigned short order[MOST];              // the group of each product
};

__device__ void zero(char* from, i64 words, i64 first, i64 step) {
    for (i64 at = first; at < words; at += step) ((int4*)from)[at] = make_int4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(256) place_groups(const Groups t) {
    int start = t.offsets[0], end = t.offsets[t.groups];
    if (blockIdx.x == 0) {
        for (int g = threadIdx.x; g < t.groups; g += blockDim.x) t.ends[g] = t.offsets[g + 1] - start;
        for (int i = threadIdx.x; i < t.count; i += blockDim.x) {
            i64 g = t.order[i], token = t.offsets[g];
            for (int row = 0; row < 3; row++)
                t.table[row * t.groups + i] = t.bases[row] + g * t.of_group[row] + token * t.of_token[row];
        }
        return;
    }
    i64 first = (blockIdx.x - 1) * (i64)blockDim.x + threadIdx.x, step = (gridDim.x - 1) * (i64)blockDim.x;
    if (t.each) {
        for (int g = 0; g < t.groups; g++)
            if (t.offsets[g] == t.offsets[g + 1]) zero(t.out + g * t.line, t.line / 16, first, step);
        return;
    }
    zero(t.out, start * t.line / 16, first, step);
    zero(t.out + end * t.line, (t.lines - end) * t.line / 16, first, step);
}
