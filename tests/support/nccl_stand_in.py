"""A library with NCCL's functions that moves the memory of the host: nccl_stand_in.cc."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flowpm_dist.particle_mesh.kernels.build import compiler


def build_stand_in(folder: Path) -> str:
    """Returns the path of the library, which it builds in a folder.

    Raises:
        BuildError: there is no C++ compiler.
    """
    library = folder / "libnccl.so.2"
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Werror"]
    source = str(Path(__file__).with_suffix(".cc"))
    subprocess.run([*compiler(), *flags, source, "-o", str(library), "-lrt"], check=True)
    return str(library)
