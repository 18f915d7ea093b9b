// The kernels of GPUs. NVRTC compiles this file alone; gpu.cc looks up its functions by their names.
#include "one_particle.h"

namespace flowpm {

template <typename Index, bool spectral, typename Call>
__device__ __forceinline__ void work(const Call& call) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x, count = length(call);
  for (int64_t b = blockIdx.y; b < rows(call); b += gridDim.y) {
    double totals[3] = {0, 0, 0};
    for (int64_t p = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; p < count; p += stride) {
      one<Index, spectral>(call, b, p, totals);
    }
    if constexpr (Totals<Call>::kCount > 0) {
      // The lanes of a warp have come back together: one of them delivers for all.
      for (int t = 0; t < Totals<Call>::kCount; ++t) {
        for (int apart = 16; apart > 0; apart /= 2) {
          const double other = __shfl_down_sync(0xffffffffu, totals[t], apart);
          if constexpr (Totals<Call>::kLargest) {
            if (other > totals[t]) totals[t] = other;
          } else {
            totals[t] += other;
          }
        }
      }
      if (threadIdx.x % 32 == 0) deliver(call, b, totals);
    }
  }
}

// The blocks for which a multiprocessor must have registers; 0: the compiler chooses.
template <typename Call>
constexpr int kBlocks = 0;
template <>
constexpr int kBlocks<ForceVjp<float>> = 2;

}  // namespace flowpm

#define FLOWPM_KERNEL(CALL, T, ENDING, INDEX, SPECTRAL)                              \
  extern "C" __global__ void __launch_bounds__(256, flowpm::kBlocks<flowpm::CALL<T>>) \
      flowpm_##CALL##_##T##ENDING(const __grid_constant__ flowpm::CALL<T> call) {    \
    flowpm::work<INDEX, SPECTRAL>(call);                                             \
  }
#define FLOWPM_KERNELS(CALL, ENDING, INDEX, SPECTRAL)  \
  FLOWPM_KERNEL(CALL, float, ENDING, INDEX, SPECTRAL) \
  FLOWPM_KERNEL(CALL, double, ENDING, INDEX, SPECTRAL)
#define FLOWPM_NARROW(CALL) FLOWPM_KERNELS(CALL, , int32_t, false)
#define FLOWPM_WIDE(CALL) FLOWPM_KERNELS(CALL, _wide, int64_t, false)
#define FLOWPM_SPECTRAL(CALL)                     \
  FLOWPM_KERNELS(CALL, _spectral, int32_t, true) \
  FLOWPM_KERNELS(CALL, _spectral_wide, int64_t, true)
FLOWPM_CALLS(FLOWPM_NARROW)
FLOWPM_MESH_CALLS(FLOWPM_WIDE)
FLOWPM_FORCE_CALLS(FLOWPM_WIDE)
FLOWPM_FORCE_CALLS(FLOWPM_SPECTRAL)

extern "C" __global__ void flowpm_finish_float(const __grid_constant__ flowpm::Paint<float> call) {
  flowpm::finish(call);
}
extern "C" __global__ void flowpm_finish_double(const __grid_constant__ flowpm::Paint<double> call) {
  flowpm::finish(call);
}
