// Points painted on a mesh as a TensorFlow operation.
#include "ops.h"

namespace flowpm {
namespace {

Points paint_points(Arguments& a) {
  Points call;
  const TensorShape block = a.shape("mesh", 3);
  call.order = a.attribute<int64_t>("order");
  if (call.order < 2 || call.order > 4) a.fail("order ", call.order, " is not 2, 3 or 4");
  call.count = a.shape("x", 2).dim_size(0);
  for (int axis = 0; axis < 3; ++axis) {
    call.shape[axis] = block.dim_size(axis);
    if (call.shape[axis] < call.order) a.fail(call.shape[axis], " cells are too few");
  }
  call.x = a.input<double>("x", {call.count, 3});
  call.weights = a.input<double>("weights", {call.count});
  call.before = a.input<double>("mesh", block);
  call.mesh = a.output<double>(0, block, {"mesh"});
  return call;
}

REGISTER_OP("FlowpmPaintPoints")
    .Attr("order: int")
    .Attr("weighted: int >= 0")
    .Input("x: double")
    .Input("weights: weighted * double")
    .Input("mesh: double")
    .Output("sums: double")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(c->num_inputs() - 1));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("FlowpmPaintPoints").Device(tensorflow::DEVICE_CPU),
                        Op<paint_points>);

}  // namespace
}  // namespace flowpm
