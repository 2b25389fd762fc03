// Turns offsets, ends or sizes (`sums`) that may lie into ends that torch's grouped_mm can be trusted with: int32, between
// 0 and T, never falling. Its other blocks, if there are any, zero the rows behind the last group; launched again `after`
// grouped_mm it zeroes the rows before the first (1), or before the first and behind the last (2). Where the caller's
// rows before the first group must be kept, it deals the groups out to one of two calls: to the one that writes in place
// if there are no such rows, else to the one that writes aside; the other call gets empty groups.
// Both launches may begin while the kernel before them ends: see `wait_for_what_runs_before`.
typedef long long i64;
struct Bounds {
    const void* ends;
    int *result, *first_two, *aside;
    char* out;
    i64 row_bytes, width, extent;
    int groups, wide, head, sums, after;
};

// A launch that may begin early has to wait before it reads or writes what the kernel before it writes or reads, and in
// any case before it ends: the kernel behind it waits for it alone.
__device__ void wait_for_what_runs_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ i64 number_at(const Bounds& t, int g) {
    return t.wide ? ((const i64*)t.ends)[g] : (i64)((const int*)t.ends)[g];
}

__device__ i64 clamped(const Bounds& t, i64 v) { return v < 0 ? 0 : v > t.extent ? t.extent : v; }

// Rows from `row` on, every `step`th, up to `end`: in aligned words of eight elements.
__device__ void zero_rows(const Bounds& t, i64 row, i64 end, i64 step) {
    for (; row < end; row += step) {
        char* line = t.out + row * t.row_bytes;
        for (i64 at = threadIdx.x; at < t.width / 8; at += blockDim.x) ((int4*)line)[at] = make_int4(0, 0, 0, 0);
        for (i64 at = t.width / 8 * 8 + threadIdx.x; at < t.width; at += blockDim.x) ((short*)line)[at] = 0;
    }
}

// Where the group of this thread ends, not clamped. Sums of sizes wrap, as torch's do.
__device__ i64 end_of(const Bounds& t, int g) {
    if (!t.sums) return g < t.groups ? number_at(t, g) : 0;
    __shared__ unsigned long long scan[2][1024];
    int now = 0;
    scan[0][g] = g < t.groups ? (unsigned long long)number_at(t, g) : 0;
    __syncthreads();
    for (int step = 1; step < t.groups; step *= 2) {
        scan[now ^ 1][g] = g >= step ? scan[now][g] + scan[now][g - step] : scan[now][g];
        now ^= 1;
        __syncthreads();
    }
    return (i64)scan[now][g];
}

extern "C" __global__ void __launch_bounds__(1024) clamp_offsets(const Bounds t) {
    __shared__ int scan[2][1024];
    __shared__ i64 last;
    int g = threadIdx.x, now = 0;
    if (t.after) {  // the first launch has written these: it was over before grouped_mm, which leaves the last rows alone
        if (t.after == 2) zero_rows(t, t.result[t.groups - 1] + (i64)blockIdx.x, t.extent, gridDim.x);
        wait_for_what_runs_before();
        zero_rows(t, blockIdx.x, t.first_two[0], gridDim.x);
        return;
    }
    wait_for_what_runs_before();
    i64 end = end_of(t, g);
    if (blockIdx.x) {
        if (g == t.groups - 1) last = clamped(t, end);
        __syncthreads();
        return zero_rows(t, last + (i64)blockIdx.x - 1, t.extent, gridDim.x - 1);
    }
    int start = t.head ? (int)clamped(t, number_at(t, -1)) : 0;
    scan[0][g] = g < t.groups ? max((int)clamped(t, end), start) : 0;
    __syncthreads();
    for (int step = 1; step < t.groups; step *= 2) {
        scan[now ^ 1][g] = g >= step ? max(scan[now][g], scan[now][g - step]) : scan[now][g];
        now ^= 1;
        __syncthreads();
    }
    bool apart = t.aside && start > 0;
    if (g < t.groups) t.result[g] = apart ? 0 : scan[now][g];
    if (g < t.groups && t.aside) t.aside[g] = apart ? scan[now][g] : 0;
    if (g == 0) { t.first_two[0] = start; t.first_two[1] = scan[now][0]; }
}
