"""Compile the kernels of GPUs with NVRTC, NVIDIA's compiler as a library.

TensorFlow with CUDA installs it. No GPU is needed, and no CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import tempfile
import warnings
from pathlib import Path

from flowpm_dist.particle_mesh.kernels.build import is_whole
from meshimpl.launch import make_private, private_folder, user_cache, why_unsafe

HERE = Path(__file__).parent
SOURCE = HERE / "gpu.cu"
HEADERS = [HERE / name for name in ("one_particle.h", "calls.h", "locate.h", "rtc_library.h")]
OPTIONS = ["--std=c++17", "-default-device"]
PACKAGE = "nvidia-cuda-nvrtc-cu12"


class GpuCodeError(RuntimeError):
    """There is no NVRTC, or it does not compile the kernels; the message is one line."""


@functools.cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if _has("nvidia") else None
    folders = spec.submodule_search_locations or [] if spec else []
    libraries = [path for folder in folders for path in Path(folder).glob("lib/libnvrtc.so.*")]
    for name in [*map(str, sorted(libraries)), "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise GpuCodeError(f"NVRTC is not there: pip install {PACKAGE}")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _check(status: int, activity: str) -> None:
    if status != 0:
        text = _library().nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        raise GpuCodeError(f"{activity}: {text(status).decode()}")


def _bytes_of(program: ctypes.c_void_p, kind: str) -> bytes:
    """Returns an output of NVRTC for a program; `kind` is "CUBIN" or "ProgramLog"."""
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), kind)
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(_library(), f"nvrtcGet{kind}")(program, buffer), kind)
    return buffer.raw


def compiled(capability: tuple[int, int]) -> bytes:
    """Returns the kernels as machine code (a cubin), freshly compiled.

    Args:
        capability: the compute capability of the GPU, such as (9, 0).

    Raises:
        GpuCodeError: there is no NVRTC, it is too old for this GPU, or the GPU is older than 7.0.
    """
    nvrtc, program, count = _library(), ctypes.c_void_p(), len(HEADERS)
    texts = (ctypes.c_char_p * count)(*[path.read_bytes() for path in HEADERS])
    names = (ctypes.c_char_p * count)(*[path.name.encode() for path in HEADERS])
    arguments = (SOURCE.read_bytes(), SOURCE.name.encode(), count, texts, names)
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *arguments), "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *OPTIONS]
        words = (ctypes.c_char_p * len(options))(*[word.encode() for word in options])
        status = nvrtc.nvrtcCompileProgram(program, len(options), words)
        if status != 0:
            log = _bytes_of(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            errors = [line for line in log.splitlines() if "error" in line] or [log.strip()]
            which = "{}.{}".format(*capability)
            _check(status, f"kernels for compute capability {which} ({errors[0]})")
        return _bytes_of(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def gpu_code(capability: tuple[int, int]) -> bytes:
    """Returns `compiled` from the user's cache, where the first call of all leaves it if it can.

    Raises:
        GpuCodeError: see `compiled`.
    """
    digest = hashlib.sha256(repr((capability, OPTIONS)).encode())
    for path in (SOURCE, *HEADERS):
        digest.update(path.read_bytes())
    file = user_cache() / "kernels" / digest.hexdigest()[:16] / "gpu.cubin"
    if file.exists():
        reason, code = why_unsafe(file), file.read_bytes()
        if not reason and is_whole(code):
            return code
        if reason:
            warnings.warn(f"the GPU's kernels are compiled again: {reason}", stacklevel=2)
    code = compiled(capability)
    with contextlib.suppress(OSError):
        private_folder(file.parent)
        if why_unsafe(file.parent):
            return code
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            partial = Path(folder) / file.name
            partial.write_bytes(code)
            make_private(partial)
            partial.replace(file)
    return code
