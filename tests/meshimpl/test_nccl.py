"""What can go wrong with exchanges by NCCL's functions. A library for CPUs replaces NCCL.

The files `ranks_*.py` exchange rows by it.
"""

from __future__ import annotations

import subprocess
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from nccl_stand_in import build_stand_in
from rank_jobs import needs_horovod, run_two

from flowpm_dist.particle_mesh.kernels.build import compiler
from meshimpl import engine
from meshimpl.engine import CollectiveError, NcclEngine, Rows

SUPPORT = Path(__file__).parents[1] / "support"
ONE_ROW = Rows(np.array([2]), np.array([2]))
SHIFTS = """
import copy, os
{change}
import tensorflow as tf
from meshimpl import ProcessMesh
mesh = ProcessMesh("row:2")
if mesh.rank == 0:
    copy.deepcopy(mesh)  # on one rank alone
for number in range(3):
    print(mesh.world.shift(tf.range(1e5), 1).shape, flush=True)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the library that replaces NCCL."""
    needs_horovod(2)
    return build_stand_in(tmp_path_factory.mktemp("nccl"))


def alone(library: str) -> NcclEngine:
    """An engine of one rank, which Horovod need not start."""
    real = engine.import_horovod()

    def broadcast(identity: tf.Tensor, *_: Any, **__: Any) -> tf.Tensor:
        return identity

    nccl = NcclEngine(library)
    vars(nccl)["_hvd"] = SimpleNamespace(mpi_ops=real.mpi_ops, rank=lambda: 0, broadcast=broadcast)
    vars(nccl)["_device"] = "CPU:0"  # a stand-in moves memory of the host
    nccl.process_sets = {(0,): None}
    return nccl


def test_the_variable_has_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    current = engine.current.__wrapped__
    kinds = {"": engine.HorovodEngine, "horovod": engine.HorovodEngine, "nccl": NcclEngine}
    for value, kind in (kinds | {"/a/libnccl.so": NcclEngine}).items():
        monkeypatch.setenv(engine.EXCHANGE, value)
        assert type(current()) is kind
    monkeypatch.setenv(engine.EXCHANGE, "mpi")
    with pytest.raises(CollectiveError, match='"nccl", the path of a library.*not "mpi"'):
        current()


def test_what_is_missing_is_named(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "^MESHIMPL_EXCHANGE=/no.*: NCCL cannot be loaded.*: pip install .*, or unset"
    with pytest.raises(CollectiveError, match=message):
        alone("/nowhere/libnccl.so.2").prepare()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    with pytest.raises(CollectiveError, match="EXCHANGE=nccl: this rank has no GPU.*; unset"):
        NcclEngine("nccl").prepare()
    older = alone(stand_in)
    older._hvd.mpi_ops = SimpleNamespace(MPI_LIB=SimpleNamespace())
    with pytest.raises(CollectiveError, match="meshimpl.horovod_wheel` builds one"):
        older.prepare()
    another = alone(find_library("c") or "libc.so.6")
    with pytest.raises(CollectiveError, match="has no nccl.*: NCCL 2.7 has it"):
        another.connect()


def test_nccl_refuses(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its functions may; what it says arrives, and the next exchange works again."""
    nccl, rows = alone(stand_in), tf.reshape(tf.range(6.0), [2, 3])
    for function in ("ncclGetUniqueId", "ncclCommInitRank"):
        monkeypatch.setenv("STAND_IN_FAILS", function)
        with pytest.raises(CollectiveError, match=f"{function}: unhandled system error; NCCL_"):
            nccl.connect()
    monkeypatch.delenv("STAND_IN_FAILS")
    nccl.connect()
    for function, where in (
        ("ncclSend", "ncclSend"),
        ("ncclRecv", "ncclRecv"),
        ("ncclGroupStart", "ncclGroupStart"),
        ("ncclGroupEnd", "ncclGroupEnd"),
        ("ncclCommGetAsyncError", "an earlier exchange"),
    ):
        monkeypatch.setenv("STAND_IN_FAILS", function)
        with pytest.raises(tf.errors.InternalError, match=f"{where}: unhandled system error"):
            nccl.exchange(rows, ONE_ROW, (0,), "x")
        monkeypatch.delenv("STAND_IN_FAILS")
        np.testing.assert_array_equal(nccl.exchange(rows, ONE_ROW, (0,), "x"), rows)


def test_exchanges_that_do_not_fit(stand_in: str) -> None:
    nccl = alone(stand_in)
    nccl.connect()
    with pytest.raises(CollectiveError, match="no process set"):
        nccl.exchange(tf.zeros([2]), ONE_ROW, (0, 1), "x")
    with pytest.raises(tf.errors.InvalidArgumentError, match="an exchange of 2 rows got"):
        nccl.exchange(tf.zeros([3]), ONE_ROW, (0,), "x")
    with pytest.raises(tf.errors.InternalError, match="was not joined"):
        nccl._ops.meshimpl_exchange(tf.zeros([2]), group="7", sent=[2], received=[2])


@pytest.mark.timeout(180)
def test_a_failure_on_one_rank_ends_the_job(stand_in: str, tmp_path: Path) -> None:
    """The other rank waits for its rows, in a library that knows nothing of it."""
    change = "if os.environ['OMPI_COMM_WORLD_RANK'] == '0': del os.environ['STAND_IN_FAILS']"
    fails = {engine.EXCHANGE: stand_in, "STAND_IN_FAILS": "ncclSend:1"}
    job = run_two(tmp_path, SHIFTS.format(change=change), **fails)
    assert job.returncode != 0 and job.stdout.count("(100000,)") == 2
    assert "ncclSend: unhandled system error" in job.stderr


@pytest.mark.timeout(180)
def test_ranks_that_chose_differently_are_named(stand_in: str, tmp_path: Path) -> None:
    change = f"if os.environ['OMPI_COMM_WORLD_RANK'] == '0': del os.environ['{engine.EXCHANGE}']"
    job = run_two(tmp_path, SHIFTS.format(change=change), **{engine.EXCHANGE: stand_in})
    assert job.returncode != 0 and "(100000,)" not in job.stdout
    assert "rank 0: MESHIMPL_EXCHANGE is horovod" in job.stderr
    assert f"rank 1: MESHIMPL_EXCHANGE is {stand_in}" in job.stderr


def test_the_header_of_nccl_declares_the_same(tmp_path: Path) -> None:
    package = find_spec("nvidia") and find_spec("nvidia.nccl")
    if package is None:
        pytest.skip("NCCL's header comes with TensorFlow for GPUs (make setup TF=gpu)")
    (tmp_path / "cuda_runtime.h").write_text("typedef struct CUstream_st* cudaStream_t;")
    (tmp_path / "cuda_fp16.h").touch()
    folders = [
        str(tmp_path),
        *(f"{folder}/include" for folder in package.submodule_search_locations),
    ]
    includes = [f"-isystem{folder}" for folder in folders]
    source = str(SUPPORT / "nccl_header.cc")
    subprocess.run([*compiler(), "-std=c++17", "-fsyntax-only", *includes, source], check=True)
