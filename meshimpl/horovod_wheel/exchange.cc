// Exchanges of rows between ranks by NCCL's sends and receives, as operations of TensorFlow.
//
// On a GPU they are put on TensorFlow's own stream, so that they wait for what was computed before
// and for nothing else. NCCL's library is opened when it is first asked for. On CPUs they take a
// library with the same functions that moves the memory of the host; there is one for tests.
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "xla/stream_executor/activate_context.h"
#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

namespace meshimpl {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// What nccl.h declares; its types are integers and pointers here.
constexpr int kBytes = 0;  // ncclInt8
struct UniqueId {
  char internal[128];
};

struct Nccl {
  int (*get_unique_id)(UniqueId*);
  int (*init_rank)(void**, int, UniqueId, int);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, size_t, int, int, void*, void*);
  int (*receive)(void*, size_t, int, int, void*, void*);
  int (*async_error)(void*, int*);
  const char* (*error_string)(int);
  std::string missing;
};

const Nccl& nccl_of(const std::string& library) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Nccl>> opened;
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Nccl>& found = opened[library];
  if (found) return *found;
  found = std::make_unique<Nccl>();
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    found->missing = absl::StrCat("NCCL cannot be loaded (", dlerror(), ")");
    return *found;
  }
  const auto look_up = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function) found->missing = absl::StrCat(library, " has no ", name, ": NCCL 2.7 has it");
  };
  look_up(found->get_unique_id, "ncclGetUniqueId");
  look_up(found->init_rank, "ncclCommInitRank");
  look_up(found->group_start, "ncclGroupStart");
  look_up(found->group_end, "ncclGroupEnd");
  look_up(found->send, "ncclSend");
  look_up(found->receive, "ncclRecv");
  look_up(found->async_error, "ncclCommGetAsyncError");
  look_up(found->error_string, "ncclGetErrorString");
  return *found;
}

// A group of ranks that exchange rows, and this rank's place in it.
struct Group {
  const Nccl* nccl;
  void* communicator;
  std::mutex turn;  // NCCL wants one call at a time

  absl::Status status(int code, const char* what) const {
    if (code == 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(what, ": ", nccl->error_string(code)));
  }
};

std::mutex groups_mutex;
std::map<std::string, std::unique_ptr<Group>>& groups() {
  static auto* all = new std::map<std::string, std::unique_ptr<Group>>;
  return *all;
}

// The GPU's context as the current one of this thread, and the stream; null on a CPU.
class Place {
 public:
  explicit Place(OpKernelContext* context) {
    if (context->device()->device_type() == tensorflow::DEVICE_CPU) return;
    auto* of_tensorflow = context->op_device_context()->stream();
    active_ = of_tensorflow->parent()->Activate();
    stream = of_tensorflow->platform_specific_handle().stream;
  }
  void* stream = nullptr;

 private:
  std::unique_ptr<stream_executor::ActivateContext> active_;
};

// A new group's identity, which one of its ranks asks for and gives to the others.
class NewGroup : public OpKernel {
 public:
  explicit NewGroup(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("library", &library_));
  }
  void Compute(OpKernelContext* context) override {
    const Nccl& nccl = nccl_of(library_);
    OP_REQUIRES(context, nccl.missing.empty(), absl::FailedPreconditionError(nccl.missing));
    UniqueId id;
    const int code = nccl.get_unique_id(&id);
    OP_REQUIRES(context, code == 0,
                absl::InternalError(absl::StrCat("ncclGetUniqueId: ", nccl.error_string(code))));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {int64_t(sizeof id)}, &output));
    std::memcpy(output->flat<uint8_t>().data(), id.internal, sizeof id);
  }

 private:
  std::string library_;
};

// Joins a group, together with its other ranks.
class JoinGroup : public OpKernel {
 public:
  explicit JoinGroup(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("library", &library_));
    OP_REQUIRES_OK(context, context->GetAttr("group", &name_));
    OP_REQUIRES_OK(context, context->GetAttr("size", &size_));
    OP_REQUIRES_OK(context, context->GetAttr("index", &index_));
  }
  void Compute(OpKernelContext* context) override {
    const Nccl& nccl = nccl_of(library_);
    OP_REQUIRES(context, nccl.missing.empty(), absl::FailedPreconditionError(nccl.missing));
    UniqueId id;
    OP_REQUIRES(context, context->input(0).NumElements() == int64_t(sizeof id),
                absl::InvalidArgumentError("the identity of a group has 128 bytes"));
    std::memcpy(id.internal, context->input(0).flat<uint8_t>().data(), sizeof id);
    auto group = std::make_unique<Group>();
    group->nccl = &nccl;
    const Place place(context);
    OP_REQUIRES_OK(context,
                   group->status(nccl.init_rank(&group->communicator, size_, id, index_),
                                 "ncclCommInitRank"));
    std::lock_guard<std::mutex> lock(groups_mutex);
    groups()[name_] = std::move(group);
  }

 private:
  std::string library_, name_;
  int size_, index_;
};

// Sends rows of dimension 0 to each rank of a group, and receives theirs. Each rank knows how many.
class Exchange : public OpKernel {
 public:
  explicit Exchange(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("group", &name_));
    OP_REQUIRES_OK(context, context->GetAttr("sent", &sent_));
    OP_REQUIRES_OK(context, context->GetAttr("received", &received_));
  }
  void Compute(OpKernelContext* context) override {
    Group* group = nullptr;
    {
      std::lock_guard<std::mutex> lock(groups_mutex);
      const auto found = groups().find(name_);
      if (found != groups().end()) group = found->second.get();
    }
    OP_REQUIRES(context, group, absl::InternalError("an exchange in a group that was not joined"));
    const Tensor& input = context->input(0);
    int64_t rows = 0, arriving = 0, row = tensorflow::DataTypeSize(input.dtype());
    for (int64_t count : sent_) rows += count;
    for (int64_t count : received_) arriving += count;
    for (int i = 1; i < input.dims(); ++i) row *= input.dim_size(i);
    OP_REQUIRES(context, input.dims() > 0 && input.dim_size(0) == rows,
                absl::InvalidArgumentError(absl::StrCat("an exchange of ", rows, " rows got ",
                                                        input.shape().DebugString())));
    TensorShape shape = input.shape();
    shape.set_dim(0, arriving);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &output));
    const char* from = input.tensor_data().data();
    char* to = const_cast<char*>(output->tensor_data().data());
    const Place place(context);
    OP_REQUIRES_OK(context, moved(group, from, to, row, place.stream));
  }

 private:
  absl::Status moved(Group* group, const char* from, char* to, int64_t row, void* stream) {
    const Nccl& nccl = *group->nccl;
    std::lock_guard<std::mutex> lock(group->turn);
    int lost = 0;
    int code = nccl.async_error(group->communicator, &lost);
    if (code == 0) code = lost;
    if (code != 0) return group->status(code, "an earlier exchange");
    // A group that was started must be ended, whatever goes wrong in between.
    code = nccl.group_start();
    if (code != 0) return group->status(code, "ncclGroupStart");
    const char* what = "ncclGroupEnd";
    const auto keep = [&](int result, const char* name) {
      if (code == 0 && result != 0) code = result, what = name;
    };
    for (int rank = 0; rank < int(sent_.size()); ++rank) {
      if (const int64_t bytes = sent_[rank] * row) {
        keep(nccl.send(from, bytes, kBytes, rank, group->communicator, stream), "ncclSend");
        from += bytes;
      }
      if (const int64_t bytes = received_[rank] * row) {
        keep(nccl.receive(to, bytes, kBytes, rank, group->communicator, stream), "ncclRecv");
        to += bytes;
      }
    }
    const int ended = nccl.group_end();
    if (code == 0) code = ended;
    return group->status(code, what);
  }

  std::string name_;
  std::vector<int64_t> sent_, received_;
};

REGISTER_OP("MeshimplNewGroup")
    .Attr("library: string")
    .Output("id: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(int64_t(sizeof(UniqueId))));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("MeshimplNewGroup").Device(tensorflow::DEVICE_CPU), NewGroup);

REGISTER_OP("MeshimplJoinGroup")
    .Attr("library: string")
    .Attr("group: string")
    .Attr("size: int")
    .Attr("index: int")
    .Input("id: uint8")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); });
REGISTER_KERNEL_BUILDER(Name("MeshimplJoinGroup").Device(tensorflow::DEVICE_CPU), JoinGroup);
REGISTER_KERNEL_BUILDER(Name("MeshimplJoinGroup").Device(tensorflow::DEVICE_GPU).HostMemory("id"),
                        JoinGroup);

REGISTER_OP("MeshimplExchange")
    .Attr("T: {half, bfloat16, float, double, bool, int8, int16, int32, int64, uint8, uint16, "
          "uint32, uint64, complex64, complex128}")
    .Attr("group: string")
    .Attr("sent: list(int)")
    .Attr("received: list(int)")
    .Input("x: T")
    .Output("y: T")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> received;
      TF_RETURN_IF_ERROR(c->GetAttr("received", &received));
      int64_t rows = 0;
      for (int64_t count : received) rows += count;
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &shape));
      TF_RETURN_IF_ERROR(c->ReplaceDim(shape, 0, c->MakeDim(rows), &shape));
      c->set_output(0, shape);
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("MeshimplExchange").Device(tensorflow::DEVICE_CPU), Exchange);
REGISTER_KERNEL_BUILDER(Name("MeshimplExchange").Device(tensorflow::DEVICE_GPU), Exchange);

}  // namespace
}  // namespace meshimpl
