// What the TensorFlow operations share: the arguments of a call, and how an operation is registered.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu.h"
#include "kernels.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "xla/stream_executor/stream.h"

namespace flowpm {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// TensorFlow's own threads and the caller's.
Parallel parallel_of(OpKernelContext* context);

// The inputs, attributes and outputs of a call. The first error fails the call; what is asked for
// then, and afterwards, is null or a shape of ones.
class Arguments {
 public:
  explicit Arguments(OpKernelContext* context) : context_(context) {}

  bool ok() const { return context_->status().ok(); }
  template <typename... Parts>
  void fail(const Parts&... parts) {
    context_->SetStatus(absl::InvalidArgumentError(absl::StrCat(parts...)));
  }

  template <typename V>
  V attribute(const char* name) {
    V value{};
    context_->SetStatus(tensorflow::GetNodeAttr(context_->op_kernel().def(), name, &value));
    return value;
  }

  // The shape of an input, or of the first of a list; an error unless it has `rank` axes, if given.
  TensorShape shape(const char* name, int rank = -1) {
    const TensorShape& found = context_->input(range(name).first).shape();
    if (rank < 0 || found.dims() == rank) return found;
    fail(name, " is ", found.DebugString(), ", not of ", rank, " axes");
    return TensorShape(std::vector<int64_t>(rank, 1));
  }

  // Data of each input of a list, all of a given shape; of one input if it is no list.
  template <typename U>
  std::vector<const U*> inputs(const char* name, const TensorShape& shape) {
    std::vector<const U*> data;
    for (int i = range(name).first; i < range(name).second; ++i) {
      const Tensor& tensor = context_->input(i);
      if (tensor.shape() != shape) {
        fail(name, " is ", tensor.shape().DebugString(), ", not ", shape.DebugString());
      }
      data.push_back(ok() ? tensor.flat<U>().data() : nullptr);
    }
    return data;
  }

  // Data of an input of a given shape; null for an empty list.
  template <typename U>
  const U* input(const char* name, const TensorShape& shape) {
    const std::vector<const U*> data = inputs<U>(name, shape);
    return data.empty() ? nullptr : data[0];
  }

  // Data of the output `index`, in the memory of one of the inputs `from` that no one else needs.
  template <typename U>
  U* output(int index, const TensorShape& shape, std::initializer_list<const char*> from = {}) {
    if (!ok()) return nullptr;
    std::vector<int> candidates;
    for (const char* name : from) {
      const auto [begin, end] = range(name);
      if (begin < end) candidates.push_back(begin);
    }
    Tensor* tensor = nullptr;
    context_->SetStatus(
        context_->forward_input_or_allocate_output(candidates, index, shape, &tensor));
    return ok() ? tensor->flat<U>().data() : nullptr;
  }

 private:
  // The numbers of the inputs of a list, or of a single input, and one more than the last.
  std::pair<int, int> range(const char* name) {
    int begin = 0, end = 0;
    TF_CHECK_OK(context_->op_kernel().InputRange(name, &begin, &end));
    return {begin, end};
  }

  OpKernelContext* context_;
};

// An operation on CPUs: `make` gives the kernel's call from the arguments.
template <auto make>
class Op : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Arguments arguments(context);
    const auto call = make(arguments);
    if (arguments.ok()) call.run(parallel_of(context));
  }
};

// The same on GPUs.
template <auto make>
class GpuOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    Arguments arguments(context);
    const auto call = make(arguments);
    if (!arguments.ok()) return;
    void* stream = context->op_device_context()->stream()->platform_specific_handle().stream;
    const std::string failure = run_on_gpu(call, stream);
    if (!failure.empty()) context->SetStatus(absl::InternalError(failure));
  }
};

// Infers that the outputs are shaped like the inputs of these numbers.
template <int... numbers>
absl::Status infer_like(InferenceContext* c) {
  int output = 0;
  (c->set_output(output++, c->input(numbers)), ...);
  return absl::OkStatus();
}

// Registers the function MAKE<T> for what computes the operation Flowpm##NAME.
#define FLOWPM_REGISTER(NAME, MAKE)                                                    \
  REGISTER_KERNEL_BUILDER(                                                             \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_CPU).TypeConstraint<float>("T"),  \
      Op<MAKE<float>>);                                                                \
  REGISTER_KERNEL_BUILDER(                                                             \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_CPU).TypeConstraint<double>("T"), \
      Op<MAKE<double>>)

// Registers it on GPUs as well. HOST is `.HostMemory("x")` for an input x that stays on the host.
#define FLOWPM_REGISTER_GPU(NAME, MAKE, HOST)                                              \
  FLOWPM_REGISTER(NAME, MAKE);                                                             \
  REGISTER_KERNEL_BUILDER(                                                                 \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_GPU).TypeConstraint<float>("T") HOST, \
      GpuOp<MAKE<float>>);                                                                 \
  REGISTER_KERNEL_BUILDER(                                                                 \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_GPU).TypeConstraint<double>("T") HOST, \
      GpuOp<MAKE<double>>)

}  // namespace flowpm
