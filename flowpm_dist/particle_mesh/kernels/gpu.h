// Kernels on GPUs, as calls from a CPU.
#pragma once

#include <string>

#include "calls.h"

namespace flowpm {

// Puts a kernel on a stream (a CUstream), which runs it later. All memory is the GPU's. Returns what
// went wrong, or an empty text.
template <typename Call>
std::string run_on_gpu(const Call& call, void* stream);

// Hands over the machine code of gpu.cu for GPUs of a compute capability, major and minor.
void set_gpu_code(int major, int minor, std::string code);

}  // namespace flowpm
