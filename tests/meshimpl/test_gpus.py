"""Ranks that NCCL would refuse are refused before they start, whoever starts them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshimpl import launch
from meshimpl.launch import gpus as gpu_module
from meshimpl.launch import job as job_module


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """Makes this a machine with GPUs, and a Horovod that was built with NCCL or without."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)

    def make(count: int, nccl: bool) -> None:
        for number in range(count):
            (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
        library = tmp_path / "horovod" / "tensorflow" / "mpi_lib.cpython-311.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"\x7fELF libmpi.so.40\0" + b"libnccl.so.2\0" * nccl)
        found = SimpleNamespace(submodule_search_locations=[str(library.parents[1])])
        monkeypatch.setattr(gpu_module, "GPU_FOLDERS", tmp_path / "gpus")
        monkeypatch.setattr(gpu_module, "find_spec", lambda name: found)

    return make


def test_gpus_in_sight(node: Callable[[int, bool], None]) -> None:
    assert launch.gpus_in_sight({}) == 0  # without a driver
    node(4, True)
    seen = {"0,1": 2, "2": 1, "": 0, "-1": 0, "1,-1,2": 1, "0,1,2,3,4,5": 4, "MIG-a,MIG-b": 2}
    assert launch.gpus_in_sight({}) == 4
    for visible, count in seen.items():
        assert launch.gpus_in_sight({"CUDA_VISIBLE_DEVICES": visible}) == count, visible


def test_the_launcher_refuses_more_ranks_than_gpus(
    node: Callable[[int, bool], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node(2, True)
    monkeypatch.setattr("meshimpl.launch.job._supervise", lambda *_: pytest.fail("was started"))
    assert launch.relaunch(4, []) == 2
    message = capsys.readouterr().err
    assert "4 ranks and 2 GPUs" in message and "start 2 ranks a node" in message
    launch.check_gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(launch.LaunchError, match="2 ranks and 1 GPU, and NCCL"):
        launch.check_gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch.check_gpus(4)


def test_without_nccl_ranks_may_share(node: Callable[[int, bool], None]) -> None:
    node(1, False)
    assert not launch.horovod_has_nccl()
    assert "CUDA_MODULE_LOADING" not in launch.environment_defaults()
    launch.check_gpus(4)


def test_ranks_with_gpus_have_settings_of_their_own(
    node: Callable[[int, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where NCCL carries their messages; a user's setting comes first."""
    usual = launch.environment_defaults()
    node(2, True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.environment_defaults() == usual
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(os, "environ", {"HOROVOD_CYCLE_TIME": "2"})
    launch.set_horovod_defaults()
    assert os.environ.pop("HOROVOD_CYCLE_TIME") == "2"
    assert os.environ["HOROVOD_ENABLE_ASYNC_COMPLETION"] == "1"
    command, environment = job_module.mpirun_command(2, ["program"])
    assert environment["HOROVOD_CYCLE_TIME"] == "0.1" != usual["HOROVOD_CYCLE_TIME"]
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"
    if "-x" in command:
        assert "CUDA_MODULE_LOADING" in command


def test_the_identity_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver tells it; zeros where there is none, or where it fails."""
    status = {"cuInit": 0}

    def uuid_of(uuid: Any, device: Any) -> int:
        uuid.raw = bytes([device.value] * 16)
        return 0

    def device_of(pointer: Any, index: int) -> int:
        pointer._obj.value = index
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: status["cuInit"],
        cuDeviceGet=device_of,
        cuDeviceGetUuid=uuid_of,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert launch.gpu_identity(3) == bytes([3] * 16)
    status["cuInit"] = 100
    assert launch.gpu_identity(3) == bytes(16)
    monkeypatch.undo()
    assert launch.gpu_identity(0) == bytes(16) or gpu_module.GPU_FOLDERS.exists()
