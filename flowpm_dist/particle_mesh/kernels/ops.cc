#include "ops.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "tensorflow/core/lib/core/threadpool.h"

// Looked for in the library before it is loaded.
extern "C" __attribute__((used, visibility("default"))) const char flowpm_built_for[] =
    "flowpm_dist kernels for TensorFlow " FLOWPM_TENSORFLOW ";";

namespace flowpm {
namespace {

// Pieces of work, taken in turn by the caller and TensorFlow's own threads.
struct Queue {
  Queue(int64_t count, const std::function<void(int64_t)>& work) : count(count), work(&work) {}

  void run() {
    int64_t finished = 0;
    for (int64_t m; (m = next.fetch_add(1)) < count; ++finished) (*work)(m);
    if (finished > 0 && done.fetch_add(finished) + finished == count) {
      std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_one();
    }
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done.load() == count; });
  }

  const int64_t count;
  const std::function<void(int64_t)>* work;  // not used once all pieces are taken
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;
};

}  // namespace

Parallel parallel_of(OpKernelContext* context) {
  const auto* pool = context->device()->tensorflow_cpu_worker_threads();
  return [pool](int64_t count, const std::function<void(int64_t)>& work) {
    const int64_t threads = std::min<int64_t>(pool->num_threads, count);
    if (threads <= 1) {
      for (int64_t m = 0; m < count; ++m) work(m);
      return;
    }
    auto queue = std::make_shared<Queue>(count, work);
    for (int64_t t = 1; t < threads; ++t) pool->workers->Schedule([queue] { queue->run(); });
    queue->run();
    queue->wait();
  };
}

absl::Status expect(const char* name, const Tensor& tensor, const TensorShape& shape) {
  if (tensor.shape() == shape) return absl::OkStatus();
  return InvalidArgument(name, " is ", tensor.shape().DebugString(), ", not ", shape.DebugString());
}

absl::Status Attributes::check() const {
  if (particles.size() != 3 || halo.size() != 3) {
    return InvalidArgument("particles and halo are three numbers each");
  }
  for (int a = 0; a < 3; ++a) {
    if (particles[a] < 1 || mesh_factor < 1 || halo[a] < 0 || mesh(a) >= int64_t(kFarthest)) {
      return InvalidArgument("along axis ", a, ", no mesh has ", particles[a],
                             " particles, mesh_factor ", mesh_factor, " and a halo of ", halo[a]);
    }
  }
  return absl::OkStatus();
}

absl::Status Attributes::geometry(const Tensor& s, const Tensor& per_cell, Geometry* g) const {
  TF_RETURN_IF_ERROR(expect("per_cell", per_cell, TensorShape({3})));
  if (s.dims() != 5) {
    return InvalidArgument("s is ", s.shape().DebugString(), ", not [b, nx, ny, nz, 3]");
  }
  g->batch = s.dim_size(0);
  g->mesh_factor = mesh_factor;
  for (int a = 0; a < 3; ++a) {
    g->particles[a] = particles[a];
    g->halo[a] = halo[a];
    g->mesh[a] = mesh(a);
    g->per_cell[a] = per_cell.flat<double>()(a);
  }
  return expect("s", s, particle_shape(*g, 3));
}

TensorShape particle_shape(const Geometry& g) {
  return {g.batch, g.particles[0], g.particles[1], g.particles[2]};
}
TensorShape particle_shape(const Geometry& g, int64_t components) {
  return {g.batch, g.particles[0], g.particles[1], g.particles[2], components};
}
TensorShape mesh_shape(const Geometry& g) { return {g.batch, g.mesh[0], g.mesh[1], g.mesh[2]}; }
TensorShape mesh_shape(const Geometry& g, int64_t components) {
  return {g.batch, g.mesh[0], g.mesh[1], g.mesh[2], components};
}

absl::Status infer_mesh(InferenceContext* c, ShapeHandle* shape, int like) {
  Attributes attributes;
  TF_RETURN_IF_ERROR(attributes.read(c));
  ShapeHandle s;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 5, &s));
  std::vector<tensorflow::shape_inference::DimensionHandle> sizes = {c->Dim(s, 0)};
  for (int a = 0; a < 3; ++a) sizes.push_back(c->MakeDim(attributes.mesh(a)));
  if (like >= 0) {
    ShapeHandle field;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(like), 5, &field));
    sizes.push_back(c->Dim(field, 4));
  }
  *shape = c->MakeShape(sizes);
  return absl::OkStatus();
}

absl::Status infer_first(InferenceContext* c) {
  c->set_output(0, c->input(0));
  return absl::OkStatus();
}

}  // namespace flowpm
