// What the TensorFlow operations share: attributes, shapes and their checks, threads.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace flowpm {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// TensorFlow's own threads and the caller's.
Parallel parallel_of(OpKernelContext* context);

// An error that names the input unless it has that shape.
absl::Status expect(const char* name, const Tensor& tensor, const TensorShape& shape);

// The attributes of an operation that say what a `Geometry` does.
struct Attributes {
  template <typename Source>
  absl::Status read(Source* source) {
    TF_RETURN_IF_ERROR(source->GetAttr("particles", &particles));
    TF_RETURN_IF_ERROR(source->GetAttr("mesh_factor", &mesh_factor));
    TF_RETURN_IF_ERROR(source->GetAttr("halo", &halo));
    return check();
  }
  absl::Status check() const;
  int64_t mesh(int axis) const { return mesh_factor * particles[axis] + 2 * halo[axis]; }
  // The geometry of these particles, none of whose numbers is left unchecked.
  absl::Status geometry(const Tensor& s, const Tensor& per_cell, Geometry* g) const;

  std::vector<int64_t> particles, halo;
  int64_t mesh_factor = 0;
};

TensorShape particle_shape(const Geometry& g);
TensorShape particle_shape(const Geometry& g, int64_t components);
TensorShape mesh_shape(const Geometry& g);
TensorShape mesh_shape(const Geometry& g, int64_t components);

// Infers the shape of a mesh; with `like`, that of the components of this input, [.., components].
absl::Status infer_mesh(InferenceContext* c, ShapeHandle* shape, int like = -1);

// Infers that the first output is shaped like the first input.
absl::Status infer_first(InferenceContext* c);

// An operation between the particles and the mesh block of a rank.
template <typename T>
class ParticleMeshOp : public OpKernel {
 public:
  explicit ParticleMeshOp(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, attributes_.read(construction));
  }

  void Compute(OpKernelContext* context) final {
    Geometry g;
    OP_REQUIRES_OK(context,
                   attributes_.geometry(*input(context, "s"), *input(context, "per_cell"), &g));
    run(context, g);
  }

 protected:
  virtual void run(OpKernelContext* context, const Geometry& g) = 0;

  static const Tensor* input(OpKernelContext* context, const char* name) {
    const Tensor* tensor = nullptr;
    TF_CHECK_OK(context->input(name, &tensor));
    return tensor;
  }
  static const T* displacement(OpKernelContext* context) {
    return input(context, "s")->template flat<T>().data();
  }
  // Data of an input of a given shape.
  static absl::Status required(OpKernelContext* context, const char* name, const TensorShape& shape,
                               const T** data) {
    TF_RETURN_IF_ERROR(expect(name, *input(context, name), shape));
    *data = input(context, name)->template flat<T>().data();
    return absl::OkStatus();
  }
  // Data of an input of a given shape and its index; null if the list input `name` is empty.
  static absl::Status optional(OpKernelContext* context, const char* name, const TensorShape& shape,
                               const T** data, int* index = nullptr) {
    int begin = 0, end = 0;
    TF_RETURN_IF_ERROR(context->op_kernel().InputRange(name, &begin, &end));
    *data = nullptr;
    if (begin == end) return absl::OkStatus();
    if (index) *index = begin;
    TF_RETURN_IF_ERROR(expect(name, context->input(begin), shape));
    *data = context->input(begin).flat<T>().data();
    return absl::OkStatus();
  }
  // Data of the output `index`, in the memory of the input `from` if no one else needs that.
  template <typename U = T>
  static absl::Status output(OpKernelContext* context, int index, const TensorShape& shape,
                             U** data, int from = -1) {
    Tensor* tensor = nullptr;
    if (from >= 0) {
      TF_RETURN_IF_ERROR(context->forward_input_or_allocate_output({from}, index, shape, &tensor));
    } else {
      TF_RETURN_IF_ERROR(context->allocate_output(index, shape, &tensor));
    }
    *data = tensor->flat<U>().data();
    return absl::OkStatus();
  }

 private:
  Attributes attributes_;
};

// Registers an operation with what all between particles and mesh have.
#define FLOWPM_PARTICLE_MESH_OP(NAME) \
  REGISTER_OP(NAME)                   \
      .Attr("T: {float, double}")     \
      .Attr("particles: list(int)")   \
      .Attr("mesh_factor: int")       \
      .Attr("halo: list(int)")        \
      .Input("s: T")                  \
      .Input("per_cell: double")

// Registers the class NAME##Op<T> as what computes the operation Flowpm##NAME on CPUs.
#define FLOWPM_REGISTER(NAME)                                                          \
  REGISTER_KERNEL_BUILDER(                                                             \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_CPU).TypeConstraint<float>("T"),  \
      NAME##Op<float>);                                                                \
  REGISTER_KERNEL_BUILDER(                                                             \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_CPU).TypeConstraint<double>("T"), \
      NAME##Op<double>)

}  // namespace flowpm
