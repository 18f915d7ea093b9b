// The kernels as TensorFlow operations on CPUs: shapes, checks, threads.
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/lib/core/threadpool.h"

// Looked for in the library before it is loaded.
extern "C" __attribute__((used, visibility("default"))) const char flowpm_built_for[] =
    "flowpm_dist kernels for TensorFlow " FLOWPM_TENSORFLOW ";";

namespace flowpm {
namespace {

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

// The attributes of an operation that say what a `Geometry` does.
struct Attributes {
  template <typename Source>
  absl::Status read(Source* source) {
    TF_RETURN_IF_ERROR(source->GetAttr("particles", &particles));
    TF_RETURN_IF_ERROR(source->GetAttr("mesh_factor", &mesh_factor));
    TF_RETURN_IF_ERROR(source->GetAttr("halo", &halo));
    if (particles.size() != 3 || halo.size() != 3) {
      return InvalidArgument("particles and halo are three numbers each");
    }
    for (int a = 0; a < 3; ++a) {
      if (particles[a] < 1 || mesh_factor < 1 || halo[a] < 0 || mesh(a) >= int64_t(kFarthest)) {
        return InvalidArgument("along axis ", a, ", no mesh has ", particles[a],
                               " particles refined by ", mesh_factor, " and a halo of ", halo[a]);
      }
    }
    return absl::OkStatus();
  }
  int64_t mesh(int axis) const { return mesh_factor * particles[axis] + 2 * halo[axis]; }

  std::vector<int64_t> particles, halo;
  int64_t mesh_factor = 0;
};

template <typename T>
class Kernel : public OpKernel {
 public:
  explicit Kernel(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, attributes_.read(construction));
  }

  void Compute(OpKernelContext* context) final {
    const Tensor& s = *input(context, "s");
    const Tensor& per_cell = *input(context, "per_cell");
    OP_REQUIRES(context, per_cell.NumElements() == 3 && per_cell.dims() == 1,
                InvalidArgument("per_cell is ", per_cell.shape().DebugString(), ", not [3]"));
    OP_REQUIRES(context, s.dims() == 5,
                InvalidArgument("s is ", s.shape().DebugString(), ", not [b, nx, ny, nz, 3]"));
    Geometry g;
    g.batch = s.dim_size(0);
    g.mesh_factor = attributes_.mesh_factor;
    for (int a = 0; a < 3; ++a) {
      g.particles[a] = attributes_.particles[a];
      g.halo[a] = attributes_.halo[a];
      g.mesh[a] = attributes_.mesh(a);
      g.per_cell[a] = per_cell.flat<double>()(a);
    }
    OP_REQUIRES_OK(context, expect("s", s, particles(g, 3)));
    run(context, g);
  }

 protected:
  virtual void run(OpKernelContext* context, const Geometry& g) = 0;

  static TensorShape particles(const Geometry& g, int64_t components) {
    return {g.batch, g.particles[0], g.particles[1], g.particles[2], components};
  }
  static TensorShape scalars(const Geometry& g) {
    return {g.batch, g.particles[0], g.particles[1], g.particles[2]};
  }
  static TensorShape mesh(const Geometry& g) {
    return {g.batch, g.mesh[0], g.mesh[1], g.mesh[2]};
  }
  static TensorShape mesh(const Geometry& g, int64_t components) {
    return {g.batch, g.mesh[0], g.mesh[1], g.mesh[2], components};
  }
  static absl::Status expect(const char* name, const Tensor& tensor, const TensorShape& shape) {
    if (tensor.shape() == shape) return absl::OkStatus();
    return InvalidArgument(name, " is ", tensor.shape().DebugString(), ", not ",
                           shape.DebugString());
  }
  static const Tensor* input(OpKernelContext* context, const char* name) {
    const Tensor* tensor = nullptr;
    TF_CHECK_OK(context->input(name, &tensor));
    return tensor;
  }
  // Data of an input of a given shape, null if the list input `name` is empty.
  static absl::Status optional(OpKernelContext* context, const char* name,
                               const TensorShape& shape, const T** data, int* index = nullptr) {
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
      TF_RETURN_IF_ERROR(
          context->forward_input_or_allocate_output({from}, index, shape, &tensor));
    } else {
      TF_RETURN_IF_ERROR(context->allocate_output(index, shape, &tensor));
    }
    *data = tensor->flat<U>().data();
    return absl::OkStatus();
  }

 private:
  Attributes attributes_;
};

#define FLOWPM_INPUT(NAME, SHAPE)                                  \
  const Tensor& NAME##_tensor = *this->input(context, #NAME);      \
  OP_REQUIRES_OK(context, this->expect(#NAME, NAME##_tensor, SHAPE)); \
  const T* NAME = NAME##_tensor.template flat<T>().data();

template <typename T>
class PaintOp : public Kernel<T> {
  using Kernel<T>::Kernel;
  void run(OpKernelContext* context, const Geometry& g) override {
    Paint<T> call{g, this->input(context, "s")->template flat<T>().data(), nullptr, nullptr,
                  nullptr};
    OP_REQUIRES_OK(context,
                   this->optional(context, "weights", this->scalars(g), &call.weights));
    OP_REQUIRES_OK(context, this->output(context, 0, this->mesh(g), &call.mesh));
    OP_REQUIRES_OK(context, this->output(context, 1, TensorShape({3}), &call.reach));
    paint(call, parallel_of(context));
  }
};

template <typename T>
class PaintVjpOp : public Kernel<T> {
  using Kernel<T>::Kernel;
  void run(OpKernelContext* context, const Geometry& g) override {
    FLOWPM_INPUT(dmesh, this->mesh(g))
    PaintVjp<T> call{};
    int add = -1, weights = -1;
    call.g = g;
    call.s = this->input(context, "s")->template flat<T>().data();
    call.dmesh = dmesh;
    OP_REQUIRES_OK(context, this->optional(context, "weights", this->scalars(g), &call.weights,
                                           &weights));
    OP_REQUIRES_OK(context,
                   this->optional(context, "add", this->particles(g, 3), &call.add, &add));
    OP_REQUIRES_OK(context, this->output(context, 0, this->particles(g, 3), &call.ds, add));
    if (call.weights) {
      OP_REQUIRES_OK(context, this->output(context, 1, this->scalars(g), &call.dweights));
    }
    paint_vjp(call, parallel_of(context));
  }
};

template <typename T>
class ReadOp : public Kernel<T> {
  using Kernel<T>::Kernel;
  void run(OpKernelContext* context, const Geometry& g) override {
    const Tensor& any = *this->input(context, "fields");
    const int64_t width = any.dims() == 5 ? any.dim_size(4) : 1;
    FLOWPM_INPUT(fields, this->mesh(g, width))
    T* values = nullptr;
    OP_REQUIRES_OK(context, this->output(context, 0, this->particles(g, width), &values));
    read(Read<T>{g, width, fields, this->input(context, "s")->template flat<T>().data(), values},
         parallel_of(context));
  }
};

template <typename T>
class ReadVjpOp : public Kernel<T> {
  using Kernel<T>::Kernel;
  void run(OpKernelContext* context, const Geometry& g) override {
    const Tensor& any = *this->input(context, "fields");
    const int64_t width = any.dims() == 5 ? any.dim_size(4) : 1;
    FLOWPM_INPUT(fields, this->mesh(g, width))
    FLOWPM_INPUT(dvalues, this->particles(g, width))
    T *dfields = nullptr, *ds = nullptr;
    OP_REQUIRES_OK(context, this->output(context, 0, this->mesh(g, width), &dfields));
    OP_REQUIRES_OK(context, this->output(context, 1, this->particles(g, 3), &ds));
    read_vjp(ReadVjp<T>{g, width, fields, this->input(context, "s")->template flat<T>().data(),
                        dvalues, dfields, ds},
             parallel_of(context));
  }
};

template <typename T, bool spectral, bool kick>
class ForceOp : public Kernel<T> {
  using Kernel<T>::Kernel;
  void run(OpKernelContext* context, const Geometry& g) override {
    FLOWPM_INPUT(field, (spectral ? this->mesh(g, 3) : this->mesh(g)))
    Force<T> call{};
    int from = -1;
    call.g = g;
    call.spectral = spectral;
    call.field = field;
    call.s = this->input(context, "s")->template flat<T>().data();
    if (kick) {
      FLOWPM_INPUT(factors, TensorShape({g.batch, 2}))
      call.factors = factors;
      OP_REQUIRES_OK(context,
                     this->optional(context, "v", this->particles(g, 3), &call.v, &from));
    }
    OP_REQUIRES_OK(context, this->output(context, 0, this->particles(g, 3), &call.out, from));
    force(call, parallel_of(context));
  }
};

template <typename T, bool spectral, bool kick>
class ForceVjpOp : public Kernel<T> {
  using Kernel<T>::Kernel;
  void run(OpKernelContext* context, const Geometry& g) override {
    const TensorShape field_shape = spectral ? this->mesh(g, 3) : this->mesh(g);
    FLOWPM_INPUT(field, field_shape)
    FLOWPM_INPUT(dv, this->particles(g, 3))
    ForceVjp<T> call{};
    int v_after = -1, add = -1;
    call.g = g;
    call.spectral = spectral;
    call.field = field;
    call.s = this->input(context, "s")->template flat<T>().data();
    call.dv = dv;
    if (kick) {
      FLOWPM_INPUT(factors, TensorShape({g.batch, 2}))
      call.factors = factors;
      const TensorShape shape = this->particles(g, 3);
      OP_REQUIRES_OK(context, this->optional(context, "v_after", shape, &call.v_after, &v_after));
      OP_REQUIRES_OK(context, this->optional(context, "ds", shape, &call.add, &add));
    }
    OP_REQUIRES_OK(context, this->output(context, 0, field_shape, &call.dfield));
    OP_REQUIRES_OK(context, this->output(context, 1, this->particles(g, 3), &call.ds, add));
    if (kick) {
      OP_REQUIRES_OK(context,
                     this->output(context, 2, this->particles(g, 3), &call.v_before, v_after));
      OP_REQUIRES_OK(context, this->output(context, 3, TensorShape({g.batch, 2}), &call.sums));
    }
    force_vjp(call, parallel_of(context));
  }
};

template <typename T>
class LinearOp : public OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const Tensor &x = context->input(0), &y = context->input(1), &factor = context->input(2);
    OP_REQUIRES(context, x.dims() > 0 && x.shape() == y.shape(),
                InvalidArgument("x is ", x.shape().DebugString(), ", y is ",
                                y.shape().DebugString()));
    const int64_t batch = x.dim_size(0);
    OP_REQUIRES(context, factor.shape() == TensorShape({batch}),
                InvalidArgument("factor is ", factor.shape().DebugString(), ", not [", batch, "]"));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0, 1}, 0, x.shape(), &out));
    linear(batch, x.NumElements() / std::max<int64_t>(1, batch), x.flat<T>().data(),
           y.flat<T>().data(), factor.flat<T>().data(), out->flat<T>().data(),
           parallel_of(context));
  }
};

template <typename T>
class DriftVjpOp : public OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const Tensor& x = context->input(0);
    const Tensor& factor = context->input(4);
    OP_REQUIRES(context, x.dims() > 0, InvalidArgument("x_after is a scalar"));
    for (int m = 1; m < 4; ++m) {
      const std::string shape = context->input(m).shape().DebugString();
      OP_REQUIRES(context, context->input(m).shape() == x.shape(),
                  InvalidArgument("x_after is ", x.shape().DebugString(), ", input ", m, " is ",
                                  shape));
    }
    const int64_t batch = x.dim_size(0);
    OP_REQUIRES(context, factor.shape() == TensorShape({batch}),
                InvalidArgument("factor is ", factor.shape().DebugString(), ", not [", batch, "]"));
    Tensor *x_before = nullptr, *dv = nullptr, *sum = nullptr;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 0, x.shape(), &x_before));
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({3}, 1, x.shape(), &dv));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({batch}), &sum));
    drift_vjp(batch, x.NumElements() / std::max<int64_t>(1, batch), x.flat<T>().data(),
              context->input(1).flat<T>().data(), context->input(2).flat<T>().data(),
              context->input(3).flat<T>().data(), factor.flat<T>().data(),
              x_before->flat<T>().data(), dv->flat<T>().data(), sum->flat<double>().data(),
              parallel_of(context));
  }
};

// Shape of a mesh of this operation, with the number of components of the input `like` if it has
// that.
absl::Status mesh_shape(InferenceContext* c, int rank, int like, ShapeHandle* shape) {
  Attributes attributes;
  TF_RETURN_IF_ERROR(attributes.read(c));
  ShapeHandle s;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 5, &s));
  std::vector<tensorflow::shape_inference::DimensionHandle> sizes = {c->Dim(s, 0)};
  for (int a = 0; a < 3; ++a) sizes.push_back(c->MakeDim(attributes.mesh(a)));
  if (rank == 5) {
    ShapeHandle field;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(like), 5, &field));
    sizes.push_back(c->Dim(field, 4));
  }
  *shape = c->MakeShape(sizes);
  return absl::OkStatus();
}

absl::Status paint_shapes(InferenceContext* c) {
  ShapeHandle mesh;
  TF_RETURN_IF_ERROR(mesh_shape(c, 4, 0, &mesh));
  c->set_output(0, mesh);
  c->set_output(1, c->Vector(3));
  return absl::OkStatus();
}

absl::Status paint_vjp_shapes(InferenceContext* c) {
  ShapeHandle scalars;
  TF_RETURN_IF_ERROR(c->Subshape(c->input(0), 0, -1, &scalars));
  c->set_output(0, c->input(0));
  if (c->num_outputs() > 1) c->set_output(1, scalars);
  return absl::OkStatus();
}

absl::Status read_shapes(InferenceContext* c) {
  ShapeHandle s, fields, component, values;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 5, &s));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 5, &fields));
  TF_RETURN_IF_ERROR(c->Subshape(s, 0, -1, &s));
  TF_RETURN_IF_ERROR(c->Subshape(fields, 4, &component));
  TF_RETURN_IF_ERROR(c->Concatenate(s, component, &values));
  c->set_output(0, values);
  return absl::OkStatus();
}

absl::Status read_vjp_shapes(InferenceContext* c) {
  ShapeHandle mesh;
  TF_RETURN_IF_ERROR(mesh_shape(c, 5, 2, &mesh));
  c->set_output(0, mesh);
  c->set_output(1, c->input(0));
  return absl::OkStatus();
}

absl::Status force_shapes(InferenceContext* c) {
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

template <int rank>
absl::Status force_vjp_shapes(InferenceContext* c) {
  ShapeHandle mesh;
  TF_RETURN_IF_ERROR(mesh_shape(c, rank, 2, &mesh));
  c->set_output(0, mesh);
  c->set_output(1, c->input(0));
  if (c->num_outputs() > 2) {
    c->set_output(2, c->input(0));
    c->set_output(3, c->MakeShape({c->Dim(c->input(0), 0), c->MakeDim(2)}));
  }
  return absl::OkStatus();
}

absl::Status drift_vjp_shapes(InferenceContext* c) {
  ShapeHandle x;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &x));
  c->set_output(0, x);
  c->set_output(1, x);
  c->set_output(2, c->Vector(c->Dim(x, 0)));
  return absl::OkStatus();
}

#define FLOWPM_OP(NAME)              \
  REGISTER_OP(NAME)                  \
      .Attr("T: {float, double}")    \
      .Attr("particles: list(int)")  \
      .Attr("mesh_factor: int")       \
      .Attr("halo: list(int)")       \
      .Input("s: T")                 \
      .Input("per_cell: double")

FLOWPM_OP("FlowpmPaint")
    .Attr("weighted: int >= 0")
    .Input("weights: weighted * T")
    .Output("mesh: T")
    .Output("reach: T")
    .SetShapeFn(paint_shapes);
FLOWPM_OP("FlowpmPaintVjp")
    .Attr("weighted: int >= 0")
    .Attr("adding: int >= 0")
    .Input("dmesh: T")
    .Input("weights: weighted * T")
    .Input("add: adding * T")
    .Output("ds: T")
    .Output("dweights: weighted * T")
    .SetShapeFn(paint_vjp_shapes);
FLOWPM_OP("FlowpmRead").Input("fields: T").Output("values: T").SetShapeFn(read_shapes);
FLOWPM_OP("FlowpmReadVjp")
    .Input("fields: T")
    .Input("dvalues: T")
    .Output("dfields: T")
    .Output("ds: T")
    .SetShapeFn(read_vjp_shapes);
FLOWPM_OP("FlowpmReadGradient").Input("field: T").Output("force: T").SetShapeFn(force_shapes);
FLOWPM_OP("FlowpmReadGradientVjp")
    .Input("field: T")
    .Input("dv: T")
    .Output("dfield: T")
    .Output("dsum: T")
    .SetShapeFn(force_vjp_shapes<4>);

#define FLOWPM_KICK(NAME, RANK)                                                         \
  FLOWPM_OP("FlowpmKick" NAME)                                                          \
      .Input("field: T")                                                                \
      .Input("v: T")                                                                    \
      .Input("factors: T")                                                              \
      .Output("v_after: T")                                                             \
      .SetShapeFn(force_shapes);                                                        \
  FLOWPM_OP("FlowpmKick" NAME "Vjp")                                                    \
      .Input("field: T")                                                                \
      .Input("v_after: T")                                                              \
      .Input("dv: T")                                                                   \
      .Input("ds: T")                                                                   \
      .Input("factors: T")                                                              \
      .Output("dfield: T")                                                              \
      .Output("dsum: T")                                                                \
      .Output("v_before: T")                                                            \
      .Output("sums: double")                                                           \
      .SetShapeFn(force_vjp_shapes<RANK>);
FLOWPM_KICK("Gradient", 4)
FLOWPM_KICK("Spectral", 5)

REGISTER_OP("FlowpmLinear")
    .Attr("T: {float, double}")
    .Input("x: T")
    .Input("y: T")
    .Input("factor: T")
    .Output("out: T")
    .SetShapeFn(force_shapes);
REGISTER_OP("FlowpmDriftVjp")
    .Attr("T: {float, double}")
    .Input("x_after: T")
    .Input("v: T")
    .Input("dx: T")
    .Input("dv: T")
    .Input("factor: T")
    .Output("x_before: T")
    .Output("dv_before: T")
    .Output("sum: double")
    .SetShapeFn(drift_vjp_shapes);

template <typename T>
using ReadGradientOp = ForceOp<T, false, false>;
template <typename T>
using ReadGradientVjpOp = ForceVjpOp<T, false, false>;
template <typename T>
using KickGradientOp = ForceOp<T, false, true>;
template <typename T>
using KickGradientVjpOp = ForceVjpOp<T, false, true>;
template <typename T>
using KickSpectralOp = ForceOp<T, true, true>;
template <typename T>
using KickSpectralVjpOp = ForceVjpOp<T, true, true>;

#define FLOWPM_REGISTER(NAME)                                                            \
  REGISTER_KERNEL_BUILDER(                                                               \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_CPU).TypeConstraint<float>("T"),    \
      NAME##Op<float>);                                                                  \
  REGISTER_KERNEL_BUILDER(                                                               \
      Name("Flowpm" #NAME).Device(tensorflow::DEVICE_CPU).TypeConstraint<double>("T"),   \
      NAME##Op<double>)
FLOWPM_REGISTER(Paint);
FLOWPM_REGISTER(PaintVjp);
FLOWPM_REGISTER(Read);
FLOWPM_REGISTER(ReadVjp);
FLOWPM_REGISTER(ReadGradient);
FLOWPM_REGISTER(ReadGradientVjp);
FLOWPM_REGISTER(KickGradient);
FLOWPM_REGISTER(KickGradientVjp);
FLOWPM_REGISTER(KickSpectral);
FLOWPM_REGISTER(KickSpectralVjp);
FLOWPM_REGISTER(Linear);
FLOWPM_REGISTER(DriftVjp);

}  // namespace
}  // namespace flowpm
