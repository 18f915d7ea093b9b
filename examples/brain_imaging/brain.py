"""Reconstruct 3-D magnetic resonance images from undersampled k-space on one or many ranks.

`brain.py train` trains an unrolled network on volumes that are made from a template of the brain.
`brain.py evaluate` compares it with the zero-filled image and a classical method on held-out
volumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import anatomy
from adam import CHECKPOINT, Adam
from anatomy import InputError
from classical import METHODS, check_packages
from sampling import read_mask
from settings import Settings, read_settings

from meshimpl import MeshError, ProcessMesh, launch
from meshimpl.mesh_shape import parse_mesh_shape

HELP = {
    "anatomy": "the tissues: mni152 (a template in the package nilearn) or made-up (for tests)",
    "side": "cells along each side of a volume",
    "voxel": "side of a cell, or the smallest and the largest [mm]",
    "volumes": "number of training volumes",
    "coils": "number of receiver coils",
    "acceleration": "factors of undersampling; each scan takes one of them",
    "noise": "standard deviation of the noise of a mode; the brain has a brightness of about 1",
    "mask": ".npy file of zeros and ones (ky, kz) or (kx, ky, kz), zero frequency in the middle",
    "steps": "training steps",
    "batch": "volumes of a step, over all replicas",
    "rate": "largest learning rate of Adam",
    "iterations": "iterations of the network",
    "consistency": "steps of data consistency in an iteration",
    "features": "channels between its convolutions",
    "convolutions": "convolutions of an iteration",
    "seed": "seed of volumes, scans and first weights",
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    main = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = main.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train a network",
        epilog="example: brain.py train --ranks 2 --mesh row:2 --steps 400 --output brain-4x",
    )
    for item in dataclasses.fields(Settings):
        default = item.default
        words: dict[str, Any] = {"help": HELP[item.name], "default": default}
        words["type"] = type(default)
        if item.name in ("voxel", "acceleration"):
            words |= {"type": float, "nargs": "+"}
        elif item.name == "anatomy":
            words["choices"] = list(anatomy.ANATOMIES)
        elif item.name == "mask":
            words["type"] = str
        if default is not None:
            words["help"] += " (default: %(default)s)"
        train.add_argument(f"--{item.name}", **words)
    train.add_argument("--resume", action="store_true", help="continue the training in --output")
    train.add_argument(
        "--start-from", type=Path, metavar="FOLDER", help="begin with the weights of this training"
    )
    train.add_argument(
        "--every",
        type=int,
        default=25,
        help="steps between validations and checkpoints (default: 25)",
    )
    evaluate = commands.add_parser(
        "evaluate",
        help="compare a trained network with other methods on held-out volumes",
        epilog="example: brain.py evaluate brain-4x --side 96 --voxel 2 --output brain-4x-scores",
    )
    evaluate.add_argument("training", type=Path, help="folder of the training")
    for name, kind, default in (("side", int, 96), ("voxel", float, 2.0), ("volumes", int, 8)):
        evaluate.add_argument(
            f"--{name}", type=kind, default=default, help=f"{HELP[name]} (default: %(default)s)"
        )
    evaluate.add_argument(
        "--acceleration", type=float, nargs="+", help="factors (default: those of the training)"
    )
    evaluate.add_argument("--mask", help=HELP["mask"])
    evaluate.add_argument(
        "--resume", action="store_true", help="use the classical images that are in --output"
    )
    evaluate.add_argument(
        "--classical",
        choices=[*METHODS, "none"],
        default="tv",
        help="classical method, by the package sigpy (default: %(default)s)",
    )
    evaluate.add_argument(
        "--classical-iterations", type=int, default=30, help="its iterations (default: %(default)s)"
    )
    evaluate.add_argument(
        "--tune-in",
        choices=["brain", "volume"],
        default="brain",
        help="where its strength has the best PSNR (default: %(default)s)",
    )
    for command in (train, evaluate):
        command.add_argument("--output", type=Path, required=True, help="folder of the results")
        command.add_argument("--overwrite", action="store_true", help="replace older results")
        command.add_argument("--ranks", type=int, help="start this number of ranks with mpirun")
        command.add_argument("--mesh", help="mesh of ranks, such as replica:2,row:2 (default: row)")
    return main


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(argv)
    try:
        shape = options.mesh or f"row:{options.ranks or launch.detect().size}"
        work = {"train": _train, "evaluate": _evaluate}[options.command]
        return work(options, argv, shape)
    except (InputError, MeshError, launch.LaunchError) as error:
        if launch.detect().rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2


def _check_output(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        raise InputError(f"--output {folder} exists: choose another folder, or give --overwrite")


def _train(options: argparse.Namespace, argv: list[str], shape: str) -> int:
    folder = options.output
    if options.resume:
        settings = read_settings(folder)
        _check_same(options, settings)
    else:
        _check_output(folder, options.overwrite)
        settings = Settings(**{name: getattr(options, name) for name in HELP})
    settings.check()
    settings.check_mesh(parse_mesh_shape(shape))
    if options.every < 1:
        raise InputError(f"--every {options.every}: must be at least 1")
    shapes = settings.design.shapes
    if options.resume:
        adam = Adam.load(folder / CHECKPOINT, shapes)
    elif options.start_from is not None:
        adam = Adam(Adam.load(options.start_from / CHECKPOINT, shapes).weights)
    else:
        adam = Adam(settings.design.first_weights(settings.seed))
    status = launch.launch_or_join(options.ranks, argv)
    if status is not None:
        return status
    launch.configure_threads()
    from training import Training

    Training(ProcessMesh(shape), settings, folder, adam, options.every).run()
    return 0


def _check_same(options: argparse.Namespace, settings: Settings) -> None:
    """Checks that no option asks for another training than the one that is resumed."""
    if options.start_from is not None or options.overwrite:
        raise InputError("--resume continues a training: leave --start-from and --overwrite out")
    for item in dataclasses.fields(Settings):
        given, stored = getattr(options, item.name), getattr(settings, item.name)
        same = list(given) == list(stored) if isinstance(given, list) else given == stored
        if given != item.default and not same:
            raise InputError(
                f"--{item.name} {given}: the training that is resumed has {stored}, which stays"
            )


def _evaluate(options: argparse.Namespace, argv: list[str], shape: str) -> int:
    _check_output(options.output, options.overwrite or options.resume)
    trained = read_settings(options.training)
    factors = options.acceleration or trained.acceleration
    if options.mask:
        if options.acceleration:
            raise InputError("--mask has its own acceleration: leave --acceleration out")
        mask = read_mask(Path(options.mask), (options.side,) * 3)
        factors = (float(f"{1 / mask.mean():.3g}"),)
    elif trained.mask and not options.acceleration:
        raise InputError(
            f"the training has --mask {trained.mask}: give a --mask for volumes of {options.side} "
            "cells, or --acceleration for random masks"
        )
    settings = dataclasses.replace(
        trained,
        side=options.side,
        voxel=(options.voxel,),
        volumes=options.volumes,
        mask=options.mask,
        acceleration=factors,
        batch=dict(parse_mesh_shape(shape)).get("replica", 1),
    )
    settings.check()
    settings.check_mesh(parse_mesh_shape(shape))
    if options.volumes % settings.batch:
        raise InputError(f"--volumes {options.volumes}: must be a multiple of the replicas")
    if options.classical_iterations < 1:
        raise InputError(f"--classical-iterations {options.classical_iterations}: at least 1")
    check_packages(options.classical)
    weights = Adam.load(options.training / CHECKPOINT, settings.design.shapes).weights
    status = launch.launch_or_join(options.ranks, argv)
    if status is not None:
        return status
    launch.configure_threads()
    from evaluation import Evaluation

    method, iterations = options.classical, options.classical_iterations
    mesh = ProcessMesh(shape)
    if mesh.rank == 0 and not options.resume:
        shutil.rmtree(options.output / "classical", ignore_errors=True)
    region = options.tune_in
    Evaluation(mesh, settings, options.output, weights, method, iterations, region).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
