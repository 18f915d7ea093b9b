"""Check this machine's GPUs: are the answers right, where are they computed, how long does it take?

    python tools/gpu_check.py --ranks 2 [--grid 256] [--output FOLDER]
    srun --mpi=pmix -N2 --ntasks-per-node=4 python tools/gpu_check.py

The table, gpu_check.txt, and the rest of what was found, gpu_check.json, show whether the project
works on your GPUs: please send both. Without a GPU in sight the CPU is checked. The exit status is
1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshimpl import launch
from meshimpl.imports import import_tensorflow

if TYPE_CHECKING:
    from meshimpl import ProcessMesh

STORED = Path(__file__).with_suffix(".json")
TELLING = ("HOROVOD_", "NCCL_", "CUDA_", "XLA_", "TF_", "MESHIMPL_", "FLOWPM_")
"""Beginnings of the names of variables that change the results."""


def main(words: list[str] | None = None) -> int:
    """Check, print and write; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="start so many ranks on this machine")
    parser.add_argument(
        "--grid", type=int, default=128, help="side of the grids that are timed; 0: none"
    )
    parser.add_argument("--repeats", type=int, default=5, help="how often each timing is repeated")
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER")
    parser.add_argument("--store", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    try:
        launch.check_launcher()
        status = launch.launch_or_join(options.ranks, sys.argv[1:] if words is None else words)
        if status is not None:
            return status
        launch.configure_threads()
        import_tensorflow()
        return _on_ranks(options)
    except launch.LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _on_ranks(options: argparse.Namespace) -> int:
    import gpu_checks

    try:
        mesh = gpu_checks.mesh_of(launch.detect().size)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.store:
        numbers = gpu_checks.stored_numbers(mesh)
        if mesh.rank == 0:
            STORED.write_text(json.dumps(numbers, indent=1) + "\n")
        return 0
    table: list[str] = []

    def show(lines: list[str]) -> None:
        table.extend(lines)
        if mesh.rank == 0:
            print(*lines, sep="\n", flush=True)

    found = _found(mesh, options, show)
    if mesh.rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "gpu_check.txt").write_text("\n".join(table) + "\n")
        (options.output / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    mesh.barrier()  # a rank that exits with a status ends the others
    return 0 if all(row["ok"] for row in found["checks"]) else 1


def _found(
    mesh: ProcessMesh, options: argparse.Namespace, show: Callable[[list[str]], None]
) -> dict[str, Any]:
    """Returns everything that is written, the same on every rank but for the ranks' facts.

    Args:
        mesh, options: see `main`.
        show: prints lines of the table, and keeps them for the file.
    """
    import tensorflow as tf

    import gpu_checks
    import gpu_timings

    ranks, checks, timings = _gathered(mesh, _facts()), [], []
    show(_head(mesh, ranks))
    stored = {name: np.array(value) for name, value in json.loads(STORED.read_text()).items()}
    show([f"{'':5} {'check':26} {'precision':22} {'error':>9} {'limit':>9} {'on':8} {'s':>6}"])
    for check in gpu_checks.all_checks(mesh, stored):
        checks.append(_checked(mesh, check))
        show(_lines_of_check(checks[-1]))
    if options.grid:
        show(["", f"{'time':44} {'first [s]':>10} {'then [s]':>10}"])
    for timing in gpu_timings.all_timings(mesh, options.grid) if options.grid else ():
        first, then = gpu_timings.seconds(mesh, timing.work, options.repeats)
        row = {"name": timing.name, "first": first, "seconds": then}
        timings.append(row | {"rate": timing.amount / then, "unit": timing.unit})
        rate = f"{timing.amount / then:.3g} {timing.unit}/s"
        show([f"{timing.name:44} {first:10.2f} {then:10.4f}   {rate}"])
    peak = gpu_timings.peak_memory(tf.config.get_visible_devices("GPU"))
    for rank, own in zip(ranks, _gathered(mesh, {"peak": peak}), strict=True):
        rank |= own
        if own["peak"]:
            mib = own["peak"] / 2**20
            show([f"tensors took at most {mib:.0f} MiB of the GPU of rank {rank['rank']}"])
    wrong, total = sum(not row["ok"] for row in checks), len(checks)
    show(["", f"{wrong} of {total} checks wrong" if wrong else f"all {total} checks ok"])
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "command": sys.argv[1:],
        "mesh": str(mesh),
        "ranks": ranks,
        "checks": checks,
        "timings": timings,
    }


def _gathered(mesh: ProcessMesh, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the facts of all ranks on rank 0, nothing on the others."""
    found = mesh.gather_to_root(np.frombuffer(json.dumps(facts).encode(), np.uint8))
    return [json.loads(bytes(row)) for row in found or ()]


def _checked(mesh: ProcessMesh, check: Any) -> dict[str, Any]:
    """Returns a row of the table.

    What goes wrong, such as an operation that GPUs do not have, is a row as well. The error is the
    largest of all ranks.
    """
    import tensorflow as tf

    from flowpm_dist.particle_mesh.kernels import KernelsError
    from flowpm_dist.particle_mesh.kernels.nvrtc import GpuCodeError

    row = {"name": check.name, "precision": check.precision, "limit": check.limit}
    began = time.perf_counter()
    try:
        found = check.find()
        row |= {"error": found.error, "device": found.device, "trouble": ""}
    except (
        tf.errors.OpError,
        ArithmeticError,
        KernelsError,
        GpuCodeError,
        KeyError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        lines = str(error).strip().splitlines() or [""]
        row |= {"error": None, "device": "", "trouble": f"{type(error).__name__}: {lines[0]}"}
    worst = tf.constant(np.inf if row["error"] is None else row["error"], tf.float64)
    worst = float(mesh.world.allreduce(worst, "max"))
    if row["error"] is not None:
        row["error"] = worst
    if row["error"] == np.inf:
        row |= {"error": None, "trouble": row["trouble"] or "wrong, or failed on another rank"}
    row["seconds"] = time.perf_counter() - began
    row["ok"] = row["error"] is not None and row["error"] <= check.limit
    return row


def _facts() -> dict[str, Any]:
    """Returns what this rank says of itself, its device and its libraries."""
    import tensorflow as tf

    from flowpm_dist.cli import doctor_ranks
    from flowpm_dist.particle_mesh.kernels import KernelsError, kernels

    try:
        chosen = kernels().name
    except KernelsError as error:
        chosen = str(error)

    details = [
        tf.config.experimental.get_device_details(gpu)
        for gpu in tf.config.get_visible_devices("GPU")
    ]
    driver = Path("/proc/driver/nvidia/version")
    built = dict(tf.sysconfig.get_build_info())
    facts = {
        "models": [detail.get("device_name", "?") for detail in details],
        "capabilities": [detail.get("compute_capability", ()) for detail in details],
        "kernels": chosen,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else "",
        "tensorflow was built with": {k: str(v) for k, v in built.items()},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(TELLING)},
        "horovod": {},
    }
    if launch.detect().size > 1:
        import horovod.tensorflow as hvd

        facts["horovod"] = {"MPI": hvd.mpi_built(), "NCCL": hvd.nccl_built()}
    return doctor_ranks.facts() | facts


def _head(mesh: ProcessMesh, ranks: list[dict[str, Any]]) -> list[str]:
    """Returns the lines above the table, none without facts of ranks."""
    if not ranks:
        return []
    one = ranks[0]
    lines = [f"flowpm_dist on {len(ranks)} rank{'s' * (len(ranks) > 1)}, mesh {mesh}"]
    for rank in ranks:
        device = ", ".join(rank["models"]) or "no GPU in sight"
        lines.append(f"rank {rank['rank']} on {rank['host']}: {device}")
    horovod = [f"{name} {number}" for name, number in one["horovod"].items() if number]
    lines += [
        ", ".join(f"{name} {version}" for name, version in one["versions"].items()),
        f"kernels: {one['kernels']}; Horovod with {', '.join(horovod) or 'nothing'}",
    ]
    return [*lines, *([one["driver"]] if one["driver"] else []), ""]


def _lines_of_check(row: dict[str, Any]) -> list[str]:
    error = "failed" if row["error"] is None else f"{row['error']:.1e}"
    line = (
        f"{'ok' if row['ok'] else 'WRONG':5} {row['name']:26} {row['precision']:22} "
        f"{error:>9} {row['limit']:9.0e} {row['device']:8} {row['seconds']:6.1f}"
    )
    return [line, *([f"      {row['trouble']}"] if row["trouble"] else [])]


if __name__ == "__main__":
    sys.exit(main())
