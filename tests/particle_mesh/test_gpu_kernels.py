"""Kernels of GPUs without a GPU: their threads on the CPU against the portable ones; NVRTC."""

from __future__ import annotations

import functools
import importlib.util
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gpu_threads import Threads, is_wide

from flowpm_dist.particle_mesh.kernels import (
    Compiled,
    KernelsError,
    Lattice,
    Portable,
    build,
    compiled,
    kernels,
    nvrtc,
)
from tests.particle_mesh import test_kernels
from tests.particle_mesh.test_kernels import (
    FRACTIONAL,
    LATTICES,
    Case,
    assert_same,
    needs_library,
    results,
)

try:
    build.compiler()
except build.BuildError as error:
    NO_COMPILER = str(error)
else:
    NO_COMPILER = ""
needs_compiler = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER)
has_nvrtc = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cuda_nvrtc")
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason=f"pip install {nvrtc.PACKAGE}")
CAPABILITIES = [(9, 0), *(pytest.param(c, marks=pytest.mark.long) for c in [(8, 0), (10, 0)])]
TYPES = ["float", "double"]
CUBIN = 190
"""The machine in the header of an ELF file for NVIDIA's GPUs (EM_CUDA)."""


@needs_compiler
@pytest.mark.parametrize(
    ("lattice", "dtype"),
    [(lattice, "float64") for lattice in (LATTICES[1], LATTICES[3], LATTICES[4], FRACTIONAL[1])]
    + [(FRACTIONAL[0], "float32")],
)
def test_threads_give_what_the_portable_kernels_give(lattice: Any, dtype: str) -> None:
    """Every kernel, with and without halo; particles that are lost or wrap many times.

    Numbers of 32 and of 64 bits for the cells give the same bits.
    """
    expected = results(Portable(xla=False), Case(lattice, dtype))
    found = results(Threads(), Case(lattice, dtype))
    assert_same(found, expected, dtype)
    wide = results(Threads(wide=True), Case(lattice, dtype))
    for narrow, other in zip(*map(tf.nest.flatten, (found, wide)), strict=True):
        np.testing.assert_array_equal(narrow, other)


@needs_compiler
@pytest.mark.parametrize("particles", [(1, 2, 3), (2, 1, 5)])
def test_threads_on_boxes_of_a_few_cells(
    particles: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The difference of four points goes around such a box more than once."""
    monkeypatch.setattr(test_kernels, "PARTICLES", particles)
    case = functools.partial(Case, LATTICES[4])
    assert_same(results(Threads(), case()), results(Portable(xla=False), case()), "float64")


@needs_compiler
def test_cells_have_numbers_of_64_bits_where_they_need_them() -> None:
    side = (1.0, 1.0, 1.0)
    assert not is_wide(Lattice((2**11 - 1, 2**10, 2**10), 1, (0, 0, 0), side))
    assert is_wide(Lattice((2**10, 2**10, 2**10), 1, (2**9, 0, 0), side))


@needs_compiler
@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e30, 40.0])
def test_threads_leave_out_particles_that_are_nowhere(bad: float) -> None:
    test_kernels.test_particles_that_are_nowhere(Threads, bad)


@functools.cache
def code_and_log(capability: tuple[int, int]) -> tuple[bytes, str]:
    """Compiled kernels, and what the assembler reports of each."""
    logs: list[str] = []
    original = nvrtc._bytes_of

    def logged(program: Any, kind: str) -> bytes:
        logs.append(original(program, "ProgramLog").decode())
        return original(program, kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "_bytes_of", logged)
        patch.setattr(nvrtc, "OPTIONS", [*nvrtc.OPTIONS, "--ptxas-options=-v"])
        code = nvrtc.compiled(capability)
    return code, logs[-1]


@needs_nvrtc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_nvrtc_compiles_the_kernels(capability: tuple[int, int]) -> None:
    """The machine code has each call of the header in all its variants, in float and double."""
    code, _ = code_and_log(capability)
    assert code[:4] == b"\x7fELF" and struct.unpack_from("<H", code, 18) == (CUBIN,)
    header = (nvrtc.HERE / "calls.h").read_text()
    endings = {
        "MESH": ["", "_wide"],
        "FORCE": ["", "_wide", "_spectral", "_spectral_wide"],
        "PARTICLE": [""],
    }
    names = ["finish_float", "finish_double"]
    for kind, own in endings.items():
        (line,) = re.findall(rf"#define FLOWPM_{kind}_CALLS\(M\) (.*)", header)
        kernels = re.findall(r"M\((\w+)\)", line)
        names += [f"{name}_{t}{ending}" for name in kernels for t in TYPES for ending in own]
    assert len(names) == 38
    assert all(f".text.flowpm_{name}\0".encode() in code for name in names)


@needs_nvrtc
@pytest.mark.parametrize("capability", CAPABILITIES[:2])
def test_registers_leave_room_for_many_threads(capability: tuple[int, int]) -> None:
    """A multiprocessor of 65,536 registers holds 1,024 threads of a kick, 512 of its adjoint."""
    _, log = code_and_log(capability)
    for name, most in {"Force": 64, "ForceVjp": 128}.items():
        for ending in ("", "_spectral"):
            after = log.split(f"entry function 'flowpm_{name}_float{ending}'")[1]
            report = after.split("Compiling entry function")[0]
            (registers,) = re.findall(r"Used (\d+) registers", report)
            assert int(registers) <= most
            assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores", report)


@needs_nvrtc
def test_gpus_that_nvrtc_does_not_know_are_refused() -> None:
    with pytest.raises(nvrtc.GpuCodeError, match=r"compute capability 1.1 \(.*gpu-architecture"):
        nvrtc.compiled((1, 1))


def machine_code(capability: tuple[int, int]) -> bytes:
    """A file with the head of machine code, and a table of no sections at its end."""
    return (
        b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q16x", 64) + repr(capability).encode()
    )


def test_machine_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[tuple[int, int]] = []

    def compiled(capability: tuple[int, int]) -> bytes:
        made.append(capability)
        return machine_code(capability)

    monkeypatch.setattr(nvrtc, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(nvrtc, "compiled", compiled)
    for capability in ((9, 0), (8, 0), (9, 0)):
        assert nvrtc.gpu_code(capability) == machine_code(capability)
    assert made == [(9, 0), (8, 0)]


@needs_library
def test_a_gpu_has_the_compiled_kernels_if_there_is_code_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With them, maps are the portable kernels' work."""
    gpu, details = SimpleNamespace(name="GPU:0"), {"compute_capability": (9, 0)}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    monkeypatch.setattr(compiled, "gpu_code", lambda capability: b"code")
    monkeypatch.delenv("FLOWPM_KERNELS", raising=False)

    def missing(capability: tuple[int, int]) -> bytes:
        raise nvrtc.GpuCodeError("NVRTC is not there")

    try:
        kernels.cache_clear()
        found = kernels()
        assert isinstance(found, Compiled) and isinstance(found._maps, Portable)

        details.clear()
        _are_refused(monkeypatch, "GPU:0 is not a GPU of NVIDIA: ")
        details["compute_capability"] = (9, 0)
        monkeypatch.setattr(compiled, "gpu_code", missing)
        _are_refused(monkeypatch, "NVRTC is not there: ")
    finally:
        kernels.cache_clear()


def _are_refused(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """The compiled kernels: an error where they were asked for, else a warning."""
    kernels.cache_clear()
    with pytest.warns(UserWarning, match=f"^{reason}particles take several times as long"):
        assert isinstance(kernels(), Portable)
    kernels.cache_clear()
    monkeypatch.setenv("FLOWPM_KERNELS", "compiled")
    with pytest.raises(
        KernelsError, match=f"FLOWPM_KERNELS=compiled, but {reason}they need compute capability 7.0"
    ):
        kernels()
    monkeypatch.delenv("FLOWPM_KERNELS")
