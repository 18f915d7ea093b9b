// Painting particles about an observer on maps of the sky, and its adjoint, as operations.
#include "ops.h"

namespace flowpm {
namespace {

template <typename T>
class BallBase : public OpKernel {
 public:
  explicit BallBase(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("maps", &maps_));
    OP_REQUIRES_OK(construction, construction->GetAttr("nside", &nside_));
    OP_REQUIRES_OK(construction, construction->GetAttr("first", &first_));
    OP_REQUIRES_OK(construction, construction->GetAttr("per_distance", &per_distance_));
    OP_REQUIRES(construction, first_.size() == 3 && maps_ > 0 && nside_ > 0 && nside_ <= 8192,
                InvalidArgument("first has three numbers, maps are above 0, nside is 1 to 8192"));
  }

 protected:
  // What is painted; the fields' data go to `field`, which must outlive it.
  absl::Status read(OpKernelContext* context, Ball<T>* ball, std::vector<const T*>* field) const {
    int begin = 0, end = 0;
    TF_RETURN_IF_ERROR(context->op_kernel().InputRange("fields", &begin, &end));
    const Tensor& s = context->input(begin);
    if (s.dims() != 5 || s.dim_size(4) != 3) {
      return InvalidArgument("the fields are [b, nx, ny, nz, 3]");
    }
    for (int i = begin; i < end; ++i) {
      TF_RETURN_IF_ERROR(expect("fields", context->input(i), s.shape()));
      field->push_back(context->input(i).flat<T>().data());
    }
    const Tensor &copies = context->input(end), &edges = context->input(end + 1);
    const Tensor &first_map = context->input(end + 2), &numbers = context->input(end + 3);
    const Tensor &rings = context->input(end + 4), &factors = context->input(end + 5);
    const Tensor& amounts = context->input(end + 6);
    if (amounts.dims() != 3 || amounts.dim_size(1) < 2) {
      return InvalidArgument("amounts are [b, nodes, weights], of at least two nodes");
    }
    ball->batch = s.dim_size(0);
    for (int a = 0; a < 3; ++a) {
      ball->particles[a] = s.dim_size(a + 1);
      ball->first[a] = first_[a];
    }
    ball->copies = copies.dim_size(0);
    ball->segments = first_map.NumElements();
    ball->nodes = amounts.dim_size(1);
    ball->fields = end - begin;
    ball->weights = amounts.dim_size(2);
    ball->maps = maps_;
    ball->nside = nside_;
    ball->per_distance = per_distance_;
    TF_RETURN_IF_ERROR(expect("copies", copies, {ball->copies, 3}));
    TF_RETURN_IF_ERROR(expect("edges", edges, {ball->segments + 1}));
    TF_RETURN_IF_ERROR(expect("first_map", first_map, {ball->segments}));
    TF_RETURN_IF_ERROR(expect("numbers", numbers, {10}));
    TF_RETURN_IF_ERROR(expect("rings", rings, {4 * nside_ + 1}));
    TF_RETURN_IF_ERROR(
        expect("factors", factors, {ball->batch, ball->segments, ball->fields, Ball<T>::kTerms}));
    TF_RETURN_IF_ERROR(expect("amounts", amounts, {ball->batch, ball->nodes, ball->weights}));
    ball->copy = copies.flat<int32_t>().data();
    ball->edges = edges.flat<double>().data();
    ball->first_map = first_map.flat<int32_t>().data();
    ball->rings = rings.flat<double>().data();
    ball->factors = factors.flat<T>().data();
    ball->amounts = amounts.flat<T>().data();
    const double* number = numbers.flat<double>().data();
    for (int a = 0; a < 3; ++a) {
      ball->spacing[a] = number[a];
      ball->lengths[a] = number[3 + a];
      ball->observer[a] = number[6 + a];
    }
    ball->step = number[9];
    ball->field = field->data();
    return check(*ball);
  }

 private:
  static absl::Status check(const Ball<T>& ball) {
    for (int64_t segment = 0; segment < ball.segments; ++segment) {
      if (!(ball.edges[segment] >= 0 && ball.edges[segment] < ball.edges[segment + 1])) {
        return InvalidArgument("segment ", segment, " has edges that do not increase from 0");
      }
      if (ball.first_map[segment] < 0 || ball.first_map[segment] + ball.weights > ball.maps) {
        return InvalidArgument("segment ", segment, " has maps that do not exist");
      }
    }
    if (ball.segments < 1 || !(ball.step > 0)) {
      return InvalidArgument("a segment, and a step above 0, are needed");
    }
    return absl::OkStatus();
  }

  int64_t maps_ = 0, nside_ = 0;
  std::vector<int64_t> first_;
  bool per_distance_ = false;
};

template <typename T>
class PaintBallOp : public BallBase<T> {
  using BallBase<T>::BallBase;
  void Compute(OpKernelContext* context) override {
    Ball<T> ball{};
    std::vector<const T*> field;
    OP_REQUIRES_OK(context, this->read(context, &ball, &field));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {ball.batch, ball.maps, ball.pixels()}, &out));
    ball.out = out->flat<T>().data();
    paint_ball(ball, parallel_of(context));
  }
};

template <typename T>
class PaintBallVjpOp : public BallBase<T> {
  using BallBase<T>::BallBase;
  void Compute(OpKernelContext* context) override {
    BallVjp<T> call{};
    std::vector<const T*> field;
    OP_REQUIRES_OK(context, this->read(context, &call.ball, &field));
    const Ball<T>& ball = call.ball;
    const Tensor& dout = context->input(context->num_inputs() - 1);
    OP_REQUIRES_OK(context, expect("dout", dout, {ball.batch, ball.maps, ball.pixels()}));
    call.dout = dout.flat<T>().data();
    std::vector<T*> dfield;
    for (int64_t f = 0; f < ball.fields; ++f) {
      Tensor* out = nullptr;
      OP_REQUIRES_OK(context,
                     context->allocate_output(int(f), context->input(0).shape(), &out));
      dfield.push_back(out->flat<T>().data());
    }
    call.dfield = dfield.data();
    Tensor *dfactors = nullptr, *damounts = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(
                                int(ball.fields),
                                {ball.batch, ball.segments, ball.fields, Ball<T>::kTerms},
                                &dfactors));
    OP_REQUIRES_OK(context, context->allocate_output(int(ball.fields) + 1,
                                                     {ball.batch, ball.nodes, ball.weights},
                                                     &damounts));
    call.dfactors = dfactors->flat<double>().data();
    call.damounts = damounts->flat<double>().data();
    paint_ball_vjp(call, parallel_of(context));
  }
};

constexpr int kBallOthers = 7;  // inputs after the fields

absl::Status infer_paint_ball(InferenceContext* c) {
  int64_t maps = 0, nside = 0;
  TF_RETURN_IF_ERROR(c->GetAttr("maps", &maps));
  TF_RETURN_IF_ERROR(c->GetAttr("nside", &nside));
  ShapeHandle s;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 5, &s));
  c->set_output(0, c->MakeShape({c->Dim(s, 0), c->MakeDim(maps), c->MakeDim(12 * nside * nside)}));
  return absl::OkStatus();
}

absl::Status infer_paint_ball_vjp(InferenceContext* c) {
  const int fields = c->num_inputs() - kBallOthers - 1;
  for (int f = 0; f < fields; ++f) c->set_output(f, c->input(f));
  c->set_output(fields, c->input(fields + kBallOthers - 2));
  c->set_output(fields + 1, c->input(fields + kBallOthers - 1));
  return absl::OkStatus();
}

#define FLOWPM_BALL_OP(NAME)       \
  REGISTER_OP(NAME)                \
      .Attr("T: {float, double}")  \
      .Attr("N: int >= 1")         \
      .Attr("maps: int")           \
      .Attr("nside: int")          \
      .Attr("first: list(int)")    \
      .Attr("per_distance: bool")      \
      .Input("fields: N * T")      \
      .Input("copies: int32")      \
      .Input("edges: double")      \
      .Input("first_map: int32")   \
      .Input("numbers: double")    \
      .Input("rings: double")      \
      .Input("factors: T")         \
      .Input("amounts: T")

FLOWPM_BALL_OP("FlowpmPaintBall")
    .Output("out: T")
    .SetShapeFn(infer_paint_ball);
FLOWPM_BALL_OP("FlowpmPaintBallVjp")
    .Input("dout: T")
    .Output("dfields: N * T")
    .Output("dfactors: double")
    .Output("damounts: double")
    .SetShapeFn(infer_paint_ball_vjp);

FLOWPM_REGISTER(PaintBall);
FLOWPM_REGISTER(PaintBallVjp);

}  // namespace
}  // namespace flowpm
