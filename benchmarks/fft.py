"""The distributed FFT compared with TensorFlow's, and two ranks compared with one.

    python benchmarks/fft.py [--grid 256] [--repeats 9]

Medians of the time for a forward (r2c) and an inverse transform, float32. Each comparison uses the
same cores: our operation and `tf.signal` alternate in one process; one rank and two ranks have one
thread each.
"""

from __future__ import annotations

import argparse
import sys

from common import median_seconds, report, start_worker

from meshimpl import launch


def worker(grid: int, repeats: int, mesh: str) -> None:
    """Measure on this job's ranks."""
    launch.configure_threads()
    import numpy as np
    import tensorflow as tf

    from meshimpl import ProcessMesh
    from meshimpl.compat import mtf
    from meshimpl.mesh_function import MeshFunction
    from meshimpl.operations.fft import irfft3d, rfft3d

    ranks = ProcessMesh(mesh)
    shape = mtf.Shape([mtf.Dimension(name, grid) for name in "xyz"])
    pair = MeshFunction(
        lambda _, x: irfft3d(rfft3d(x), shape),
        ranks,
        "x:row;ky:row;y:col;kz:col",
        {"x": (shape, tf.float32)},
    )
    block = tf.constant(
        np.random.default_rng(ranks.rank).normal(size=pair.impl.slice_shape(shape)), tf.float32
    )
    for _ in range(2):
        ranks.barrier()
        pair(block)

    def ours() -> None:
        ranks.barrier()
        pair(block)

    result = {"ours": median_seconds(ours, repeats)}
    if ranks.size == 1:
        theirs = tf.function(lambda x: tf.signal.irfft3d(tf.signal.rfft3d(x)))
        theirs(block)
        rounds = [
            (median_seconds(ours, 1), median_seconds(lambda: theirs(block), 1))
            for _ in range(repeats)
        ]
        result["ours"] = float(np.median([r[0] for r in rounds]))
        result["tf.signal"] = float(np.median([r[1] for r in rounds]))
    report(result)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", default="driver", choices=["driver", "worker"])
    parser.add_argument("--grid", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mesh", default="row:1,col:1")
    options = parser.parse_args()
    if options.role == "worker":
        worker(options.grid, options.repeats, options.mesh)
        return
    cores = launch.available_cores()
    sizes = ["--grid", str(options.grid), "--repeats", str(options.repeats)]

    def run(ranks: int, threads: int, mesh: str) -> dict[str, float]:
        return start_worker(sys.argv[0], [*sizes, "--mesh", mesh], ranks, threads)

    full = run(1, cores, "row:1,col:1")
    print(f"r2c FFT pair, {options.grid}^3 float32, median of {options.repeats}")
    print(
        f"  1 rank x {cores} threads: {full['ours']:.3f} s; tf.signal {full['tf.signal']:.3f} s; "
        f"ratio {full['ours'] / full['tf.signal']:.2f}"
    )
    one = run(1, 1, "row:1,col:1")
    print(
        f"  1 rank x 1 thread:  {one['ours']:.3f} s; tf.signal {one['tf.signal']:.3f} s; "
        f"ratio {one['ours'] / one['tf.signal']:.2f}"
    )
    for mesh in ("row:2,col:1", "row:1,col:2"):
        two = run(2, 1, mesh)
        print(
            f"  2 ranks x 1 thread, {mesh}: {two['ours']:.3f} s; "
            f"{one['ours'] / two['ours']:.2f}x faster than 1 rank x 1 thread"
        )


if __name__ == "__main__":
    main()
