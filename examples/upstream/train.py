"""Train one of Mesh TensorFlow's own models on any mesh of ranks, and write its losses.

python examples/upstream/train.py transformer --output losses
python -m meshimpl.launch 4 examples/upstream/train.py transformer --mesh row:2,col:2 \
    --layout "batch:row;heads:col;d_ff:col;vocab:col" --output losses4
git clone https://github.com/tensorflow/mesh
python examples/upstream/train.py mnist --upstream mesh --output digits
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import tensorflow as tf
from models import MODELS, MissingProgramError, named

from meshimpl import MeshError, MeshFunction, ProcessMesh, launch


def parser() -> argparse.ArgumentParser:
    """Returns the options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", choices=MODELS)
    options.add_argument("--mesh", default="row:1", help="such as row:2,col:2")
    options.add_argument("--layout", default="batch:row", help="dimension:axis;dimension:axis")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--upstream", type=Path, help="a checkout of tensorflow/mesh")
    options.add_argument("--output", type=Path, required=True, help="folder of losses.csv")
    options.add_argument("--overwrite", action="store_true", help="replace losses.csv")
    return options


def check_layout(model: str, layout: str) -> None:
    """Checks that a layout names dimensions of a model.

    Raises:
        MeshError: it does not.
    """
    for rule in filter(None, layout.split(";")):
        dimension = rule.partition(":")[0].strip()
        if dimension not in MODELS[model]:
            known = ", ".join(MODELS[model])
            raise MeshError(f"{model} has no dimension {dimension!r} to split; it has {known}")


def train(options: argparse.Namespace) -> None:
    """Trains, prints the loss now and then, and writes all losses."""
    check_layout(options.model, options.layout)
    file = options.output / "losses.csv"
    if file.exists() and not options.overwrite:
        raise FileExistsError(f"{file} exists: give another --output, or --overwrite")
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps}: must be at least 1")
    options.output.mkdir(parents=True, exist_ok=True)
    model = named(options.model, options.upstream)
    mesh = ProcessMesh(options.mesh)
    function = MeshFunction(model.step, mesh, options.layout, model.inputs)
    tf.random.set_seed(1)  # the first values of the weights
    losses, seconds = [], []
    for number, batch in zip(range(options.steps), model.batches(), strict=False):
        begin = time.perf_counter()
        losses.append(float(function(*batch)))
        seconds.append(time.perf_counter() - begin)
        if mesh.rank == 0 and (number % 10 == 0 or number == options.steps - 1):
            print(f"step {number:4}  loss {losses[-1]:.7f}", flush=True)
    if mesh.rank == 0:
        lines = [f"{number},{loss!r}" for number, loss in enumerate(losses)]
        file.write_text("\n".join(["step,loss", *lines]) + "\n")
        if middle := seconds[1:]:
            print(f"{1e3 * statistics.median(middle):.1f} ms a step (median); {file}")


def main() -> int:
    """Reads the command line, trains, and returns the exit status."""
    try:
        train(parser().parse_args())
    except (MeshError, MissingProgramError, OSError, ValueError) as error:
        if launch.detect().rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
