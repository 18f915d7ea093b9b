"""The library of compiled kernels, or the reason why it cannot be used.

`setup.py` builds a library next to this file where it finds TensorFlow; `flowpm-dist build kernels`
leaves one in the user's cache, for an installed package.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from flowpm_dist.particle_mesh.kernels import build
from meshimpl.user_cache import user_cache

NAME = "_kernels.so"
PATH = Path(__file__).with_name(NAME)
"""Where setup.py leaves the library."""
NOT_BUILT = "the compiled kernels are not built"


def cached_path() -> Path:
    """Returns where the library is in the user's cache, or would be.

    The folder is named after the sources, TensorFlow and the machine that it is built for.
    """
    digest = hashlib.sha256()
    for source in build.sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(f"{tf.__version__} {platform.machine()}".encode())
    return user_cache() / "kernels" / digest.hexdigest()[:16] / NAME


def build_into_cache() -> Path:
    """Builds the library for this TensorFlow and returns its path in the user's cache.

    Raises:
        BuildError: something is missing, or the compiler does not accept the sources.
        OSError: the cache cannot be written.
    """
    path = cached_path()
    with tempfile.TemporaryDirectory(prefix="flowpm-kernels-") as objects:
        build.build(path, Path(objects))
    return path


@functools.cache
def load() -> tuple[Any, str | None]:
    """Returns the library's operations and None, or None and why they cannot be used."""
    # The library of the installation comes first. The last existing library gives the reason.
    reason = NOT_BUILT
    for path in (PATH, cached_path()):
        if path.exists():
            operations, reason = _loaded(path)
            if operations is not None:
                return operations, None
    return None, reason


def _loaded(path: Path) -> tuple[Any, str]:
    if f"flowpm_dist kernels for TensorFlow {tf.__version__};".encode() not in path.read_bytes():
        return None, f"{path.name} was built for another TensorFlow than this {tf.__version__}"
    try:
        return tf.load_op_library(str(path)), ""
    except (tf.errors.OpError, OSError, RuntimeError) as error:
        # The loader's first line names the symbol that TensorFlow no longer has.
        reason = str(getattr(error, "message", error)).strip().split("\n")[0]
        return None, f"{path.name} does not load with TensorFlow {tf.__version__} ({reason})"
