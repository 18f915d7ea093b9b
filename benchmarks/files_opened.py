"""Lists the source files that one way through the project runs, room by room.

    python benchmarks/files_opened.py simulate    # `flowpm-dist simulate`, to the written snapshot
    python benchmarks/files_opened.py train       # a step of a training, with its simulations
    python benchmarks/files_opened.py gradient    # a gradient of a reconstruction's log posterior
    python benchmarks/files_opened.py emulate     # a step of learning a correction

A file counts if a function in it runs; files that are only imported do not. The work is small and
on one rank, so the count depends neither on the machine nor on the size.
docs/explanations/architecture.md lists the results.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("flowpm_dist", "meshimpl")
COSMOLOGY = "[cosmology]\nOmega_m = 0.3\nOmega_b = 0.05\nh = 0.7\nn_s = 0.96\nsigma8 = 0.8\n"
SIMULATE = f"[box]\ngrid = 8\nsize = 32.0\n{COSMOLOGY}[evolution]\nsteps = 2\n[initial]\nseed = 1\n"
RECONSTRUCT = f"""[box]
grid = 8
size = 32.0
{COSMOLOGY}[evolution]
steps = 2
[observation]
structure = "pm"
kind = "density"
sigma = 0.2
[data]
mock_seed = 1
[search]
evaluations = 4
"""
TRAIN = """[box]
grid = 24
size = 96.0
[cosmology]
Omega_b = 0.049
h = 0.67
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
n_s = [0.9, 1.0]
[evolution]
steps = 2
[network]
name = "sc18-periodic"
[training]
batch = 2
[data]
simulations = 4
reuse = 1
validation = 2
test = 2
"""
EMULATE = f"""[box]
grid = 8
size = 16.0
{COSMOLOGY}[evolution]
steps = 2
[truth]
universes = 1
mesh_factor = 2
steps = 2
[emulate]
validation = 1
"""


class FoundError(Exception):
    """All files of the way were found; the rest of the job need not run."""


@contextlib.contextmanager
def files_run(found: set[str]) -> Iterator[None]:
    """Adds to `found` the paths of the project's files whose functions run in the block."""
    codes = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        for code in codes:
            path = Path(code.co_filename)
            # The bodies of modules and classes, which imports run, are not optimised; a
            # comprehension in one has no name of a function.
            in_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_qualname[0] != "<"
            if in_function and path.is_relative_to(ROOT):
                path = path.relative_to(ROOT)
                if path.parts[0] in PACKAGES:
                    found.add(str(path))


def command(name: str, text: str) -> None:
    """Runs a command of flowpm-dist on a run file."""
    from flowpm_dist.cli.program import main

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(FoundError, SystemExit):
        run_file = Path(folder, "run.toml")
        run_file.write_text(text)
        sys.argv = ["flowpm-dist", name, str(run_file), "--output", str(Path(folder, "out"))]
        main()


def simulate() -> set[str]:
    from flowpm_dist.simulate import session

    found: set[str] = set()
    save_fields = session.save_fields
    with contextlib.ExitStack() as way:

        def to_the_snapshot(*arguments: Any, **options: Any) -> None:
            save_fields(*arguments, **options)
            way.close()

        session.save_fields = to_the_snapshot  # type: ignore[assignment]
        way.enter_context(files_run(found))
        command("simulate", SIMULATE)
    return found


def train() -> set[str]:
    from flowpm_dist.cosmoflow.training.trainer import Trainer
    from flowpm_dist.cosmoflow.volumes.sources import InSituSource

    found: set[str] = set()
    start, step = InSituSource.start, Trainer.step

    def simulations(*arguments: Any, **options: Any) -> None:
        with files_run(found):
            start(*arguments, **options)

    def one_step(*arguments: Any, **options: Any) -> None:
        with files_run(found):
            step(*arguments, **options)
        raise FoundError

    InSituSource.start = simulations  # type: ignore[method-assign]
    Trainer.step = one_step  # type: ignore[method-assign,assignment]
    command("train", TRAIN)
    return found


def gradient() -> set[str]:
    from flowpm_dist.reconstruction.posterior import EvenPosterior

    found: set[str] = set()
    evaluate = EvenPosterior.evaluate

    def one_gradient(*arguments: Any) -> None:
        with files_run(found):
            evaluate(*arguments)
        raise FoundError

    EvenPosterior.evaluate = one_gradient  # type: ignore[method-assign,assignment]
    command("reconstruct", RECONSTRUCT)
    return found


def emulate() -> set[str]:
    from flowpm_dist.corrections.learner import Learner

    found: set[str] = set()
    step = Learner._iterate

    def one_step(*arguments: Any) -> None:
        with files_run(found):
            step(*arguments)
        raise FoundError

    Learner._iterate = one_step  # type: ignore[method-assign,assignment]
    command("emulate", EMULATE)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = {"simulate": simulate, "train": train, "gradient": gradient, "emulate": emulate}
    parser.add_argument("way", choices=ways)
    rooms = defaultdict(list)
    found = ways[parser.parse_args().way]()
    for path in sorted(found):
        rooms[str(Path(path).parent)].append(Path(path).name)
    for room, files in rooms.items():
        print(f"{len(files):4d}  {room + '/':44s} {' '.join(files)}")
    for package in PACKAGES:
        print(f"{sum(p.startswith(package) for p in found):4d}  {package}")


if __name__ == "__main__":
    main()
