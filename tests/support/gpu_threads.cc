// The threads of a GPU one after the other: each warp of 32 delivers its totals once, as in gpu.cu.
#include <algorithm>
#include <cstring>

#include "one_particle.h"

namespace flowpm {
namespace {

template <typename Call>
void run(const Call& call) {
  for_sums(call, [](void* memory, size_t bytes) { std::memset(memory, 0, bytes); });
  for (int64_t b = 0; b < rows(call); ++b) {
    for (int64_t first = 0; first < length(call); first += 32) {
      double totals[3] = {0, 0, 0};
      for (int64_t p = first; p < std::min(first + 32, length(call)); ++p) one(call, b, p, totals);
      deliver(call, b, totals);
    }
  }
  finish(call);
}

}  // namespace
}  // namespace flowpm

#define FLOWPM_THREADS(CALL)                                                                  \
  extern "C" void CALL##_float(const flowpm::CALL<float>* call) { flowpm::run(*call); }       \
  extern "C" void CALL##_double(const flowpm::CALL<double>* call) { flowpm::run(*call); }
FLOWPM_CALLS(FLOWPM_THREADS)
