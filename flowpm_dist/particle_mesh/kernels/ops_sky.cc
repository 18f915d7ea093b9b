// Painting layers of particles on maps of the sky, and its adjoint, as TensorFlow operations.
#include "ops.h"

namespace flowpm {
namespace {

template <typename T>
class SkyBase : public OpKernel {
 public:
  explicit SkyBase(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("maps", &maps_));
    OP_REQUIRES_OK(construction, construction->GetAttr("pixels", &pixels_));
  }

 protected:
  // What is painted; the fields' data go to `field`, which must outlive it.
  absl::Status read(OpKernelContext* context, Sky<T>* sky, std::vector<const T*>* field) const {
    int begin = 0, end = 0;
    TF_RETURN_IF_ERROR(context->op_kernel().InputRange("fields", &begin, &end));
    const Tensor& s = context->input(begin);
    if (s.dims() != 5 || s.dim_size(4) != 3 || maps_ < 1 || pixels_ < 1) {
      return InvalidArgument("the fields are [b, nx, ny, nz, 3], maps and pixels above 0");
    }
    for (int i = begin; i < end; ++i) {
      TF_RETURN_IF_ERROR(expect("fields", context->input(i), s.shape()));
      field->push_back(context->input(i).flat<T>().data());
    }
    const Tensor &places = context->input(end), &directions = context->input(end + 1);
    const Tensor &distances = context->input(end + 2), &first = context->input(end + 3);
    const Tensor &scales = context->input(end + 4), &factors = context->input(end + 5);
    const Tensor& amounts = context->input(end + 6);
    sky->batch = s.dim_size(0);
    for (int a = 0; a < 3; ++a) sky->particles[a] = s.dim_size(a + 1);
    sky->fields = end - begin;
    sky->slabs = places.dim_size(0);
    sky->layers = distances.NumElements();
    sky->maps = maps_;
    sky->pixels = pixels_;
    if (amounts.dims() != 4) return InvalidArgument("amounts are [b, layers, weights, 2]");
    sky->weights = amounts.dim_size(2);
    TF_RETURN_IF_ERROR(expect("places", places, {sky->slabs, 6}));
    TF_RETURN_IF_ERROR(expect("directions", directions, {sky->slabs, 5}));
    TF_RETURN_IF_ERROR(expect("distances", distances, {sky->layers}));
    TF_RETURN_IF_ERROR(expect("first_map", first, {sky->layers}));
    TF_RETURN_IF_ERROR(expect("scales", scales, {7}));
    TF_RETURN_IF_ERROR(expect("factors", factors, {sky->batch, sky->layers, sky->fields}));
    TF_RETURN_IF_ERROR(expect("amounts", amounts, {sky->batch, sky->layers, sky->weights, 2}));
    sky->places = places.flat<int32_t>().data();
    sky->directions = directions.flat<double>().data();
    sky->distances = distances.flat<double>().data();
    sky->first_map = first.flat<int32_t>().data();
    sky->factors = factors.flat<T>().data();
    sky->amounts = amounts.flat<T>().data();
    const double* scale = scales.flat<double>().data();
    for (int a = 0; a < 3; ++a) {
      sky->spacing[a] = scale[a];
      sky->lengths[a] = scale[3 + a];
    }
    sky->pixel = scale[6];
    sky->field = field->data();
    return check(*sky);
  }

 private:
  static absl::Status check(const Sky<T>& sky) {
    for (int64_t slab = 0; slab < sky.slabs; ++slab) {
      const int32_t* place = sky.places + 6 * slab;
      bool axes[3] = {false, false, false};
      for (int a = 0; a < 3; ++a) {
        if (place[a] < 0 || place[a] > 2 || axes[place[a]]) {
          return InvalidArgument("slab ", slab, " has no three axes");
        }
        axes[place[a]] = true;
      }
      if (place[3] < 0 || place[4] < 0 || place[3] + place[4] > sky.particles[place[2]] ||
          place[5] < 0 || place[5] + place[4] > sky.layers) {
        return InvalidArgument("slab ", slab, " has layers that do not exist");
      }
    }
    for (int64_t layer = 0; layer < sky.layers; ++layer) {
      if (sky.first_map[layer] < 0 || sky.first_map[layer] + sky.weights > sky.maps) {
        return InvalidArgument("layer ", layer, " has maps that do not exist");
      }
    }
    return absl::OkStatus();
  }

  int64_t maps_ = 0, pixels_ = 0;
};

template <typename T>
class PaintSkyOp : public SkyBase<T> {
  using SkyBase<T>::SkyBase;
  void Compute(OpKernelContext* context) override {
    Sky<T> sky{};
    std::vector<const T*> field;
    OP_REQUIRES_OK(context, this->read(context, &sky, &field));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(
                                0, {sky.batch, sky.maps, sky.pixels, sky.pixels}, &out));
    sky.out = out->flat<T>().data();
    paint_sky(sky, parallel_of(context));
  }
};

template <typename T>
class PaintSkyVjpOp : public SkyBase<T> {
  using SkyBase<T>::SkyBase;
  void Compute(OpKernelContext* context) override {
    SkyVjp<T> call{};
    std::vector<const T*> field;
    OP_REQUIRES_OK(context, this->read(context, &call.sky, &field));
    const Sky<T>& sky = call.sky;
    const Tensor& dout = context->input(context->num_inputs() - 1);
    OP_REQUIRES_OK(context,
                   expect("dout", dout, {sky.batch, sky.maps, sky.pixels, sky.pixels}));
    call.dout = dout.flat<T>().data();
    std::vector<T*> dfield;
    for (int64_t f = 0; f < sky.fields; ++f) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(context,
                     context->allocate_output(int(f), context->input(0).shape(), &out));
      dfield.push_back(out->flat<T>().data());
    }
    call.dfield = dfield.data();
    Tensor *dfactors = nullptr, *damounts = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(int(sky.fields),
                                                     {sky.batch, sky.layers, sky.fields},
                                                     &dfactors));
    OP_REQUIRES_OK(context, context->allocate_output(int(sky.fields) + 1,
                                                     {sky.batch, sky.layers, sky.weights, 2},
                                                     &damounts));
    call.dfactors = dfactors->flat<double>().data();
    call.damounts = damounts->flat<double>().data();
    paint_sky_vjp(call, parallel_of(context));
  }
};

constexpr int kOthers = 7;  // inputs after the fields

absl::Status infer_paint_sky(InferenceContext* c) {
  int64_t maps = 0, pixels = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("maps", &maps));
  TF_RETURN_IF_ERROR(c->GetAttr("pixels", &pixels));
  ShapeHandle s;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 5, &s));
  c->set_output(0, c->MakeShape({c->Dim(s, 0), c->MakeDim(maps), c->MakeDim(pixels),
                                 c->MakeDim(pixels)}));
  return absl::OkStatus();
}

absl::Status infer_paint_sky_vjp(InferenceContext* c) {
  const int fields = c->num_inputs() - kOthers - 1;
  for (int f = 0; f < fields; ++f) c->set_output(f, c->input(f));
  c->set_output(fields, c->input(fields + kOthers - 2));
  c->set_output(fields + 1, c->input(fields + kOthers - 1));
  return absl::OkStatus();
}

#define FLOWPM_SKY_OP(NAME)       \
  REGISTER_OP(NAME)               \
      .Attr("T: {float, double}") \
      .Attr("N: int >= 1")        \
      .Attr("maps: int")          \
      .Attr("pixels: int")        \
      .Input("fields: N * T")     \
      .Input("places: int32")     \
      .Input("directions: double")\
      .Input("distances: double") \
      .Input("first_map: int32")  \
      .Input("scales: double")    \
      .Input("factors: T")        \
      .Input("amounts: T")

FLOWPM_SKY_OP("FlowpmPaintSky")
    .Output("out: T")
    .SetShapeFn(infer_paint_sky);
FLOWPM_SKY_OP("FlowpmPaintSkyVjp")
    .Input("dout: T")
    .Output("dfields: N * T")
    .Output("dfactors: double")
    .Output("damounts: double")
    .SetShapeFn(infer_paint_sky_vjp);

FLOWPM_REGISTER(PaintSky);
FLOWPM_REGISTER(PaintSkyVjp);

}  // namespace
}  // namespace flowpm
