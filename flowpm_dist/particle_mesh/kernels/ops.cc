#include "ops.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "tensorflow/core/lib/core/threadpool.h"

// What `build.identity` gives; looked for in the library before it is loaded.
extern "C" __attribute__((used, visibility("default"))) const char flowpm_built_for[] =
    FLOWPM_IDENTITY;

namespace flowpm {
namespace {

// Pieces of work, taken in turn by the caller and TensorFlow's own threads.
struct Queue {
  Queue(int64_t count, const std::function<void(int64_t)>& work) : count(count), work(&work) {}

  void run() {
    int64_t finished = 0;
    for (int64_t m; (m = next.fetch_add(1)) < count; ++finished) (*work)(m);
    if (finished > 0 && done.fetch_add(finished) + finished == count) {
      std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_one();
    }
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done.load() == count; });
  }

  const int64_t count;
  const std::function<void(int64_t)>* work;  // not used once all pieces are taken
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;
};

}  // namespace

Parallel parallel_of(OpKernelContext* context) {
  const auto* pool = context->device()->tensorflow_cpu_worker_threads();
  return [pool](int64_t count, const std::function<void(int64_t)>& work) {
    const int64_t threads = std::min<int64_t>(pool->num_threads, count);
    if (threads <= 1) {
      for (int64_t m = 0; m < count; ++m) work(m);
      return;
    }
    auto queue = std::make_shared<Queue>(count, work);
    for (int64_t t = 1; t < threads; ++t) pool->workers->Schedule([queue] { queue->run(); });
    queue->run();
    queue->wait();
  };
}

namespace {

// Takes the machine code of GPUs of a compute capability, major and minor.
class GpuCode : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Arguments arguments(context);
    const auto capability = arguments.attribute<std::vector<int64_t>>("capability");
    const std::string code = context->input(0).scalar<tensorflow::tstring>()();
    if (arguments.ok()) set_gpu_code(int(capability[0]), int(capability[1]), code);
  }
};

REGISTER_OP("FlowpmGpuCode")
    .Attr("capability: list(int)")
    .Input("code: string")
    .SetIsStateful()
    .SetShapeFn(infer_like<>);
REGISTER_KERNEL_BUILDER(Name("FlowpmGpuCode").Device(tensorflow::DEVICE_CPU), GpuCode);

}  // namespace
}  // namespace flowpm
