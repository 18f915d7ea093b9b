"""Build the compiled kernels for the TensorFlow that this Python has.

Used by setup.py before the package can be imported, and by the package itself: standard library
only at import.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
OPTIMISED = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]


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

    Args:
        library: the shared library to write.
        objects: folder for the object files.

    Raises:
        BuildError: something is missing, or the compiler does not accept the sources.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise BuildError("this Python has no TensorFlow to build for")
    command = compiler()
    objects.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
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
        compiled = [pool.submit(compile_one, source, OPTIMISED) for source in largest_first]
        compiling, linking = tensorflow_flags()
        # TensorFlow's headers take longer than the operations, so they are read once.
        together = objects / "operations.cc"
        together.write_text("".join(f'#include "{source}"\n' for source in operations))
        compiled.append(pool.submit(compile_one, together, ["-O2", *compiling]))
        done = [task.result() for task in compiled]
    partial = library.with_suffix(".partial")
    _run([*command, "-shared", *done, *linking, "-o", str(partial)])
    # Processes that use the old library can continue with it.
    partial.replace(library)


def _run(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    print(result.stdout + result.stderr, end="", flush=True)
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        reason = (errors or result.stderr.splitlines() or ["no message"])[0].strip()
        raise BuildError(f"{command[0]} failed ({reason})")
