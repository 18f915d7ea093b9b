"""Build the compiled kernels for the TensorFlow that this Python has.

Used by setup.py before the package can be imported, and by the package itself: standard library
only at import.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import secrets
import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).parent
OPTIMISED = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]
# Rows of a window are short: vectors of 16 values, and calls of memcpy, cost more than they save.
OF_GCC = ["-fno-tree-loop-distribute-patterns"]
if platform.machine().lower() in ("x86_64", "amd64"):
    OPTIMISED.append("-mprefer-vector-width=256")


class BuildError(Exception):
    """The kernels cannot be built on this machine; the message is one line with the reason."""


def sources() -> list[Path]:
    """Returns all files that the library is made from."""
    return sorted([*HERE.glob("*.cc"), *HERE.glob("*.h"), Path(__file__)])


def identity(tensorflow: str) -> str:
    """Returns the text that a library of these sources for this version of TensorFlow contains."""
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"kernels {digest.hexdigest()[:16]} for TensorFlow {tensorflow};"


def fault(library: bytes, tensorflow: str) -> str:
    """Returns why a library must not be loaded by a version of TensorFlow; empty if it can be."""
    if identity(tensorflow).encode() not in library:
        return f"was built from other sources, or for another TensorFlow than this {tensorflow}"
    return "" if is_whole(library) else "is damaged: its end is missing"


def is_whole(binary: bytes) -> bool:
    """Returns whether a file of machine code (ELF, 64 bits) has its end; the loader does not check.

    The tables of its sections and its segments are written last.
    """
    if len(binary) < 64 or binary[:5] != b"\x7fELF\x02":
        return False
    order = "<" if binary[5] == 1 else ">"
    segments, sections = struct.unpack_from(f"{order}QQ", binary, 0x20)
    sizes = struct.unpack_from(f"{order}HHHH", binary, 0x36)
    ends = segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3]
    return sections > 0 and len(binary) >= max(ends)


def compiler() -> list[str]:
    """Returns the command of the C++ compiler, CXX if that is set.

    Raises:
        BuildError: there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler ({named[0] if named else 'g++'} is not there)")


def tensorflow_flags() -> tuple[list[str], list[str]]:
    """Returns the flags that TensorFlow needs for compiling and for linking.

    Raises:
        BuildError: this Python has no TensorFlow.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise BuildError(f"this Python has no TensorFlow to build for ({error})") from error
    # As system headers, whose warnings are not shown.
    compiling = [flag.replace("-I", "-isystem", 1) for flag in tf.sysconfig.get_compile_flags()]
    compiling.append(f'-DFLOWPM_IDENTITY="{identity(tf.__version__)}"')
    return compiling, tf.sysconfig.get_link_flags()


def build(library: Path, objects: Path) -> None:
    """Compiles the sources on all cores, and links the library.

    One process at a time builds a library; one that has waited for another takes the other's.

    Args:
        library: the shared library to write, which is there only as a whole.
        objects: folder for the object files.

    Raises:
        BuildError: something is missing, or the compiler does not accept the sources.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise BuildError("this Python has no TensorFlow to build for")
    before = _stamp(library)
    library.parent.mkdir(parents=True, exist_ok=True)
    with _alone_at(library.with_suffix(".lock")):
        if _stamp(library) == before:
            _build(library, objects)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Returns what changes when a file is replaced; None if there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


@contextmanager
def _alone_at(path: Path) -> Iterator[None]:
    """Inside, no other process is inside for this file, where the file system grants locks."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _build(library: Path, objects: Path) -> None:
    command = compiler()
    objects.mkdir(parents=True, exist_ok=True)
    common = [*command, "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]
    operations = sorted(HERE.glob("ops*.cc"))
    loops = {*HERE.glob("*.cc")} - {*operations}

    def compile_one(source: Path, flags: list[str]) -> str:
        target = str(objects / f"{source.stem}.o")
        _run([*common, *flags, "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # The largest file takes longest. Importing TensorFlow for its flags takes a core as well.
        largest_first = sorted(loops, key=lambda source: -source.stat().st_size)
        optimised = OPTIMISED + ([] if _is_clang(command) else OF_GCC)
        compiled = [pool.submit(compile_one, source, optimised) for source in largest_first]
        compiling, linking = tensorflow_flags()
        # TensorFlow's headers take longer than the operations, so they are read once.
        together = objects / "operations.cc"
        together.write_text("".join(f'#include "{source}"\n' for source in operations))
        compiled.append(pool.submit(compile_one, together, ["-O2", *compiling]))
        done = [task.result() for task in compiled]
    _publish(library, [*command, "-shared", *done, *linking])


def _is_clang(command: list[str]) -> bool:
    """Returns whether a compiler is clang, which refuses options of GCC."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return "clang" in version.stdout


def _publish(library: Path, command: list[str]) -> None:
    """Links a library under another name, and puts it in place if it is one of these sources."""
    import tensorflow as tf

    partial = library.with_name(f"{library.stem}.{secrets.token_hex(4)}.partial")
    try:
        _run([*command, "-o", str(partial)])
        if reason := fault(partial.read_bytes(), tf.__version__):
            raise BuildError(f"{command[0]} left a library that {reason}")
        partial.chmod(partial.stat().st_mode & 0o755)
        # Processes that use the old library can continue with it.
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    print(result.stdout + result.stderr, end="", flush=True)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        reason = (errors or result.stderr.splitlines() or ["no message"])[0].strip()
        raise BuildError(f"{command[0]} failed ({reason})")
