// CUTLASS' grouped GEMM for sm_80 on the operands of a workload of the suite moe: rows [T, K], weights [G, K, N], bfloat16.
// before_hopper.py says how it is built and calls it.
#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/device/gemm_grouped.h>
#include <cutlass/gemm/kernel/default_gemm_grouped.h>

#include <vector>

namespace {

using Element = cutlass::bfloat16_t;
using Rows = cutlass::layout::RowMajor;

template <int M, int N, int K, int WARP_M, int WARP_N, int STAGES>
using Product = cutlass::gemm::device::GemmGrouped<typename cutlass::gemm::kernel::DefaultGemmGrouped<
    Element, Rows, cutlass::ComplexTransform::kNone, 8, Element, Rows, cutlass::ComplexTransform::kNone, 8, Element, Rows, float,
    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<M, N, K>,
    cutlass::gemm::GemmShape<WARP_M, WARP_N, K>, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<Element, 8, float, float>,
    cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, STAGES,
    cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>::GemmKernel>;

struct Kernel {
    virtual int run(cudaStream_t stream) = 0;
    virtual ~Kernel() = default;
};

template <typename T>
T* on_device(const std::vector<T>& values) {
    T* made = nullptr;
    cudaMalloc(&made, values.size() * sizeof(T));
    cudaMemcpy(made, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
    return made;
}

// A product ready to run. Its small tables live as long as the process.
template <typename Gemm>
struct Made : Kernel {
    Gemm gemm;
    cutlass::Status status = cutlass::Status::kErrorInternal;

    Made(int groups, const int* sizes, int n, int k, Element* a, Element* b, Element* out) {
        std::vector<cutlass::gemm::GemmCoord> extents;
        std::vector<Element*> as, bs, outs;
        for (int g = 0; g < groups; ++g) {
            extents.push_back({sizes[g], n, k});
            as.push_back(a), bs.push_back(b), outs.push_back(out);
            a += std::int64_t(sizes[g]) * k, b += std::int64_t(n) * k, out += std::int64_t(sizes[g]) * n;
        }
        const int blocks = Gemm::sufficient(extents.data(), groups);
        if (blocks == 0) return;
        std::int64_t *by_k = on_device(std::vector<std::int64_t>(groups, k)), *by_n = on_device(std::vector<std::int64_t>(groups, n));
        Element** results = on_device(outs);
        typename Gemm::Arguments arguments(on_device(extents), groups, blocks, {1.f, 0.f}, on_device(as), on_device(bs), results,
                                           results, by_k, by_n, by_n, by_n, extents.data());
        void* workspace = nullptr;
        if (const size_t bytes = gemm.get_workspace_size(arguments)) cudaMalloc(&workspace, bytes);
        status = gemm.initialize(arguments, workspace);
    }
    int run(cudaStream_t stream) override { return int(status == cutlass::Status::kSuccess ? gemm.run(stream) : status); }
};

}  // namespace

extern "C" void* make(int tile, int groups, const int* sizes, int n, int k, Element* a, Element* b, Element* out) {
    switch (tile) {
        case 0: return new Made<Product<128, 128, 32, 64, 64, 4>>(groups, sizes, n, k, a, b, out);
        case 1: return new Made<Product<128, 256, 64, 64, 64, 3>>(groups, sizes, n, k, a, b, out);
        case 2: return new Made<Product<128, 128, 64, 64, 64, 3>>(groups, sizes, n, k, a, b, out);
        case 3: return new Made<Product<128, 256, 32, 64, 64, 3>>(groups, sizes, n, k, a, b, out);
        case 4: return new Made<Product<256, 128, 32, 64, 64, 3>>(groups, sizes, n, k, a, b, out);
        case 5: return new Made<Product<64, 128, 64, 32, 64, 4>>(groups, sizes, n, k, a, b, out);
        default: return nullptr;
    }
}

extern "C" int run(void* kernel, cudaStream_t stream) { return static_cast<Kernel*>(kernel)->run(stream); }
