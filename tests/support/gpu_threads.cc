// The threads of a GPU one after the other: each warp of 32 delivers its totals once, as in gpu.cu.
#include <algorithm>
#include <cstring>

#include "one_particle.h"

namespace flowpm {
namespace {

template <typename Index, bool spectral, typename Call>
void run_as(const Call& call) {
  for_sums(call, [](void* memory, size_t bytes) { std::memset(memory, 0, bytes); });
  for (int64_t b = 0; b < rows(call); ++b) {
    for (int64_t first = 0; first < length(call); first += 32) {
      double totals[3] = {0, 0, 0};
      for (int64_t p = first; p < std::min(first + 32, length(call)); ++p) {
        one<Index, spectral>(call, b, p, totals);
      }
      deliver(call, b, totals);
    }
  }
  finish(call);
}

template <typename Call>
void run(const Call& call, bool wide) {
  if (wide) {
    is_spectral(call) ? run_as<int64_t, true>(call) : run_as<int64_t, false>(call);
  } else {
    is_spectral(call) ? run_as<int32_t, true>(call) : run_as<int32_t, false>(call);
  }
}

}  // namespace
}  // namespace flowpm

#define FLOWPM_THREADS_OF(CALL, T)                                      \
  extern "C" void CALL##_##T(const flowpm::CALL<T>* call, bool wide) { \
    flowpm::run(*call, wide);                                          \
  }
#define FLOWPM_THREADS(CALL) FLOWPM_THREADS_OF(CALL, float) FLOWPM_THREADS_OF(CALL, double)
FLOWPM_CALLS(FLOWPM_THREADS)

extern "C" bool is_wide(const flowpm::Geometry* g) {
  return flowpm::is_wide(flowpm::Paint<float>{*g});
}
