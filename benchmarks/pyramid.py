"""The pyramid force compared with the transform of the whole mesh: errors, messages, time.

    python benchmarks/pyramid.py              the tables of errors and messages, and
                                              docs/images/pyramid.png
    python benchmarks/pyramid.py --runs 64    power spectra of ten steps of 64^3 particles
    python benchmarks/pyramid.py --time 256   processor time of the parts, on one rank
    python benchmarks/scaling.py --pyramid    the model of a step on many ranks

The forces are those of the particles of a run at a = 1: FastPM, ten steps from a = 0.1, cells of
2 Mpc/h, float64. `force` is the pyramid's minus that of the whole mesh; errors are relative to the
rms of the force.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import report, start_worker
from scaling import print_row

from flowpm_dist.grid.decomposition import PYRAMIDS, Pyramid
from meshimpl import launch
from meshimpl.traffic import added, so_far

CELL = 2.0  # [Mpc/h]
SPLITS = {
    **{f'"{name}"': pyramid for name, pyramid in PYRAMIDS.items()},
    "2, 0.7": Pyramid(2, 0.7, 8, 0),
    "2, 0.9": Pyramid(2, 0.9, 8, 0),
    "2, 1.1": Pyramid(2, 1.1, 10, 2),
    "4, 0.5": Pyramid(4, 0.5, 8, 0),
    "4, 0.7": Pyramid(4, 0.7, 10, 0),
    "4, 0.8, not beyond": Pyramid(4, 0.8, 12, 0),
    "4, 1": Pyramid(4, 1.0, 16, 6),
    "8, 0.6": Pyramid(8, 0.6, 16, 4),
}
"""Those of the tables, by factor and radius where they have no name."""
FACES = (-12, -8, -4, -2, 0, 2, 4, 8, 16, 32)
"""Edges of bins of the distance to a block's face [cells]; below 0 beyond it."""
BANDS = (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Edges of bins of the wavenumber [Nyquist wavenumber of the force mesh]."""


def simulation(grid: int, mesh: str, **options: Any) -> Any:
    """Returns the simulation of the tables."""
    import flowpm_dist as fpm

    edges = fpm.scale_factor_steps(0.1, 1.0, 10)
    more = {"deconvolve": False, **options}
    return fpm.Simulation(fpm.Cosmology.planck18(), grid, CELL * grid, edges, mesh=mesh, **more)


def force_worker(grid: int, mesh: str, names: str) -> None:
    """Measures the errors and the messages of forces, on this job's ranks."""
    launch.configure_threads()
    import numpy as np
    import tensorflow as tf

    from flowpm_dist.evolution.nbody import NBody
    from flowpm_dist.grid.field import Field
    from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
    from flowpm_dist.particle_mesh.gravity import Gravity
    from flowpm_dist.particle_mesh.options import ForceOptions
    from flowpm_dist.statistics import compare

    sim = simulation(grid, mesh, precision="float64")
    state, box, world = sim.run(seed=1), sim.box, sim.box.mesh.world
    moved, rest = state.displacement.block, tf.zeros([*box.block, 3], box.dtype)
    pm = ParticleMesh(box, 1, state.halo)

    sites = np.stack(np.meshgrid(*map(np.arange, box.block), indexing="ij"), axis=-1)
    places = sites + moved.numpy() / CELL
    distances = [np.full(box.block, np.inf)]
    for axis, ranks in enumerate(box.split.values()):
        if ranks > 1:
            place = places[..., axis]
            distances.append(np.minimum(place, box.block[axis] - place))
    distance = np.minimum.reduce(distances)

    def mean_square(x: Any, where: Any) -> list[float]:
        own = tf.constant([(x[where] ** 2).sum(), float(where.sum())], tf.float64)
        total, number = world.allreduce(own).numpy()
        return [total / max(number, 1.0), number]

    def forces(gravity: Gravity) -> tuple[Any, Any, Any]:
        nbody = NBody(gravity)
        gravity.force(gravity.field(nbody.painted(moved, "here")), moved)  # lowers them
        before = so_far()
        field = gravity.field(nbody.painted(moved, "here"))
        at_particles = gravity.force(field, moved).numpy()
        sent = {k: dataclasses.astuple(t) for k, t in added(so_far(), before, -1).items()}
        return at_particles, gravity.force(field, rest).numpy(), sent

    everywhere = np.ones(box.block, bool)
    exact, exact_sites, sent = forces(Gravity(pm, ForceOptions(deconvolve=False)))
    rms = mean_square(exact, everywhere)[0] ** 0.5
    nyquist = np.pi / CELL
    found: dict[str, Any] = {"halo": state.halo, "off": {"sent": sent}}
    for name in json.loads(names):
        gravity = Gravity(pm, ForceOptions(pyramid="1%", deconvolve=False))
        other = dataclasses.replace(gravity._pyramid, pyramid=SPLITS[name])
        gravity.__dict__["_pyramid"] = other
        force, at_sites, sent = forces(gravity)
        error = force - exact
        each = {"sent": sent, "error": mean_square(error, everywhere)[0] ** 0.5 / rms}
        each["largest"] = float(world.allreduce(tf.reduce_max(abs(error)), "max")) / rms
        each["faces"] = []
        for low, high in zip(FACES, FACES[1:], strict=False):
            square, number = mean_square(error, (distance >= low) & (distance < high))
            each["faces"].append(square**0.5 / rms if number > 100 else None)
        powers = 0.0
        for axis in range(3):
            fields = (Field(tf.constant(f[..., axis]), box) for f in (at_sites, exact_sites))
            each_axis = compare(*fields, bins=np.multiply(BANDS, nyquist), window=None)
            powers += np.stack([each_axis.power_a, each_axis.power_b, each_axis.cross])
        a, b, cross = powers
        each["transfer"] = ((a / b) ** 0.5 - 1).tolist()
        each["decorrelation"] = (1 - cross / (a * b) ** 0.5).tolist()
        each["error by k"] = ((a + b - 2 * cross) / b).clip(0).tolist()
        found[name] = each
    report(found)


def run_worker(grid: int, mesh: str, options: str) -> None:
    """Compares the density after whole runs with that of runs with the transform of the mesh."""
    launch.configure_threads()
    import numpy as np

    from flowpm_dist.statistics import compare

    exact, found = {}, {}
    for name, given in json.loads(options).items():
        whole = {key: value for key, value in given.items() if key == "deconvolve"}
        if bool(whole) not in exact:
            exact[bool(whole)] = simulation(grid, mesh, **whole).run(seed=1).density()
        other = exact[bool(whole)]
        density = simulation(grid, mesh, **given).run(seed=1).density()
        difference = np.asarray(density) - np.asarray(other)
        both = compare(density, other)
        k = both.k / (np.pi / CELL)
        found[name] = {
            "density": float(difference.std() / np.asarray(other).std()),
            "power": [float(np.abs(both.transfer**2 - 1)[k < top].max()) for top in (0.25, 0.5, 1)],
            "decorrelation": float((1 - both.correlation)[k < 1].max()),
        }
    report(found)


def time_worker(grid: int) -> None:
    """Measures the parts of the pyramid force on one rank of one thread [ns/cell]."""
    launch.configure_threads()
    import tensorflow as tf

    from flowpm_dist.evolution.nbody import NBody
    from flowpm_dist.particle_mesh.cloud_in_cell import ParticleMesh
    from flowpm_dist.particle_mesh.gravity import Gravity
    from flowpm_dist.particle_mesh.options import ForceOptions

    sim = simulation(grid, "row:1,col:1")
    pm, found = ParticleMesh(sim.box, 1, 2), {}
    density = tf.random.normal(sim.box.block)
    for name in ("off", *PYRAMIDS):
        gravity = Gravity(pm, ForceOptions(pyramid=name))
        parts: dict[str, Any] = {"whole": NBody(gravity).field}
        if name != "off":
            meshes = gravity._pyramid
            for part in ("to_coarse", "short_range", "to_fine"):
                parts[part] = tf.function(getattr(meshes, part).forward, autograph=False)
        for part, function in parts.items():
            shape = meshes.coarse.block if part == "to_fine" else sim.box.block
            x = density if part == "whole" else tf.random.normal([1, *shape])
            function(x)
            times = []
            for _ in range(9):
                begin = time.process_time()
                function(x).numpy()
                times.append(time.process_time() - begin)
            found[f"{name} {part}"] = 1e9 * statistics.median(times) / grid**3
    report(found)


def percent(value: float | None) -> str:
    """Returns a share in percent."""
    return "" if value is None else f"{100 * value:.2g}"


def error_tables(grid: int, meshes: list[str]) -> None:
    """Prints the errors and messages of forces, and draws the picture."""
    found = {}
    for mesh in meshes:
        shapes = [int(part.partition(":")[2]) for part in mesh.split(",")]
        ranks = shapes[0] * shapes[1]
        chosen = [*SPLITS] if mesh == meshes[-1] else [f'"{name}"' for name in PYRAMIDS]
        arguments = ["force", str(grid), mesh, json.dumps(chosen)]
        found[mesh] = start_worker(sys.argv[0], arguments, ranks, 1)
    print(f"halo of {found[meshes[0]]['halo']} cells\n")
    print_row(
        ["split", "mesh", "rms error [%]", "largest [%]", "by distance to a face [cells]: [%]"]
    )
    print_row(["---"] * 5)
    bins = [f"{a} to {b}" for a, b in zip(FACES, FACES[1:], strict=False)]
    for mesh, each in found.items():
        for name in (n for n in each if n not in ("halo", "off")):
            values = each[name]
            faces = ", ".join(
                f"{b}: {percent(v)}" for b, v in zip(bins, values["faces"], strict=True) if v
            )
            error = [percent(values[key]) for key in ("error", "largest")]
            print_row([name, mesh, *error, faces])
    print()
    bands = [f"{a} to {b}" for a, b in zip(BANDS, BANDS[1:], strict=False)]
    print_row(["k / Nyquist", *(f"{name}: T - 1 [%], 1 - r" for name in PYRAMIDS)])
    print_row(["---"] * (1 + len(PYRAMIDS)))
    last = found[meshes[-1]]
    for i, band in enumerate(bands):
        row = [band]
        for name in PYRAMIDS:
            each = last[f'"{name}"']
            row.append(f"{100 * each['transfer'][i]:+.2g}, {each['decorrelation'][i]:.1g}")
        print_row(row)
    print()
    print_row(["force", "mesh", "collectives", "messages", "KiB sent"])
    print_row(["---"] * 5)
    for mesh, each in found.items():
        for name in ("off", *(f'"{n}"' for n in PYRAMIDS)):
            sent = [sum(kind[i] for kind in each[name]["sent"].values()) for i in range(3)]
            print_row([name, mesh, *sent[:2], f"{sent[2] / 1024:.1f}"])
    picture(last, Path(__file__).resolve().parents[1] / "docs" / "images" / "pyramid.png")


def picture(found: dict[str, Any], path: Path) -> None:
    """Draws the errors by wavenumber and by the distance to a face."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), sharey=True, layout="constrained")
    for color, name in enumerate(PYRAMIDS):
        each = found[f'"{name}"']
        by_k = np.sqrt(each["error by k"])
        axes[0].stairs(by_k, BANDS, color=f"C{color}", label=f'"{name}"')
        faces = np.array([np.nan if v is None else v for v in each["faces"]])
        axes[1].stairs(faces, FACES, color=f"C{color}")
    axes[0].set(yscale="log", xlabel="k / Nyquist wavenumber", ylabel="rms error / rms force")
    axes[1].set(xlabel="distance to the face of a block [cells]")
    axes[1].axvline(0, color="0.6", linewidth=0.8)
    axes[0].legend(title="pyramid", frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def run_tables(grids: list[int], mesh: str) -> None:
    """Prints how whole runs differ."""
    options = {
        **{f'pyramid = "{name}"': {"pyramid": name} for name in PYRAMIDS},
        'pyramid = "1%", deconvolve': {"pyramid": "1%", "deconvolve": True},
        'exchange = "float16"': {"exchange": "float16"},
        **{
            f'pyramid = "{name}", float16': {"pyramid": name, "exchange": "float16"}
            for name in PYRAMIDS
        },
    }
    titles = "grid, mesh, run, density [%], P below 0.25 Nyquist [%], 0.5, 1, largest 1 - r"
    print_row(titles.split(", "))
    print_row(["---"] * 8)
    ranks = [int(part.partition(":")[2]) for part in mesh.split(",")]
    for grid in grids:
        arguments = ["run", str(grid), mesh, json.dumps(options)]
        found = start_worker(sys.argv[0], arguments, ranks[0] * ranks[1], 1)
        for name, each in found.items():
            power = map(percent, each["power"])
            row = [f"{grid}^3", mesh, name, percent(each["density"]), *power]
            print_row([*row, f"{each['decorrelation']:.1g}"])


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=int, default=128, help="of the tables of errors")
    parser.add_argument("--mesh", nargs="+", default=["row:2,col:1", "row:2,col:2"])
    parser.add_argument("--runs", type=int, nargs="+", metavar="GRID")
    parser.add_argument("--time", type=int, metavar="GRID")
    args = parser.parse_args()
    if args.runs:
        run_tables(args.runs, args.mesh[-1])
    elif args.time:
        for name, ns in start_worker(sys.argv[0], ["time", str(args.time)], 1, 1).items():
            print_row([name, f"{ns:.1f} ns/cell"])
    else:
        error_tables(args.grid, args.mesh)


WORKERS = {"force": force_worker, "run": run_worker, "time": time_worker}

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        kind, grid, *rest = sys.argv[2:]
        WORKERS[kind](int(grid), *rest)
    else:
        main()
