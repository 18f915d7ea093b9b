"""What gpu_check.py checks, on the devices that the ranks have.

A check compares what this job computes with numpy in float64, with the portable kernels on the CPU
in float64, or with the numbers of gpu_check.json, which a CPU has computed in float64. All ranks
make each check together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import tensorflow as tf

import flowpm_dist as fpm
from flowpm_dist.cosmoflow.network.network import Network
from flowpm_dist.cosmoflow.planning.declarations import (
    Convolution,
    Declaration,
    Dense,
    Pool,
    Shrink,
)
from flowpm_dist.grid.decomposition import default_mesh
from flowpm_dist.initial.conditions import noise_function
from flowpm_dist.particle_mesh.kernels import Compiled, Kernels, Lattice, Portable, kernels
from meshimpl import Communicator, ProcessMesh
from meshimpl.compat import mtf
from meshimpl.graph_guards import last_collective
from meshimpl.mesh_function import MeshFunction
from meshimpl.operations.fft import irfft3d, rfft3d

GRID = 24
"""Cells along a side of the universe of the checks; 1 to 4, 6, 8, 9 and 12 ranks can share it."""
BOX = 48.0  # [Mpc/h]
SIGMA8 = 0.8
COSMOLOGY = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.68, n_s=0.97, sigma8=SIGMA8)
NETWORK = Declaration(
    "gpu-check",
    (Convolution(4, 3), Pool(), Convolution(8, 4), Convolution(8, 3, stride=2), Shrink(3))
    + (Dense(16),),
    "periodic",
    0.1,
)
LAYOUT = "x:row;ky:row;y:col;kz:col"
TIGHT = {"float64": 1e-12, "float32": 1e-5}
"""Precision -> the limit of errors that are rounding alone."""
CARRIED = ("float16", "float32", "float64", "int32", "int64", "bfloat16", "complex64", "bool")

Precision = str
Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Found:
    """What a check has found.

    Attributes:
        error: largest difference from the reference, over the reference's root mean square.
        device: which holds the result, such as "GPU:0".
    """

    error: float
    device: str


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name, precision: together unique.
        limit: limit of the error.
        find: makes the comparison, on all ranks together.
    """

    name: str
    precision: Precision
    limit: float
    find: Callable[[], Found]


def all_checks(mesh: ProcessMesh, stored: Values) -> Iterator[Check]:
    """Yields the checks in the order in which a fault shows best: from messages to a training step.

    Args:
        mesh: mesh of all ranks, see `mesh_of`.
        stored: the numbers of gpu_check.json; a check that needs one that is missing fails.
    """
    for dtype in CARRIED:
        yield Check("collectives", dtype, 0.0, functools.partial(_collectives, mesh, dtype))
    on_gpu = bool(tf.config.get_visible_devices("GPU"))
    for precision, tight in TIGHT.items():
        yield Check("FFT", precision, tight, functools.partial(_fft, mesh, precision))
        back = functools.partial(_fft_back, mesh, precision)
        yield Check("FFT and back, adjoint", precision, tight, back)
        kind = Compiled if on_gpu else type(kernels())
        call = functools.partial(_kernels, kind, precision)
        yield Check(f"{kind.name} particle kernels", precision, 10 * tight, call)
    limits = {
        "float64": {"run": 1e-8, "gradient": 1e-7, "network": 1e-9},
        "float32": {"run": 1e-4, "gradient": 1e-3, "network": 1e-4},
    }
    for precision, limit in limits.items():
        for name, numbers in (("run", run_numbers), ("gradient", gradient_numbers)):
            call = functools.partial(_against, stored, numbers, mesh, precision)
            yield Check(name, precision, limit[name], call)
    yield Check("gradient by differences", "float64", 1e-6, functools.partial(_difference, mesh))
    for precision, limit in limits.items():
        call = functools.partial(_against, stored, network_numbers, mesh, precision)
        yield Check("network step", precision, limit["network"], call)
    # What TensorFlow does with float32 by default on GPUs that have TF32: 10 bits of mantissa.
    rough = functools.partial(network_numbers, tf32=True)
    call = functools.partial(_against, stored, rough, mesh, "float32")
    yield Check("network step", "float32, TF32 allowed", 3e-2, call)
    # Last, because XLA takes some minutes to compile all of them for a GPU.
    for precision, tight in TIGHT.items() if on_gpu else ():
        call = functools.partial(_kernels, Portable, precision)
        yield Check("portable particle kernels", precision, 10 * tight, call)


def mesh_of(ranks: int) -> ProcessMesh:
    """Returns the mesh of the checks.

    Raises:
        ValueError: the grid of the checks does not divide over that number of ranks.
    """
    return ProcessMesh(default_mesh(ranks, (GRID,) * 3))


def stored_numbers(mesh: ProcessMesh) -> dict[str, list[float]]:
    """Returns the numbers of gpu_check.json, in float64, as this job finds them."""
    found: dict[str, list[float]] = {}
    for numbers in (run_numbers, gradient_numbers, network_numbers):
        found |= {name: list(map(float, v)) for name, v in numbers(mesh, "float64")[0].items()}
    return found


def _worst(found: Any, expected: Any) -> float:
    found, expected = np.broadcast_arrays(found, expected)
    known = ~np.isnan(expected)  # what a lost particle reads is NaN in both
    if not np.array_equal(known, ~np.isnan(found)):
        return float("inf")
    found, expected = found[known], expected[known]
    scale = np.sqrt(np.sum(np.abs(expected) ** 2) / max(1, expected.size)) or 1.0
    worst = np.max(np.abs(found - expected), initial=0) / scale
    return float(worst) if np.isfinite(worst) else float("inf")


def _device(x: tf.Tensor) -> str:
    return str(x.device).rpartition("device:")[2] or "?"


def _same_on_all(mesh: ProcessMesh, error: float) -> float:
    """Returns the largest error of all ranks."""
    return float(mesh.world.allreduce(tf.constant(error, tf.float64), "max"))


def _against(
    stored: Values,
    numbers: Callable[[ProcessMesh, Precision], tuple[Values, str]],
    mesh: ProcessMesh,
    precision: Precision,
) -> Found:
    found, device = numbers(mesh, precision)
    errors = [_worst(value, stored[name]) for name, value in found.items()]
    return Found(_same_on_all(mesh, max(errors)), device)


def fingerprint(values: Any) -> np.ndarray:
    """Returns a few numbers that tell an array: its root mean square, and its random projections.

    Each is about as large as a typical value, however many values there are.
    """
    flat = np.asarray(values, np.float64).reshape(-1)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], [6, flat.size])
    return np.array([np.sqrt(np.mean(flat**2)), *(signs @ flat / np.sqrt(flat.size))])


def _collectives(mesh: ProcessMesh, dtype: str) -> Found:
    """Every collective of the world and of the mesh's lines, in one graph, against numpy."""
    rows, kind = 4 * mesh.size, tf.as_dtype(dtype)
    # Small whole numbers, which every dtype adds exactly.
    parts = np.random.default_rng(0).integers(0, 2, [mesh.size, rows, 3])
    groups = [mesh.world, *map(mesh.communicator, mesh.names)]

    def build(x: tf.Tensor) -> list[tf.Tensor]:
        found = [y for group in groups for y in _made(group, x)]
        last = last_collective()
        with tf.control_dependencies([] if last is None else [last]):
            return list(map(tf.identity, found))

    mine = tf.cast(parts[mesh.rank], kind)
    spec = [tf.TensorSpec(mine.shape, kind)]
    results = tf.compat.v1.wrap_function(build, spec)(mine)
    expected = [y for group in groups for y in _expected(group, parts, dtype)]
    # numpy knows no bfloat16, and the complex numbers here are real.
    plain = [_plain(y).numpy() for y in results]
    error = max(_worst(y, e) for y, e in zip(plain, expected, strict=True))
    return Found(_same_on_all(mesh, error), _device(results[0]))


def _plain(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.math.real(x) if x.dtype.is_complex else x, tf.float64)


def _made(group: Communicator, x: tf.Tensor) -> list[tf.Tensor]:
    half = [2 * (k == 0) for k in range(group.size)]  # two rows to the first, none to the others
    return [
        group.allreduce(x),
        group.allgather(x),
        group.alltoall(x),
        group.broadcast(x, group.size - 1),
        group.shift(x, 1),
        tf.reduce_sum(_plain(group.alltoallv(x[:2], half))),
    ]


def _expected(group: Communicator, parts: np.ndarray, dtype: str) -> list[np.ndarray]:
    own = parts[list(group.ranks)]
    share = parts.shape[1] // group.size
    here = slice(group.index * share, (group.index + 1) * share)
    total = own.sum(0)
    if group.size == 1:
        first = own[0, :2].sum()
    else:
        first = own[:, :2].sum() * (group.index == 0)
    return [
        np.minimum(total, 1) if dtype == "bool" else total,
        np.concatenate(own),
        np.concatenate([part[here] for part in own]),
        own[-1],
        own[group.index - 1],
        first,
    ]


@functools.cache
def cube(side: int) -> Any:
    """Returns the `mtf.Shape` [x, y, z] of a cubic grid."""
    return mtf.Shape([mtf.Dimension(name, side) for name in "xyz"])


def _white(side: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=[side] * 3)


def _fft(mesh: ProcessMesh, precision: Precision) -> Found:
    """The transform against numpy's."""
    spec = {"x": (cube(GRID), tf.as_dtype(precision))}
    forward = MeshFunction(lambda _, x: rfft3d(x), mesh, LAYOUT, spec)
    field = _white(GRID).astype(precision)
    block = forward(field)
    pairs = forward.impl.gather(block, forward.output_shapes[0]).numpy()
    spectrum = (pairs[..., 0] + 1j * pairs[..., 1])[: GRID // 2 + 1, :GRID]
    expected = np.fft.rfftn(field.astype(np.float64)).transpose(2, 1, 0)
    return Found(_same_on_all(mesh, _worst(spectrum, expected)), _device(block))


def _fft_back(mesh: ProcessMesh, precision: Precision) -> Found:
    """The transform and its inverse, whose adjoint is then the identity, too."""
    spec = {"x": (cube(GRID), tf.as_dtype(precision))}
    pair = MeshFunction(lambda _, x: irfft3d(rfft3d(x), cube(GRID)), mesh, LAYOUT, spec)
    block = pair.block_of("x", _white(GRID).astype(precision))
    with tf.GradientTape() as tape:
        tape.watch(block)
        back = pair(block)
    weights = tf.reverse(block, [0])
    gradient = tape.gradient(back, block, weights)
    error = max(_worst(back, block), _worst(gradient, weights))
    return Found(_same_on_all(mesh, error), _device(back))


def _kernels(kind: Callable[[], Kernels], precision: Precision) -> Found:
    """Kernels against the portable ones in float64 on the CPU, each rank alone.

    The lattices have a halo that holds all particles, one that some leave, and a mesh of 1.5 cells
    to a particle. On a GPU, the compiled kernels get a lattice with several particles for each
    thread as well, the portable ones the first alone.
    """
    cell, small = (1.3, 0.9, 1.1), (12, 10, 14)
    cases = [
        (Lattice(small, 1, (3, 0, 0), cell), 0.4),
        (Lattice(small, 2, (2, 2, 0), cell), 1.0),
        (Lattice(small, 1.5, (0, 0, 0), cell), 0.4),
    ]
    if tf.config.get_visible_devices("GPU"):
        large = Lattice((128, 96, 96), 1, (3, 0, 0), cell)
        cases = cases[:1] if kind is Portable else [*cases, (large, 0.4)]
    kernels, errors = kind(), []
    for lattice, deviation in cases:
        found = list(_calls(kernels, lattice, deviation, precision))
        with tf.device("CPU:0"):
            exact = Portable(xla=False)
            expected = list(_calls(exact, lattice, deviation, "float64", precision))
        errors += [_worst(a, b) for a, b in zip(found, expected, strict=True)]
    return Found(max(errors), _device(found[0]))


def _calls(
    k: Kernels,
    g: Lattice,
    deviation: float,
    precision: Precision,
    rounded: Precision = "float64",
) -> Iterator[tf.Tensor]:
    """Yields all results of the kernels between particles and mesh.

    Args:
        k: the kernels.
        g: the particles and the mesh.
        deviation: standard deviation of the displacements [length].
        precision: in which they work.
        rounded: to which their inputs are rounded before.
    """
    random = np.random.default_rng(2)

    def normal(*shape: int, deviation: float = 1.0) -> tf.Tensor:
        drawn = random.normal(scale=deviation, size=[2, *shape]).astype(rounded)
        return tf.constant(drawn.astype(precision))

    s = normal(*g.particles, 3, deviation=deviation)
    u, v, w = (normal(*g.particles, 3) for _ in range(3))
    weights, mesh, factors = normal(*g.particles), normal(*g.mesh_block), normal(2)
    force = normal(*g.mesh_block, 3)
    yield from k.paint(g, s)
    yield from k.paint(g, s, weights)
    yield k.paint_vjp(g, s, None, mesh)[0]
    yield from k.paint_vjp(g, s, weights, mesh, u)
    yield k.read(g, force, s)
    yield from k.read_vjp(g, force, s, v)
    yield k.read_gradient(g, mesh, s)
    yield from k.read_gradient_vjp(g, mesh, s, u)
    for field in (mesh, force):
        yield k.kick(g, field, s, u, factors)
        yield from k.kick_vjp(g, field, s, u, v, w, factors)
    yield k.linear(u, v, factors[:, 0])
    yield from k.drift_vjp(u, v, w, s, factors[:, 0])


def simulation_of(
    mesh: ProcessMesh, precision: Precision, side: int = GRID, steps: int = 4
) -> fpm.Simulation:
    """Returns a simulation with the resolution of the checks; `side` and `steps` are its own."""
    edges = fpm.scale_factor_steps(0.1, 1.0, steps)
    size = BOX * side / GRID
    known = cast(Literal["float32", "float64"], precision)
    return fpm.Simulation(COSMOLOGY, side, size, edges, mesh=mesh, precision=known)


@functools.cache
def _checked(mesh: ProcessMesh, precision: Precision) -> tuple[fpm.Simulation, tf.Tensor]:
    """The universe of the checks, and this rank's block of its white noise."""
    simulation = simulation_of(mesh, precision)
    return simulation, noise_function(simulation.box)(1)


def run_numbers(mesh: ProcessMesh, precision: Precision) -> tuple[dict[str, np.ndarray], str]:
    """Returns the numbers of a run from the white noise to a = 1, and the density's device."""
    simulation, noise = _checked(mesh, precision)
    state = simulation.run(white_noise=noise)
    density = state.density()
    found = {"displacement": state.displacement, "velocity": state.velocity, "density": density}
    return {name: fingerprint(field) for name, field in found.items()}, _device(density.block)


def _part_of_loss(mesh: ProcessMesh, precision: Precision, **parameters: Any) -> tf.Tensor:
    """Returns this rank's part of the variance of the density."""
    simulation, noise = _checked(mesh, precision)
    cosmology = COSMOLOGY.replace(**parameters)
    density = simulation.run(white_noise=noise, cosmology=cosmology).density().block
    return tf.reduce_sum(tf.square(density - 1)) / simulation.box.cells


def gradient_numbers(mesh: ProcessMesh, precision: Precision) -> tuple[dict[str, np.ndarray], str]:
    """Returns the numbers of a gradient through the run, and its device."""
    simulation, noise = _checked(mesh, precision)
    of = {name: tf.constant(getattr(COSMOLOGY, name), tf.float64) for name in ("Omega_m", "sigma8")}
    with tf.GradientTape() as tape:
        tape.watch([noise, *of.values()])
        part = _part_of_loss(mesh, precision, **of)
    to_noise, slopes = tape.gradient(part, [noise, of])
    found = {f"to {name}": np.array([float(slope)]) for name, slope in slopes.items()}
    found["to noise"] = fingerprint(fpm.Field(to_noise, simulation.box))
    return found, _device(to_noise)


def _difference(mesh: ProcessMesh) -> Found:
    """The gradient to sigma8 against a central difference, of one another on the same devices."""
    slope, device = gradient_numbers(mesh, "float64")
    step = 1e-7  # small: the loss has a kink where a particle crosses the face of a cell
    up, down = (
        mesh.world.allreduce(_part_of_loss(mesh, "float64", sigma8=SIGMA8 + sign * step))
        for sign in (1, -1)
    )
    error = _worst(slope["to sigma8"], (up - down) / (2 * step))
    return Found(_same_on_all(mesh, error), device)


def network_numbers(
    mesh: ProcessMesh, precision: Precision, tf32: bool = False
) -> tuple[dict[str, np.ndarray], str]:
    """Returns loss, outputs and gradients of a small network in one step, and their device."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    try:
        options: dict[str, Any] = {"loss": "l2", "precision": precision, "gather_below": 2}
        network = Network(NETWORK, mesh, width=GRID, batch=2, **options)
        random = np.random.default_rng(3)
        volumes = random.gamma(2.0, 0.5, [2, GRID, GRID, GRID]).astype(network.input_dtype)
        targets = random.uniform(-1, 1, [2, 3]).astype(network.weights[0].dtype.as_numpy_dtype)
        loss, outputs, gradients = network.step(volumes, targets, np.arange(2), 0)
        found = {"loss": np.array([float(loss)]), "outputs": fingerprint(outputs)}
        kernels_only = [g for g in gradients if g.shape.rank > 1]
        found |= {f"to layer {i}": fingerprint(g) for i, g in enumerate(kernels_only)}
        return found, _device(gradients[0])
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
