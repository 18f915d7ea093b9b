// The force at the particles, kicks by it, and their adjoints as TensorFlow operations.
#include "ops.h"

namespace flowpm {
namespace {

TensorShape field_shape(const Geometry& g, ForceGradient force_gradient) {
  return force_gradient == ForceGradient::spectral ? mesh_shape(g, 3) : mesh_shape(g);
}

template <typename T>
class ReadGradientOp : public ParticleMeshOp<T> {
  using ParticleMeshOp<T>::ParticleMeshOp;
  void run(OpKernelContext* context, const Geometry& g) override {
    Force<T> call{};
    call.g = g;
    call.force_gradient = ForceGradient::finite_difference;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->required(context, "potential", mesh_shape(g), &call.field));
    OP_REQUIRES_OK(context, this->output(context, 0, particle_shape(g, 3), &call.out));
    force(call, parallel_of(context));
  }
};

template <typename T>
class ReadGradientVjpOp : public ParticleMeshOp<T> {
  using ParticleMeshOp<T>::ParticleMeshOp;
  void run(OpKernelContext* context, const Geometry& g) override {
    const TensorShape vectors = particle_shape(g, 3);
    ForceVjp<T> call{};
    call.g = g;
    call.force_gradient = ForceGradient::finite_difference;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->required(context, "potential", mesh_shape(g), &call.field));
    OP_REQUIRES_OK(context, this->required(context, "dforce", vectors, &call.dv));
    OP_REQUIRES_OK(context, this->output(context, 0, mesh_shape(g), &call.dfield));
    OP_REQUIRES_OK(context, this->output(context, 1, vectors, &call.ds));
    force_vjp(call, parallel_of(context));
  }
};

// A kick operation, whose attribute says how the field gives the force.
template <typename T>
class KickBase : public ParticleMeshOp<T> {
 public:
  explicit KickBase(OpKernelConstruction* construction) : ParticleMeshOp<T>(construction) {
    std::string name;
    OP_REQUIRES_OK(construction, construction->GetAttr("force_gradient", &name));
    if (name == "spectral") force_gradient_ = ForceGradient::spectral;
  }

 protected:
  ForceGradient force_gradient_ = ForceGradient::finite_difference;
};

template <typename T>
class KickOp : public KickBase<T> {
  using KickBase<T>::KickBase;
  void run(OpKernelContext* context, const Geometry& g) override {
    const TensorShape field = field_shape(g, this->force_gradient_), v = particle_shape(g, 3);
    const TensorShape factors({g.batch, 2});
    Force<T> call{};
    int from = -1;
    call.g = g;
    call.force_gradient = this->force_gradient_;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->required(context, "field", field, &call.field));
    OP_REQUIRES_OK(context, this->required(context, "factors", factors, &call.factors));
    OP_REQUIRES_OK(context, this->optional(context, "v", v, &call.v, &from));
    OP_REQUIRES_OK(context, this->output(context, 0, v, &call.out, from));
    force(call, parallel_of(context));
  }
};

template <typename T>
class KickVjpOp : public KickBase<T> {
  using KickBase<T>::KickBase;
  void run(OpKernelContext* context, const Geometry& g) override {
    const TensorShape field = field_shape(g, this->force_gradient_), v = particle_shape(g, 3);
    const TensorShape factors({g.batch, 2});
    ForceVjp<T> call{};
    int v_after = -1, ds = -1;
    call.g = g;
    call.force_gradient = this->force_gradient_;
    call.s = this->displacement(context);
    OP_REQUIRES_OK(context, this->required(context, "field", field, &call.field));
    OP_REQUIRES_OK(context, this->required(context, "dv", v, &call.dv));
    OP_REQUIRES_OK(context, this->required(context, "factors", factors, &call.factors));
    OP_REQUIRES_OK(context, this->optional(context, "v_after", v, &call.v_after, &v_after));
    OP_REQUIRES_OK(context, this->optional(context, "ds", v, &call.add, &ds));
    OP_REQUIRES_OK(context, this->output(context, 0, field, &call.dfield));
    OP_REQUIRES_OK(context, this->output(context, 1, v, &call.ds, ds));
    OP_REQUIRES_OK(context, this->output(context, 2, v, &call.v_before, v_after));
    OP_REQUIRES_OK(context, this->output(context, 3, factors, &call.sums));
    force_vjp(call, parallel_of(context));
  }
};

absl::Status infer_read_gradient_vjp(InferenceContext* c) {
  ShapeHandle mesh;
  TF_RETURN_IF_ERROR(infer_mesh(c, &mesh));
  c->set_output(0, mesh);
  c->set_output(1, c->input(0));
  return absl::OkStatus();
}

absl::Status infer_kick_vjp(InferenceContext* c) {
  constexpr int field = 2;  // its input's index
  std::string force_gradient;
  TF_RETURN_IF_ERROR(c->GetAttr("force_gradient", &force_gradient));
  ShapeHandle mesh;
  TF_RETURN_IF_ERROR(infer_mesh(c, &mesh, force_gradient == "spectral" ? field : -1));
  c->set_output(0, mesh);
  c->set_output(1, c->input(0));
  c->set_output(2, c->input(0));
  c->set_output(3, c->MakeShape({c->Dim(c->input(0), 0), c->MakeDim(2)}));
  return absl::OkStatus();
}

FLOWPM_PARTICLE_MESH_OP("FlowpmReadGradient")
    .Input("potential: T")
    .Output("force: T")
    .SetShapeFn(infer_first);
FLOWPM_PARTICLE_MESH_OP("FlowpmReadGradientVjp")
    .Input("potential: T")
    .Input("dforce: T")
    .Output("dpotential: T")
    .Output("ds: T")
    .SetShapeFn(infer_read_gradient_vjp);
FLOWPM_PARTICLE_MESH_OP("FlowpmKick")
    .Attr("force_gradient: {'finite-difference', 'spectral'}")
    .Input("field: T")
    .Input("v: T")
    .Input("factors: T")
    .Output("v_after: T")
    .SetShapeFn(infer_first);
FLOWPM_PARTICLE_MESH_OP("FlowpmKickVjp")
    .Attr("force_gradient: {'finite-difference', 'spectral'}")
    .Input("field: T")
    .Input("v_after: T")
    .Input("dv: T")
    .Input("ds: T")
    .Input("factors: T")
    .Output("dfield: T")
    .Output("dsum: T")
    .Output("v_before: T")
    .Output("sums: double")
    .SetShapeFn(infer_kick_vjp);

FLOWPM_REGISTER(ReadGradient);
FLOWPM_REGISTER(ReadGradientVjp);
FLOWPM_REGISTER(Kick);
FLOWPM_REGISTER(KickVjp);

}  // namespace
}  // namespace flowpm
