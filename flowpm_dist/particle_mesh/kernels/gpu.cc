// Kernels on GPUs through NVIDIA's driver, which is looked for when the first one is called.
#include "gpu.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "one_particle.h"

namespace flowpm {
namespace {

constexpr int kThreads = 256;        // of a block, see __launch_bounds__ in gpu.cu
constexpr int kBlocksPerSm = 16;     // a thread does several particles where there are more
constexpr int64_t kMostRows = 65535;  // blocks along y

struct Driver {
  int (*get_error_string)(int, const char**);
  int (*stream_context)(void*, void**);
  int (*push)(void*);
  int (*pop)(void**);
  int (*device)(int*);
  int (*attribute)(int*, int, int);
  int (*load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*kernel)(void**, void*, const char*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**);
  int (*clear)(uintptr_t, unsigned char, size_t, void*);
  std::string missing;
};

const Driver& driver() {
  static const Driver found = [] {
    Driver d{};
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      d.missing = "NVIDIA's driver, libcuda.so.1, is not there";
      return d;
    }
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function && d.missing.empty()) {
        d.missing = std::string("NVIDIA's driver has no ") + name + ": it is older than 525";
      }
    };
    look_up(d.get_error_string, "cuGetErrorString");
    look_up(d.stream_context, "cuStreamGetCtx");
    look_up(d.push, "cuCtxPushCurrent_v2");
    look_up(d.pop, "cuCtxPopCurrent_v2");
    look_up(d.device, "cuCtxGetDevice");
    look_up(d.attribute, "cuDeviceGetAttribute");
    look_up(d.load, "cuLibraryLoadData");
    look_up(d.kernel, "cuLibraryGetKernel");
    look_up(d.launch, "cuLaunchKernel");
    look_up(d.clear, "cuMemsetD8Async");
    return d;
  }();
  return found;
}

struct Failure {
  std::string text;
};

void check(int status, const char* what) {
  if (status == 0) return;
  const char* text = nullptr;
  driver().get_error_string(status, &text);
  throw Failure{std::string(what) + ": " + (text ? text : std::to_string(status))};
}

int attribute(int device, int which) {
  int value = 0;
  check(driver().attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

using Capability = std::pair<int, int>;

std::mutex mutex;
std::map<Capability, std::string> codes;
std::map<Capability, void*> loaded;

// The library of kernels for a device, whose machine code is loaded once.
void* library_for(int device) {
  const Capability capability{attribute(device, 75), attribute(device, 76)};
  std::lock_guard<std::mutex> lock(mutex);
  void*& library = loaded[capability];
  if (!library) {
    const auto code = codes.find(capability);
    if (code == codes.end()) {
      throw Failure{"the kernels were not compiled for a GPU of compute capability " +
                    std::to_string(capability.first) + "." + std::to_string(capability.second)};
    }
    void* fresh = nullptr;
    check(driver().load(&fresh, code->second.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cuLibraryLoadData");
    library = fresh;
  }
  return library;
}

// The context of a stream as the current one.
class Current {
 public:
  explicit Current(void* stream) {
    void* context = nullptr;
    check(driver().stream_context(stream, &context), "cuStreamGetCtx");
    check(driver().push(context), "cuCtxPushCurrent");
  }
  ~Current() {
    void* context = nullptr;
    driver().pop(&context);
  }
};

template <typename Call>
void launch(void* library, const char* name, const Call& call, unsigned blocks, unsigned rows,
            unsigned threads, void* stream) {
  void* kernel = nullptr;
  check(driver().kernel(&kernel, library, name), name);
  void* arguments[] = {const_cast<Call*>(&call)};
  check(driver().launch(kernel, blocks, rows, 1, threads, 1, 1, 0, stream, arguments, nullptr),
        name);
}

template <typename Call>
struct Name;
#define FLOWPM_NAMES(CALL)                                     \
  template <>                                                  \
  struct Name<CALL<float>> {                                   \
    static constexpr char kName[] = "flowpm_" #CALL "_float";  \
  };                                                           \
  template <>                                                  \
  struct Name<CALL<double>> {                                  \
    static constexpr char kName[] = "flowpm_" #CALL "_double"; \
  };
FLOWPM_CALLS(FLOWPM_NAMES)

// The kernel's name in gpu.cu, with the ending of the variant for a call.
template <typename Call>
std::string name_of(const Call& call) {
  std::string name = Name<Call>::kName;
  if (is_spectral(call)) name += "_spectral";
  if (is_wide(call)) name += "_wide";
  return name;
}

void finish_on(void*, void*, ...) {}
template <typename T>
void finish_on(void* library, void* stream, const Paint<T>* call) {
  const char* name = sizeof(T) == 4 ? "flowpm_finish_float" : "flowpm_finish_double";
  launch(library, name, *call, 1, 1, 1, stream);
}

}  // namespace

template <typename Call>
std::string run_on_gpu(const Call& call, void* stream) {
  if (!driver().missing.empty()) return driver().missing;
  try {
    const Current current(stream);
    int device = 0;
    check(driver().device(&device), "cuCtxGetDevice");
    void* library = library_for(device);
    for_sums(call, [&](void* memory, size_t bytes) {
      if (bytes == 0) return;
      check(driver().clear(reinterpret_cast<uintptr_t>(memory), 0, bytes, stream),
            "cuMemsetD8Async");
    });
    const int64_t all = (length(call) + kThreads - 1) / kThreads, most = rows(call);
    if (all == 0 || most == 0) return "";
    const int64_t blocks = std::min<int64_t>(all, attribute(device, 16) * kBlocksPerSm);
    launch(library, name_of(call).c_str(), call, unsigned(blocks),
           unsigned(std::min(most, kMostRows)), kThreads, stream);
    finish_on(library, stream, &call);
    return "";
  } catch (const Failure& failure) {
    return failure.text;
  }
}

#define FLOWPM_INSTANTIATE(CALL)                                        \
  template std::string run_on_gpu<CALL<float>>(const CALL<float>&, void*); \
  template std::string run_on_gpu<CALL<double>>(const CALL<double>&, void*);
FLOWPM_CALLS(FLOWPM_INSTANTIATE)

void set_gpu_code(int major, int minor, std::string code) {
  std::lock_guard<std::mutex> lock(mutex);
  codes[{major, minor}] = std::move(code);
}

}  // namespace flowpm
