// Painting particles on maps of the sky, flat or full, and its adjoint, as TensorFlow operations.
#include "ops.h"

namespace flowpm {
namespace {

// Reads what `Sky` and `Ball` share. Returns `count` numbers, of which the spacing, the lengths, the
// step and the depth are the first. `curved`: whether the amounts may have f_K / chi.
template <typename T>
const double* read_shared(Arguments& a, int64_t count, Maps<T>* call, bool curved = false) {
  const TensorShape particles = a.shape("fields", 5), amounts = a.shape("amounts", 3);
  if (particles.dim_size(4) != 3) a.fail("the fields are [b, nx, ny, nz, 3]");
  call->batch = particles.dim_size(0);
  call->field = a.inputs<T>("fields", particles);
  call->fields = int64_t(call->field.size());
  call->shells = a.shape("borders", 1).dim_size(0) - 1;
  call->nodes = amounts.dim_size(1);
  call->columns = amounts.dim_size(2);
  call->power = a.attribute<int64_t>("power");
  call->borders = a.input<double>("borders", {call->shells + 1});
  call->amounts = a.input<T>("amounts", amounts);
  const double* scales = a.input<double>("scales", {count});
  if (!a.ok()) return nullptr;
  for (int axis = 0; axis < 3; ++axis) {
    call->particles[axis] = particles.dim_size(axis + 1);
    call->spacing[axis] = scales[axis];
    call->lengths[axis] = scales[3 + axis];
  }
  call->step = scales[6];
  call->depth = scales[7];
  if (call->nodes < 2 || !(call->step > 0) || !(call->depth > 0)) {
    a.fail("two nodes, a step and a depth above 0 are needed");
  }
  if (amounts.dim_size(0) != call->batch) a.fail("the amounts are not of each of the batch");
  const int64_t maps = a.attribute<std::vector<int64_t>>("shape")[0];
  call->weights = maps / call->shells;
  const int64_t more = call->columns - call->weights;
  if (maps != call->maps() || more < 0 || more > int64_t(curved)) {
    a.fail("each of ", call->shells, " shells has ", call->columns, " maps");
  }
  for (int64_t s = 0; s < call->shells; ++s) {
    if (!(call->borders[s] < call->borders[s + 1])) {
      a.fail("shell ", s, " has borders that do not increase");
    }
  }
  return scales;
}

template <typename T>
void read_maps(Arguments& a, Sky<T>* sky) {
  sky->slabs = a.shape("places", 2).dim_size(0);
  sky->layers = a.shape("distances", 1).dim_size(0);
  const double* scales = read_shared(a, 9, sky, true);
  sky->factors = a.input<T>("factors", {sky->batch, sky->layers, sky->fields});
  sky->places = a.input<int32_t>("places", {sky->slabs, 6});
  sky->directions = a.input<double>("directions", {sky->slabs, 7});
  sky->distances = a.input<double>("distances", {sky->layers});
  if (!a.ok()) return;
  sky->pixels = a.attribute<std::vector<int64_t>>("shape")[1];
  sky->pixel = scales[8];
  for (int64_t slab = 0; slab < sky->slabs; ++slab) {
    const int32_t* place = sky->places + 6 * slab;
    bool axes[3] = {false, false, false};
    for (int axis = 0; axis < 3; ++axis) {
      if (place[axis] < 0 || place[axis] > 2 || axes[place[axis]]) {
        return a.fail("slab ", slab, " has no three axes");
      }
      axes[place[axis]] = true;
    }
    if (place[3] < 0 || place[4] < 0 || place[3] + place[4] > sky->particles[place[2]] ||
        place[5] < 0 || place[5] + place[4] > sky->layers) {
      a.fail("slab ", slab, " has layers that do not exist");
    }
  }
}

template <typename T>
void read_maps(Arguments& a, Ball<T>* ball) {
  ball->copies = a.shape("copies", 2).dim_size(0);
  ball->segments = a.shape("edges", 1).dim_size(0) - 1;
  ball->nside = a.shape("rings", 1).dim_size(0) / 4;
  const double* scales = read_shared(a, 13, ball);
  ball->factors =
      a.input<T>("factors", {ball->batch, ball->segments, ball->fields, Ball<T>::kTerms});
  ball->copy = a.input<int32_t>("copies", {ball->copies, 3});
  ball->edges = a.input<double>("edges", {ball->segments + 1});
  ball->rings = a.input<double>("rings", {4 * ball->nside + 1});
  const auto first = a.attribute<std::vector<int64_t>>("first");
  if (!a.ok()) return;
  for (int axis = 0; axis < 3; ++axis) {
    ball->first[axis] = first[axis];
    ball->observer[axis] = scales[8 + axis];
  }
  ball->near = scales[11];
  ball->far = scales[12];
  for (int64_t segment = 0; segment < ball->segments; ++segment) {
    if (!(ball->edges[segment] >= 0 && ball->edges[segment] < ball->edges[segment + 1])) {
      a.fail("segment ", segment, " has edges that do not increase from 0");
    }
  }
  if (ball->segments < 1) a.fail("a segment is needed");
}

template <typename T>
TensorShape maps_shape(Arguments& a, const Maps<T>& maps) {
  TensorShape shape({maps.batch});
  for (int64_t size : a.attribute<std::vector<int64_t>>("shape")) shape.AddDim(size);
  return shape;
}

template <typename T, template <typename> class Painted>
Painted<T> paint_maps(Arguments& a) {
  Painted<T> call{};
  read_maps(a, &call);
  call.out = a.output<T>(0, maps_shape(a, call));
  return call;
}

template <typename T, template <typename> class Vjp>
Vjp<T> paint_maps_vjp(Arguments& a) {
  Vjp<T> call{};
  read_maps(a, &call.painted);
  call.dout = a.input<T>("dout", maps_shape(a, call.painted));
  const int fields = int(call.painted.fields);
  for (int f = 0; f < fields; ++f) call.dfield.push_back(a.output<T>(f, a.shape("fields")));
  call.dfactors = a.output<double>(fields, a.shape("factors"));
  call.damounts = a.output<double>(fields + 1, a.shape("amounts"));
  return call;
}

absl::Status infer_maps(InferenceContext* c) {
  std::vector<int64_t> shape;
  TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
  std::vector<DimensionHandle> sizes = {c->Dim(c->input(0), 0)};
  for (int64_t size : shape) sizes.push_back(c->MakeDim(size));
  c->set_output(0, c->MakeShape(sizes));
  return absl::OkStatus();
}

absl::Status infer_maps_vjp(InferenceContext* c) {
  // The outputs are shaped like the fields, and like factors and amounts, which follow them.
  for (int m = 0; m < c->num_outputs(); ++m) c->set_output(m, c->input(m));
  return absl::OkStatus();
}

#define FLOWPM_MAPS_OP(NAME)      \
  REGISTER_OP(NAME)               \
      .Attr("T: {float, double}") \
      .Attr("N: int >= 1")        \
      .Attr("shape: list(int)")   \
      .Attr("power: int")         \
      .Input("fields: N * T")     \
      .Input("factors: T")        \
      .Input("amounts: T")        \
      .Input("borders: double")   \
      .Input("scales: double")
#define FLOWPM_SKY_OP(NAME)        \
  FLOWPM_MAPS_OP(NAME)             \
      .Input("places: int32")      \
      .Input("directions: double") \
      .Input("distances: double")
#define FLOWPM_BALL_OP(NAME)      \
  FLOWPM_MAPS_OP(NAME)            \
      .Attr("first: list(int)")   \
      .Input("copies: int32")     \
      .Input("edges: double")     \
      .Input("rings: double")
#define FLOWPM_VJP(OP)           \
  OP.Input("dout: T")            \
      .Output("dfields: N * T")  \
      .Output("dfactors: double") \
      .Output("damounts: double") \
      .SetShapeFn(infer_maps_vjp)

FLOWPM_SKY_OP("FlowpmPaintSky").Output("out: T").SetShapeFn(infer_maps);
FLOWPM_BALL_OP("FlowpmPaintBall").Output("out: T").SetShapeFn(infer_maps);
FLOWPM_VJP(FLOWPM_SKY_OP("FlowpmPaintSkyVjp"));
FLOWPM_VJP(FLOWPM_BALL_OP("FlowpmPaintBallVjp"));

template <typename T>
constexpr auto paint_sky = paint_maps<T, Sky>;
template <typename T>
constexpr auto paint_sky_vjp = paint_maps_vjp<T, SkyVjp>;
template <typename T>
constexpr auto paint_ball = paint_maps<T, Ball>;
template <typename T>
constexpr auto paint_ball_vjp = paint_maps_vjp<T, BallVjp>;

FLOWPM_REGISTER(PaintSky, paint_sky);
FLOWPM_REGISTER(PaintSkyVjp, paint_sky_vjp);
FLOWPM_REGISTER(PaintBall, paint_ball);
FLOWPM_REGISTER(PaintBallVjp, paint_ball_vjp);

}  // namespace
}  // namespace flowpm
