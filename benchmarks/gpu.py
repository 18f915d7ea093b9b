"""One GPU: particle kernels, transforms, whole runs and gradients, with PM++ and pmwd on it.

    python benchmarks/gpu.py [--grid 128,256,512] [--peers PYTHON] [--json FILE]
    python benchmarks/gpu.py --grid 16,32 --cpu --peers PYTHON

The second line rehearses the table without a GPU. PYTHON has JAX for this machine, pmpp (PM++) and
pmwd; a line of the table says which of them are missing.

Everything is in float32, on one rank, with as many mesh cells as particles, 2 Mpc/h a cell. Times
are medians of --repeats calls after a first one, which compiles. Every code's clock starts when the
noise is on the device, and stops when the device is idle and the results are on it. The codes run
one after the other, each in its own process. pmwd 0552bc0 has no gradient under JAX 0.10.

A run goes from white noise to positions and density, with 2LPT and --steps steps, as in peers.py.
The gradient is the derivative of sum(w * density) with respect to the noise. `ns/particle` divides
the time of the whole run by the particles, and `a force` divides this by the number of forces.

GB/s counts each array that a kernel takes or gives once; the transforms count the field and the
spectrum once each way. `of copy` divides this by the speed at which the device copies an array.
The kernels' particles are a smooth field of 128^3 particles, repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import median_seconds, report, start_worker
from kernels import calls, smooth_displacement
from peers import Worker, say

from meshimpl import launch

PEERS = {"pmpp": "pmpp", "pmwd": "git+https://github.com/eelregit/pmwd"}
"""The other codes' packages, and what pip installs them from."""
TILE = 128
RMS = 4.0
"""Displacement of the kernels' particles along each axis [cells]."""
COPIED = {"GPU": 2**28, "CPU": 2**24}
"""Numbers of the array whose copy is timed."""


def worker(options: argparse.Namespace) -> None:
    """Measures one grid with flowpm_dist, in this process."""
    launch.configure_threads()
    import tensorflow as tf

    gpus = tf.config.get_visible_devices("GPU")
    if not gpus and not options.cpu:
        raise SystemExit("there is no GPU in sight; --cpu rehearses without one")
    kind = "GPU" if gpus else "CPU"
    side, rows = options.grid[0], []

    def add(name: str, work: Callable[[], Any], size: int = 0) -> None:
        def synchronised() -> None:
            result = work()
            tf.test.experimental.sync_devices()
            del result

        if gpus:
            tf.config.experimental.reset_memory_stats("GPU:0")
        synchronised()
        row = {
            "name": name,
            "bytes": size,
            "seconds": median_seconds(synchronised, options.repeats),
        }
        if gpus:
            row["peak"] = tf.config.experimental.get_memory_info("GPU:0")["peak"]
        rows.append(row)

    add_copy(COPIED[kind], add)
    add_kernels(side, add)
    add_transforms(side, add)
    add_runs(options, add)
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    about = f"{details.get('device_name', kind)}, TensorFlow {tf.__version__}"
    report({"about": about, "rows": rows})


def _size(tensors: Any) -> int:
    """Returns the bytes of all tensors in a structure."""
    import tensorflow as tf

    found = [x for x in tf.nest.flatten(tensors) if isinstance(x, tf.Tensor)]
    return sum(x.dtype.size * int(np.prod(x.shape)) for x in found)


def add_copy(count: int, add: Callable[..., None]) -> None:
    """Times a pass that reads and writes numbers; `add` takes a name, the work and its bytes."""
    import tensorflow as tf

    x = tf.zeros([count])
    add("copy", lambda: tf.negative(x), 2 * _size(x))


def add_kernels(side: int, add: Callable[..., None]) -> None:
    """Times the particle kernels on a grid."""
    from flowpm_dist.particle_mesh.kernels import kernels

    tile = smooth_displacement(min(side, TILE), RMS)
    copies = side // tile.shape[1]
    for name, call in calls(np.tile(tile, [1, copies, copies, copies, 1]))(kernels()).items():
        add(name, call, _size(call.args) + _size(call()))


def add_transforms(side: int, add: Callable[..., None]) -> None:
    """Times a forward and an inverse transform, as two calls."""
    import tensorflow as tf

    from meshimpl import ProcessMesh
    from meshimpl.compat import mtf
    from meshimpl.mesh_function import MeshFunction
    from meshimpl.operations.fft import irfft3d, rfft3d

    mesh, layout = ProcessMesh("row:1,col:1"), "x:row;ky:row;y:col;kz:col"
    shape = mtf.Shape([mtf.Dimension(axis, side) for axis in "xyz"])
    forward = MeshFunction(lambda _, x: rfft3d(x), mesh, layout, {"x": (shape, tf.float32)})
    field = tf.random.stateless_normal([side] * 3, [1, 2])
    modes = forward(field)
    spectral = {"x": (forward.output_shapes[0], tf.float32)}
    inverse = MeshFunction(lambda _, x: irfft3d(x, shape), mesh, layout, spectral)
    size = _size([field, modes])
    add("FFT", lambda: forward(field), size)
    add("inverse FFT", lambda: inverse(modes), size)


def add_runs(options: argparse.Namespace, add: Callable[..., None]) -> None:
    """Times a run and its gradient."""
    import tensorflow as tf
    from worker import A_START, A_STOP, CELL, COSMOLOGY

    import flowpm_dist as fpm

    noise, weight = (tf.constant(np.load(options.folder / f"{x}.npy")) for x in ("noise", "weight"))
    side = options.grid[0]
    simulation = fpm.Simulation(
        fpm.Cosmology(**COSMOLOGY),
        side,
        CELL * side,
        fpm.scale_factor_steps(A_START, A_STOP, options.steps),
        integrator="fastpm",
        force_gradient="finite-difference",
        deconvolve=False,
    )

    def run() -> tuple[Any, Any]:
        state = simulation.run(white_noise=noise)
        return state.displacement.block, state.density().block

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(noise)
            loss = tf.reduce_sum(weight * run()[1])
        return tape.gradient(loss, noise)

    add("run", run)
    add("gradient", gradient)


def measure_peer(code: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of another code's run and gradient; one with a reason if it has none."""
    found = subprocess.run([options.peers, "-c", f"import {code}"], capture_output=True)
    if found.returncode:
        reason = f"not in {options.peers}: pip install {PEERS[code]}"
        return [{"name": code, "missing": reason}]
    threads = str(launch.available_cores())
    arguments = [str(folder), "--steps", str(options.steps), "--threads", threads]
    rows = []
    for task, name in (("forward", "run"), ("gradient", "gradient")):
        try:
            process = Worker(code, task, options.peers, arguments)
            try:
                for _ in range(options.repeats):
                    process.run()
            finally:
                process.stop()
        except SystemExit as error:
            lines = str(error).strip().splitlines()
            errors = [line for line in lines if "Error:" in line] or lines
            rows.append({"name": f"{name}, {code}", "missing": errors[-1]})
            continue
        rows.append({"name": f"{name}, {code}", "seconds": float(np.median(process.seconds))})
    return rows


def lines_of(side: int, forces: int, rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table for one grid."""
    speed = next(row["bytes"] / row["seconds"] for row in rows if row["name"] == "copy")
    titles = ("ms", "ns/particle", "a force", "GB/s", "of copy", "GiB")
    lines = ["", f"{f'{side}^3':24}" + "".join(f"{title:>12}" for title in titles)]
    for row in rows:
        if "missing" in row:
            lines.append(f"{row['name']:24}  {row['missing']}")
            continue
        a_particle, size = row["seconds"] * 1e9 / side**3, row.get("bytes", 0)
        whole = row["name"].startswith(("run", "gradient"))
        cells = [
            f"{row['seconds'] * 1e3:.3f}",
            "" if row["name"] == "copy" else f"{a_particle:.3f}",
            f"{a_particle / forces:.3f}" if whole else "",
            f"{size / row['seconds'] / 1e9:.1f}" if size else "",
            f"{size / row['seconds'] / speed:.2f}" if size else "",
            f"{row['peak'] / 2**30:.2f}" if "peak" in row else "",
        ]
        lines.append((f"{row['name']:24}" + "".join(f"{cell:>12}" for cell in cells)).rstrip())
    return lines


def sides_of(text: str) -> list[int]:
    """Returns the sides of the grids that a comma-separated text lists."""
    sides = [int(side) for side in text.split(",")]
    if any(side < 1 or side > TILE and side % TILE for side in sides):
        raise argparse.ArgumentTypeError(f"{text}: above {TILE}, sides are multiples of it")
    return sides


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument(
        "--grid",
        type=sides_of,
        default="128,256,512",
        metavar="SIDES",
        help="particles along a side of each grid; above 128, multiples of it",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--json", type=Path, help="file for all that was measured")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "worker":
        worker(options)
        return
    os.environ["JAX_PLATFORMS"] = "cpu" if options.cpu else "cuda"
    found: dict[str, Any] = {"steps": options.steps, "repeats": options.repeats, "grids": {}}
    for side in options.grid:
        with tempfile.TemporaryDirectory() as name:
            folder, random = Path(name), np.random.default_rng(20)
            for array in ("noise", "weight"):
                values = random.standard_normal((side,) * 3, dtype=np.float32)
                np.save(folder / f"{array}.npy", values)
            arguments = ["--grid", str(side), "--folder", name]
            arguments += ["--steps", str(options.steps), "--repeats", str(options.repeats)]
            arguments += ["--cpu"] * options.cpu
            ours = start_worker(sys.argv[0], arguments, 1, launch.available_cores())
            say(f"{side}^3: flowpm_dist is done")
            rows = ours["rows"]
            for code in PEERS:
                rows += measure_peer(code, options, folder)
                say(f"{side}^3: {code} is done")
        if not found["grids"]:
            print(ours["about"])
        found |= {"about": ours["about"]}
        found["grids"][side] = rows
        print(*lines_of(side, options.steps + 1, rows), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
