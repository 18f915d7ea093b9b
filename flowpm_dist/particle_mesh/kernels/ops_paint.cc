// Paint and its adjoint as TensorFlow operations.
#include "ops.h"

namespace flowpm {
namespace {

template <typename T>
class PaintOp : public ParticleMeshOp<T> {
  using ParticleMeshOp<T>::ParticleMeshOp;
  void run(OpKernelContext* context, const Geometry& g) override {
    Paint<T> call{};
    call.g = g;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->optional(context, "weights", particle_shape(g), &call.weights));
    OP_REQUIRES_OK(context, this->output(context, 0, mesh_shape(g), &call.mesh));
    OP_REQUIRES_OK(context, this->output(context, 1, TensorShape({3}), &call.max_displacement));
    paint(call, parallel_of(context));
  }
};

template <typename T>
class PaintVjpOp : public ParticleMeshOp<T> {
  using ParticleMeshOp<T>::ParticleMeshOp;
  void run(OpKernelContext* context, const Geometry& g) override {
    PaintVjp<T> call{};
    int add = -1;
    call.g = g;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->required(context, "dmesh", mesh_shape(g), &call.dmesh));
    OP_REQUIRES_OK(context, this->optional(context, "weights", particle_shape(g), &call.weights));
    OP_REQUIRES_OK(context, this->optional(context, "add", particle_shape(g, 3), &call.add, &add));
    OP_REQUIRES_OK(context, this->output(context, 0, particle_shape(g, 3), &call.ds, add));
    if (call.weights) {
      OP_REQUIRES_OK(context, this->output(context, 1, particle_shape(g), &call.dweights));
    }
    paint_vjp(call, parallel_of(context));
  }
};

absl::Status infer_paint(InferenceContext* c) {
  ShapeHandle mesh;
  TF_RETURN_IF_ERROR(infer_mesh(c, &mesh));
  c->set_output(0, mesh);
  c->set_output(1, c->Vector(3));
  return absl::OkStatus();
}

absl::Status infer_paint_vjp(InferenceContext* c) {
  ShapeHandle weights;
  TF_RETURN_IF_ERROR(c->Subshape(c->input(0), 0, -1, &weights));
  c->set_output(0, c->input(0));
  if (c->num_outputs() > 1) c->set_output(1, weights);
  return absl::OkStatus();
}

FLOWPM_PARTICLE_MESH_OP("FlowpmPaint")
    .Attr("weighted: int >= 0")
    .Input("weights: weighted * T")
    .Output("mesh: T")
    .Output("max_displacement: T")
    .SetShapeFn(infer_paint);
FLOWPM_PARTICLE_MESH_OP("FlowpmPaintVjp")
    .Attr("weighted: int >= 0")
    .Attr("adding: int >= 0")
    .Input("dmesh: T")
    .Input("weights: weighted * T")
    .Input("add: adding * T")
    .Output("ds: T")
    .Output("dweights: weighted * T")
    .SetShapeFn(infer_paint_vjp);

FLOWPM_REGISTER(Paint);
FLOWPM_REGISTER(PaintVjp);

}  // namespace
}  // namespace flowpm
