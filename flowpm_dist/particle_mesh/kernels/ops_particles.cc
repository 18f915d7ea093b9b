// Kernels between the particles and the mesh block of a rank as TensorFlow operations.
#include "ops.h"

namespace flowpm {
namespace {

// The cells along an axis of a mesh block. `numbers` are those of the attribute "lattice": along
// each axis the particles, the mesh cells without the halo, and the halo.
int64_t mesh_cells(const std::vector<int64_t>& numbers, int axis) {
  return numbers[3 + axis] + 2 * numbers[6 + axis];
}

Geometry geometry_of(Arguments& a) {
  const auto numbers = a.attribute<std::vector<int64_t>>("lattice");
  const double* per_cell = a.input<double>("per_cell", {3});
  Geometry g;
  g.batch = a.shape("s", 5).dim_size(0);
  if (!a.ok()) return g;
  g.step = numbers[3] % numbers[0] == 0 ? numbers[3] / numbers[0] : 0;
  for (int axis = 0; axis < 3; ++axis) {
    g.particles[axis] = numbers[axis];
    g.own[axis] = numbers[3 + axis];
    g.halo[axis] = numbers[6 + axis];
    g.mesh[axis] = mesh_cells(numbers, axis);
    g.per_cell[axis] = per_cell[axis];
  }
  return g;
}

TensorShape with_components(TensorShape shape, int64_t components) {
  if (components > 0) shape.AddDim(components);
  return shape;
}
TensorShape particle_shape(const Geometry& g, int64_t components = 0) {
  return with_components({g.batch, g.particles[0], g.particles[1], g.particles[2]}, components);
}
TensorShape mesh_shape(const Geometry& g, int64_t components = 0) {
  return with_components({g.batch, g.mesh[0], g.mesh[1], g.mesh[2]}, components);
}

template <typename T>
Paint<T> paint(Arguments& a) {
  const Geometry g = geometry_of(a);
  Paint<T> call{g};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.weights = a.input<T>("weights", particle_shape(g));
  call.mesh = a.output<T>(0, mesh_shape(g));
  call.max_displacement = a.output<T>(1, {3});
  return call;
}

template <typename T>
PaintVjp<T> paint_vjp(Arguments& a) {
  const Geometry g = geometry_of(a);
  PaintVjp<T> call{g};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.dmesh = a.input<T>("dmesh", mesh_shape(g));
  call.weights = a.input<T>("weights", particle_shape(g));
  call.add = a.input<T>("add", particle_shape(g, 3));
  call.ds = a.output<T>(0, particle_shape(g, 3), {"add"});
  if (call.weights) call.dweights = a.output<T>(1, particle_shape(g));
  return call;
}

template <typename T>
Read<T> read(Arguments& a) {
  const Geometry g = geometry_of(a);
  Read<T> call{g, a.shape("fields", 5).dim_size(4)};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.fields = a.input<T>("fields", mesh_shape(g, call.components));
  call.values = a.output<T>(0, particle_shape(g, call.components));
  return call;
}

template <typename T>
ReadVjp<T> read_vjp(Arguments& a) {
  const Geometry g = geometry_of(a);
  ReadVjp<T> call{g, a.shape("fields", 5).dim_size(4)};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.fields = a.input<T>("fields", mesh_shape(g, call.components));
  call.dvalues = a.input<T>("dvalues", particle_shape(g, call.components));
  call.dfields = a.output<T>(0, mesh_shape(g, call.components));
  call.ds = a.output<T>(1, particle_shape(g, 3));
  return call;
}

template <typename T>
Force<T> read_gradient(Arguments& a) {
  const Geometry g = geometry_of(a);
  Force<T> call{g};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.field = a.input<T>("potential", mesh_shape(g));
  call.out = a.output<T>(0, particle_shape(g, 3));
  return call;
}

template <typename T>
ForceVjp<T> read_gradient_vjp(Arguments& a) {
  const Geometry g = geometry_of(a);
  ForceVjp<T> call{g};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.field = a.input<T>("potential", mesh_shape(g));
  call.dv = a.input<T>("dforce", particle_shape(g, 3));
  call.dfield = a.output<T>(0, mesh_shape(g));
  call.ds = a.output<T>(1, particle_shape(g, 3));
  return call;
}

// The components of the field of a kick: 3 if it is the force, 0 if it is a potential.
int64_t components_of(Arguments& a) {
  return a.shape("field").dims() == 5 ? 3 : 0;
}

template <typename T>
Force<T> kick(Arguments& a) {
  const Geometry g = geometry_of(a);
  const int64_t components = components_of(a);
  Force<T> call{g, components > 0};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.field = a.input<T>("field", mesh_shape(g, components));
  call.factors = a.input<T>("factors", {g.batch, 2});
  call.v = a.input<T>("v", particle_shape(g, 3));
  call.out = a.output<T>(0, particle_shape(g, 3), {"v"});
  return call;
}

template <typename T>
ForceVjp<T> kick_vjp(Arguments& a) {
  const Geometry g = geometry_of(a);
  const int64_t components = components_of(a);
  ForceVjp<T> call{g, components > 0};
  call.s = a.input<T>("s", particle_shape(g, 3));
  call.field = a.input<T>("field", mesh_shape(g, components));
  call.dv = a.input<T>("dv", particle_shape(g, 3));
  call.factors = a.input<T>("factors", {g.batch, 2});
  call.v_after = a.input<T>("v_after", particle_shape(g, 3));
  call.add = a.input<T>("ds", particle_shape(g, 3));
  call.dfield = a.output<T>(0, mesh_shape(g, components));
  call.ds = a.output<T>(1, particle_shape(g, 3), {"ds"});
  call.v_before = a.output<T>(2, particle_shape(g, 3), {"v_after"});
  call.sums = a.output<double>(3, {g.batch, 2});
  return call;
}

template <typename T>
Linear<T> linear(Arguments& a) {
  const TensorShape shape = a.shape("x", 5);
  const int64_t batch = shape.dim_size(0);
  Linear<T> call{batch, shape.num_elements() / std::max<int64_t>(1, batch)};
  call.x = a.input<T>("x", shape);
  call.y = a.input<T>("y", shape);
  call.factor = a.input<T>("factor", {batch});
  call.out = a.output<T>(0, shape, {"x", "y"});
  return call;
}

template <typename T>
DriftVjp<T> drift_vjp(Arguments& a) {
  const TensorShape shape = a.shape("x_after", 5);
  const int64_t batch = shape.dim_size(0);
  DriftVjp<T> call{batch, shape.num_elements() / std::max<int64_t>(1, batch)};
  call.x_after = a.input<T>("x_after", shape);
  call.v = a.input<T>("v", shape);
  call.dx = a.input<T>("dx", shape);
  call.dv = a.input<T>("dv", shape);
  call.factor = a.input<T>("factor", {batch});
  call.x_before = a.output<T>(0, shape, {"x_after"});
  call.dv_before = a.output<T>(1, shape, {"dv"});
  call.sum = a.output<double>(2, {batch});
  return call;
}

absl::Status infer_paint(InferenceContext* c) {
  std::vector<int64_t> numbers;
  TF_RETURN_IF_ERROR(c->GetAttr("lattice", &numbers));
  std::vector<DimensionHandle> sizes = {c->Dim(c->input(0), 0)};
  for (int axis = 0; axis < 3; ++axis) sizes.push_back(c->MakeDim(mesh_cells(numbers, axis)));
  c->set_output(0, c->MakeShape(sizes));
  c->set_output(1, c->Vector(3));
  return absl::OkStatus();
}

absl::Status infer_paint_vjp(InferenceContext* c) {
  c->set_output(0, c->input(0));
  if (c->num_outputs() > 1) c->set_output(1, c->input(3));
  return absl::OkStatus();
}

absl::Status infer_read(InferenceContext* c) {
  ShapeHandle particles, component, values;
  TF_RETURN_IF_ERROR(c->Subshape(c->input(0), 0, -1, &particles));
  TF_RETURN_IF_ERROR(c->Subshape(c->input(2), 4, &component));
  TF_RETURN_IF_ERROR(c->Concatenate(particles, component, &values));
  c->set_output(0, values);
  return absl::OkStatus();
}

// Registers an operation with what all between particles and mesh have.
#define FLOWPM_PARTICLE_MESH_OP(NAME)    \
  REGISTER_OP(NAME)                      \
      .Attr("T: {float, double}")        \
      .Attr("lattice: list(int)")        \
      .Input("s: T")                     \
      .Input("per_cell: double")

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
FLOWPM_PARTICLE_MESH_OP("FlowpmRead").Input("fields: T").Output("values: T").SetShapeFn(infer_read);
FLOWPM_PARTICLE_MESH_OP("FlowpmReadVjp")
    .Input("fields: T")
    .Input("dvalues: T")
    .Output("dfields: T")
    .Output("ds: T")
    .SetShapeFn(infer_like<2, 0>);
FLOWPM_PARTICLE_MESH_OP("FlowpmReadGradient")
    .Input("potential: T")
    .Output("force: T")
    .SetShapeFn(infer_like<0>);
FLOWPM_PARTICLE_MESH_OP("FlowpmReadGradientVjp")
    .Input("potential: T")
    .Input("dforce: T")
    .Output("dpotential: T")
    .Output("ds: T")
    .SetShapeFn(infer_like<2, 0>);
FLOWPM_PARTICLE_MESH_OP("FlowpmKick")
    .Input("field: T")
    .Input("v: T")
    .Input("factors: T")
    .Output("v_after: T")
    .SetShapeFn(infer_like<0>);
FLOWPM_PARTICLE_MESH_OP("FlowpmKickVjp")
    .Input("field: T")
    .Input("v_after: T")
    .Input("dv: T")
    .Input("ds: T")
    .Input("factors: T")
    .Output("dfield: T")
    .Output("dsum: T")
    .Output("v_before: T")
    .Output("sums: double")
    .SetShapeFn(infer_like<2, 0, 0, 6>);
REGISTER_OP("FlowpmLinear")
    .Attr("T: {float, double}")
    .Input("x: T")
    .Input("y: T")
    .Input("factor: T")
    .Output("out: T")
    .SetShapeFn(infer_like<0>);
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
    .SetShapeFn(infer_like<0, 0, 4>);

FLOWPM_REGISTER_GPU(Paint, paint, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(PaintVjp, paint_vjp, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(Read, read, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(ReadVjp, read_vjp, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(ReadGradient, read_gradient, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(ReadGradientVjp, read_gradient_vjp, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(Kick, kick, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(KickVjp, kick_vjp, .HostMemory("per_cell"));
FLOWPM_REGISTER_GPU(Linear, linear, );
FLOWPM_REGISTER_GPU(DriftVjp, drift_vjp, );

}  // namespace
}  // namespace flowpm
