// Reading fields at the particles and its adjoint as TensorFlow operations.
#include "ops.h"

namespace flowpm {
namespace {

int64_t components_of(const Tensor& fields) { return fields.dims() == 5 ? fields.dim_size(4) : 1; }

template <typename T>
class ReadOp : public ParticleMeshOp<T> {
  using ParticleMeshOp<T>::ParticleMeshOp;
  void run(OpKernelContext* context, const Geometry& g) override {
    const int64_t width = components_of(*this->input(context, "fields"));
    Read<T> call{};
    call.g = g;
    call.components = width;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->required(context, "fields", mesh_shape(g, width), &call.fields));
    OP_REQUIRES_OK(context, this->output(context, 0, particle_shape(g, width), &call.values));
    read(call, parallel_of(context));
  }
};

template <typename T>
class ReadVjpOp : public ParticleMeshOp<T> {
  using ParticleMeshOp<T>::ParticleMeshOp;
  void run(OpKernelContext* context, const Geometry& g) override {
    const int64_t width = components_of(*this->input(context, "fields"));
    const TensorShape field_shape = mesh_shape(g, width), value_shape = particle_shape(g, width);
    ReadVjp<T> call{};
    call.g = g;
    call.components = width;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->required(context, "fields", field_shape, &call.fields));
    OP_REQUIRES_OK(context, this->required(context, "dvalues", value_shape, &call.dvalues));
    OP_REQUIRES_OK(context, this->output(context, 0, field_shape, &call.dfields));
    OP_REQUIRES_OK(context, this->output(context, 1, particle_shape(g, 3), &call.ds));
    read_vjp(call, parallel_of(context));
  }
};

constexpr int kFields = 2;  // their input's index

absl::Status infer_read(InferenceContext* c) {
  ShapeHandle s, fields, component, values;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 5, &s));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(kFields), 5, &fields));
  TF_RETURN_IF_ERROR(c->Subshape(s, 0, -1, &s));
  TF_RETURN_IF_ERROR(c->Subshape(fields, 4, &component));
  TF_RETURN_IF_ERROR(c->Concatenate(s, component, &values));
  c->set_output(0, values);
  return absl::OkStatus();
}

absl::Status infer_read_vjp(InferenceContext* c) {
  ShapeHandle mesh;
  TF_RETURN_IF_ERROR(infer_mesh(c, &mesh, kFields));
  c->set_output(0, mesh);
  c->set_output(1, c->input(0));
  return absl::OkStatus();
}

FLOWPM_PARTICLE_MESH_OP("FlowpmRead").Input("fields: T").Output("values: T").SetShapeFn(infer_read);
FLOWPM_PARTICLE_MESH_OP("FlowpmReadVjp")
    .Input("fields: T")
    .Input("dvalues: T")
    .Output("dfields: T")
    .Output("ds: T")
    .SetShapeFn(infer_read_vjp);

FLOWPM_REGISTER(Read);
FLOWPM_REGISTER(ReadVjp);

}  // namespace
}  // namespace flowpm
