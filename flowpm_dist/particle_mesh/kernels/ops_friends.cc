// Friends of friends as a TensorFlow operation.
#include "ops.h"

namespace flowpm {
namespace {

Friends friends(Arguments& a) {
  Friends call;
  call.count = a.shape("x", 2).dim_size(0);
  if (call.count >= int64_t{1} << 31) a.fail(call.count, " points are too many: at most 2^31 - 1");
  call.x = a.input<double>("x", {call.count, 3});
  call.links = a.input<double>("links", {3});
  call.group = a.output<int32_t>(0, {call.count});
  return call;
}

REGISTER_OP("FlowpmFriends")
    .Input("x: double")
    .Input("links: double")
    .Output("group: int32")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->Dim(c->input(0), 0)));
      return absl::OkStatus();
    });
REGISTER_KERNEL_BUILDER(Name("FlowpmFriends").Device(tensorflow::DEVICE_CPU), Op<friends>);

}  // namespace
}  // namespace flowpm
