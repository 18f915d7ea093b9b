// x + factor y and the adjoint of a drift as TensorFlow operations.
#include <algorithm>

#include "ops.h"

namespace flowpm {
namespace {

template <typename T>
class LinearOp : public OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const Tensor &x = context->input(0), &y = context->input(1), &factor = context->input(2);
    OP_REQUIRES(context, x.dims() > 0, InvalidArgument("x is a scalar"));
    OP_REQUIRES_OK(context, expect("y", y, x.shape()));
    const int64_t batch = x.dim_size(0);
    OP_REQUIRES_OK(context, expect("factor", factor, TensorShape({batch})));
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({0, 1}, 0, x.shape(), &out));
    linear(batch, x.NumElements() / std::max<int64_t>(1, batch), x.flat<T>().data(),
           y.flat<T>().data(), factor.flat<T>().data(), out->flat<T>().data(),
           parallel_of(context));
  }
};

template <typename T>
class DriftVjpOp : public OpKernel {
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    const Tensor &x = context->input(0), &v = context->input(1), &dx = context->input(2);
    const Tensor &dv = context->input(3), &factor = context->input(4);
    OP_REQUIRES(context, x.dims() > 0, InvalidArgument("x_after is a scalar"));
    OP_REQUIRES_OK(context, expect("v", v, x.shape()));
    OP_REQUIRES_OK(context, expect("dx", dx, x.shape()));
    OP_REQUIRES_OK(context, expect("dv", dv, x.shape()));
    const int64_t batch = x.dim_size(0);
    OP_REQUIRES_OK(context, expect("factor", factor, TensorShape({batch})));
    Tensor *x_before = nullptr, *dv_before = nullptr, *sum = nullptr;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 0, x.shape(), &x_before));
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({3}, 1, x.shape(), &dv_before));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({batch}), &sum));
    drift_vjp(batch, x.NumElements() / std::max<int64_t>(1, batch), x.flat<T>().data(),
              v.flat<T>().data(), dx.flat<T>().data(), dv.flat<T>().data(), factor.flat<T>().data(),
              x_before->flat<T>().data(), dv_before->flat<T>().data(), sum->flat<double>().data(),
              parallel_of(context));
  }
};

absl::Status infer_drift_vjp(InferenceContext* c) {
  ShapeHandle x;
  TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 1, &x));
  c->set_output(0, x);
  c->set_output(1, x);
  c->set_output(2, c->Vector(c->Dim(x, 0)));
  return absl::OkStatus();
}

REGISTER_OP("FlowpmLinear")
    .Attr("T: {float, double}")
    .Input("x: T")
    .Input("y: T")
    .Input("factor: T")
    .Output("out: T")
    .SetShapeFn(infer_first);
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
    .SetShapeFn(infer_drift_vjp);

FLOWPM_REGISTER(Linear);
FLOWPM_REGISTER(DriftVjp);

}  // namespace
}  // namespace flowpm
