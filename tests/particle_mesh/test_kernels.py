"""Particle kernels: compiled against portable, adjoints against differences, bits."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from flowpm_dist.particle_mesh.kernels import (
    Compiled,
    Kernels,
    Lattice,
    Portable,
    compiled,
    kernels,
    why_portable,
)
from flowpm_dist.particle_mesh.kernels.compiled import NOT_BUILT

REASON = compiled.load()[1]
needs_library = pytest.mark.skipif(REASON is not None, reason=str(REASON))
# XLA takes a second for each kernel of each lattice: most tests do without.
WITHOUT_XLA = pytest.param(functools.partial(Portable, xla=False), id="portable")
COMPILED = pytest.param(Compiled, marks=needs_library, id="compiled")
BOTH = [WITHOUT_XLA, COMPILED]
CELL = (1.3, 0.9, 1.1)  # [Mpc/h]
PARTICLES = (4, 8, 36)
# mesh_factor, halo, rms displacement [Mpc/h]; the fourth and fifth lose particles, wrap many times.
LATTICES = [
    (1, (0, 0, 0), 1.5),
    (2, (9, 0, 8), 1.5),
    (3, (0, 12, 0), 2.0),
    (1, (3, 3, 0), 1.0),
    (1, (0, 0, 0), 60.0),
    (1.5, (9, 0, 8), 1.5),
    (1.25, (0, 0, 0), 2.0),
]
FRACTIONAL = LATTICES[5:]
GRADIENTS = ["finite-difference", "spectral"]
BATCH = 2


class Case:
    """Random inputs of every kernel on one lattice."""

    def __init__(self, lattice: tuple[Any, ...] = LATTICES[0], dtype: str = "float64") -> None:
        mesh_factor, halo, rms = lattice
        self.g = Lattice(PARTICLES, mesh_factor, halo, CELL)
        self.dtype, self._random = dtype, np.random.default_rng(5)
        self.s = self.vectors() * tf.constant(rms, dtype)
        self.weights = self.normal(BATCH, *PARTICLES)
        self.mesh = self.normal(BATCH, *self.g.mesh_block)
        self.factors = self.normal(BATCH, 2)

    def normal(self, *shape: int) -> tf.Tensor:
        return tf.constant(self._random.normal(size=shape), self.dtype)

    def vectors(self) -> tf.Tensor:
        return self.normal(BATCH, *PARTICLES, 3)

    def field(self, gradient: str) -> tf.Tensor:
        return self.mesh if gradient != "spectral" else self.normal(BATCH, *self.g.mesh_block, 3)


def results(k: Kernels, c: Case, only: str = "") -> dict[str, Any]:
    """Everything that a set of kernels gives for a case, or what `only` is part of the name of."""
    u, v, w = c.vectors(), c.vectors(), c.vectors()
    calls: dict[str, Any] = {
        "paint": lambda: k.paint(c.g, c.s),
        "paint weighted": lambda: k.paint(c.g, c.s, c.weights),
        "paint_vjp": lambda: k.paint_vjp(c.g, c.s, None, c.mesh),
        "paint_vjp weighted": lambda: k.paint_vjp(c.g, c.s, c.weights, c.mesh, u),
        "read_gradient": lambda: k.read_gradient(c.g, c.mesh, c.s),
        "read_gradient_vjp": lambda: k.read_gradient_vjp(c.g, c.mesh, c.s, u),
        "linear": lambda: k.linear(u, v, c.factors[:, 0]),
        "drift_vjp": lambda: k.drift_vjp(u, v, w, c.s, c.factors[:, 0]),
    }
    for width in (1, 3):
        fields = c.normal(BATCH, *c.g.mesh_block, width)
        values = c.normal(BATCH, *PARTICLES, width)
        calls[f"read {width}"] = functools.partial(k.read, c.g, fields, c.s)
        calls[f"read_vjp {width}"] = functools.partial(k.read_vjp, c.g, fields, c.s, values)
    for gradient in GRADIENTS:
        field = c.field(gradient)
        calls[f"kick {gradient}"] = functools.partial(k.kick, c.g, field, c.s, u, c.factors)
        calls[f"kick_vjp {gradient}"] = functools.partial(
            k.kick_vjp, c.g, field, c.s, u, v, w, c.factors
        )
    return {name: call() for name, call in calls.items() if only in name}


def digest(k: Kernels) -> str:
    """A digest of the bits of every result, of a lattice of many pieces of work."""
    global PARTICLES
    small, PARTICLES = PARTICLES, (40, 48, 40)
    try:
        found = [
            results(k, Case(lattice, "float32")) for lattice in (*LATTICES[:4:3], FRACTIONAL[1])
        ]
    finally:
        PARTICLES = small
    bits = b"".join(t.numpy().tobytes() for t in tf.nest.flatten(found) if t is not None)
    return hashlib.sha256(bits).hexdigest()


def inner(a: tf.Tensor, b: tf.Tensor) -> float:
    return float(tf.reduce_sum(tf.cast(a, tf.float64) * tf.cast(b, tf.float64)))


def slope(f: Any, x: tf.Tensor, direction: tf.Tensor, step: float = 1e-7) -> float:
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


def test_library_is_there_when_a_compiler_is() -> None:
    if shutil.which(os.environ.get("CXX", "g++").split()[0]) is None:
        pytest.skip("no C++ compiler")
    assert REASON is None


@needs_library
def test_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, kind in (("portable", Portable), ("compiled", Compiled)):
        monkeypatch.setenv("FLOWPM_KERNELS", choice)
        kernels.cache_clear()
        assert isinstance(kernels(), kind)
        assert (why_portable() is None) == (choice == "compiled")
    kernels.cache_clear()


def test_kernels_that_were_not_built_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWPM_KERNELS", raising=False)
    monkeypatch.setattr(
        "flowpm_dist.particle_mesh.kernels.compiled.load", lambda: (None, NOT_BUILT)
    )
    kernels.cache_clear()
    with pytest.warns(UserWarning, match="are not built: .* flowpm-dist build kernels") as found:
        assert isinstance(kernels(), Portable) and isinstance(kernels(), Portable)
    assert len(found) == 1
    monkeypatch.setenv("FLOWPM_KERNELS", "portable")
    kernels.cache_clear()
    with warnings.catch_warnings(action="error"):
        assert isinstance(kernels(), Portable)
    kernels.cache_clear()


def assert_same(found: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    # Sums over some hundred numbers of size 10; positions of size 100 in the last lattice.
    tolerance = 200 * np.finfo(dtype).eps
    assert found.keys() == expected.keys() and expected
    for name, wanted in expected.items():
        for got, want in zip(tf.nest.flatten(found[name]), tf.nest.flatten(wanted), strict=True):
            if want is None:
                assert got is None
                continue
            assert got.dtype == want.dtype, name
            finite = want.numpy()[np.isfinite(want.numpy())]
            size = np.abs(finite).max(initial=1)
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * size, err_msg=name)


@needs_library
@pytest.mark.parametrize(
    ("lattice", "dtype"),
    [(lattice, "float64") for lattice in LATTICES]
    # Many times around the box leave too few digits of a position in float32.
    + [(lattice, "float32") for lattice in (*LATTICES[:4], *FRACTIONAL)],
)
def test_compiled_is_portable(lattice: Any, dtype: str) -> None:
    compiled = results(Compiled(), Case(lattice, dtype))
    assert_same(compiled, results(Portable(xla=False), Case(lattice, dtype)), dtype)


@needs_library
@pytest.mark.parametrize("links", [(40.0, 40.0, 40.0), (60.0, 30.0, 20.0)])
def test_compiled_friends_are_portable(links: tuple[float, ...]) -> None:
    """Clumps, strays, points of one place, and none at all."""
    rng = np.random.default_rng(6)
    clumps = rng.random([20, 1, 3]) + 0.02 * rng.normal(size=[20, 40, 3])
    places = np.concatenate([clumps.reshape(-1, 3), rng.random([500, 3]), np.full([5, 3], 0.5)])
    for x in (places, places[:1], places[:0]):
        found, expected = (kind.friends(tf.constant(x), links) for kind in (Compiled(), Portable()))
        np.testing.assert_array_equal(found, expected)
    assert 20 < len(np.unique(Compiled().friends(tf.constant(places), links))) < 1000


@pytest.mark.parametrize(
    ("lattice", "dtype", "only"),
    [
        (LATTICES[1], "float64", ""),
        (LATTICES[0], "float32", "kick_vjp"),
        (FRACTIONAL[0], "float32", "kick_vjp"),
    ],
)
def test_portable_under_xla(lattice: Any, dtype: str, only: str) -> None:
    """Every kernel in float64; in float32 those that gather, scatter and differentiate."""
    expected = results(Portable(xla=False), Case(lattice, dtype), only)
    assert_same(results(Portable(), Case(lattice, dtype), only), expected, dtype)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("lattice", [*LATTICES[1:3], *FRACTIONAL])
def test_adjoints_are_derivatives(kind: Any, lattice: Any) -> None:
    """Derivatives with respect to s against differences, linear ones by <u, J v> = <J^T u, v>."""
    k, c = kind(), Case(lattice)
    g, s, w, direction, u = c.g, c.s, c.weights, c.vectors(), c.vectors()
    ds, dweights = k.paint_vjp(g, s, w, c.mesh)
    painted = slope(lambda x: inner(k.paint(g, x, w)[0], c.mesh), s, direction)
    assert inner(ds, direction) == pytest.approx(painted, rel=1e-6, abs=1e-5)
    assert inner(dweights, w) == pytest.approx(inner(k.paint(g, s, w)[0], c.mesh), rel=1e-9)
    added = k.paint_vjp(g, s, w, c.mesh, u)[0]
    np.testing.assert_allclose(added, u + ds, rtol=0, atol=1e-12)
    for width in (1, 3):
        fields, values = c.normal(BATCH, *g.mesh_block, width), c.normal(BATCH, *PARTICLES, width)
        dfields, ds = k.read_vjp(g, fields, s, values)
        read = slope(lambda x, f=fields, v=values: inner(k.read(g, f, x), v), s, direction)
        assert inner(ds, direction) == pytest.approx(read, rel=1e-6, abs=1e-5)
        linear = inner(k.read(g, fields, s), values)
        assert inner(dfields, fields) == pytest.approx(linear, rel=1e-9)
    dpotential, ds = k.read_gradient_vjp(g, c.mesh, s, u)
    force = slope(lambda x: inner(k.read_gradient(g, c.mesh, x), u), s, direction)
    assert inner(ds, direction) == pytest.approx(force, rel=1e-6, abs=1e-5)
    linear = inner(k.read_gradient(g, c.mesh, s), u)
    assert inner(dpotential, c.mesh) == pytest.approx(linear, rel=1e-9)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("lattice", [LATTICES[1], FRACTIONAL[0]])
def test_kick_and_back(kind: Any, gradient: Any, lattice: Any) -> None:
    k, c = kind(), Case(lattice)
    v, dv, ds, direction = c.vectors(), c.vectors(), c.vectors(), c.vectors()
    field = c.field(gradient)

    def kicked(s: tf.Tensor, f: tf.Tensor = field) -> float:
        return inner(k.kick(c.g, f, s, v, c.factors), dv)

    after = k.kick(c.g, field, c.s, v, c.factors)
    before, dfield, ds_new, sums = k.kick_vjp(c.g, field, c.s, after, dv, ds, c.factors)
    np.testing.assert_allclose(before, v, rtol=0, atol=1e-11)
    expected = slope(kicked, c.s, direction)
    assert inner(ds_new - ds, direction) == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert inner(dfield, field) == pytest.approx(kicked(c.s) - kicked(c.s, 0 * field), rel=1e-9)
    assert sums.dtype == tf.float64
    assert inner(sums, c.factors) == pytest.approx(kicked(c.s), rel=1e-9)


@pytest.mark.parametrize("kind", BOTH)
def test_drift_and_back(kind: Any) -> None:
    k, c = kind(), Case()
    x, v, dx, dv = (c.vectors() for _ in range(4))
    factor = c.factors[:, 0]
    before, dv_before, sums = k.drift_vjp(k.linear(x, v, factor), v, dx, dv, factor)
    spread = tf.reshape(factor, [-1, 1, 1, 1, 1])
    np.testing.assert_allclose(before, x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(dv_before, dv + spread * dx, rtol=0, atol=1e-14)
    np.testing.assert_allclose(sums, tf.reduce_sum(dx * v, [1, 2, 3, 4]), rtol=1e-12)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("mesh_factor", [2, 1.25])
def test_uniform_force_is_exact(kind: Any, gradient: Any, mesh_factor: float) -> None:
    """The force of a potential linear in z is minus its slope, wherever a particle is."""
    g = Lattice((4, 4, 8), mesh_factor, (0, 0, 9), CELL)
    z = CELL[2] * tf.range(g.mesh_block[2], dtype=tf.float64)
    field = tf.broadcast_to(3 * z, [1, *g.mesh_block])
    if gradient == "spectral":
        field = tf.broadcast_to(tf.constant([0, 0, -3.0], tf.float64), [1, *g.mesh_block, 3])
    random = np.random.default_rng(3).uniform(-6, 6, [1, *g.particles, 3])
    s = tf.constant(random * np.array(CELL))
    factors = tf.constant([[0.0, 1.0]], tf.float64)
    force = kind().kick(g, field, s, 0 * s, factors)
    np.testing.assert_allclose(force, np.broadcast_to([0, 0, -3.0], s.shape), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("mesh_factor", [1, 1.5])
def test_places(kind: Any, mesh_factor: float) -> None:
    """A field linear in z, read at a particle, is the particle's place, to rounding."""
    g = Lattice((4, 4, 36), mesh_factor, (0, 0, 9), CELL)
    z = tf.range(g.mesh_block[2], dtype=tf.float64) - 9
    field = tf.broadcast_to(z[:, tf.newaxis], [1, *g.mesh_block, 1])
    s = np.random.default_rng(3).uniform(-6, 6, [1, *g.particles, 3]) * np.array(CELL)
    expected = np.arange(36) * mesh_factor + s[..., 2] / CELL[2]
    found = kind().read(g, field, tf.constant(s))[..., 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * g.mesh_block[2])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("lattice", [LATTICES[0], FRACTIONAL[1]])
def test_wrapping_and_mass(kind: Any, lattice: Any) -> None:
    """Where everything wraps, whole boxes make no difference and nothing is lost."""
    k, c = kind(), Case(lattice)
    boxes = np.array([3e5, -2e5, 1e4]).round() * np.array(CELL) * np.array(c.g.inner_block)
    near, far = k.paint(c.g, c.s)[0], k.paint(c.g, c.s + boxes)[0]
    np.testing.assert_allclose(far, near, rtol=0, atol=1e-8)
    assert float(tf.reduce_sum(near)) == pytest.approx(BATCH * np.prod(PARTICLES), rel=1e-13)


@pytest.mark.parametrize("kind", [pytest.param(Portable, id="xla"), COMPILED])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, 40.0])
def test_particles_that_are_nowhere(kind: Any, bad: float) -> None:
    """Of one particle beyond the halo, or nowhere at all, nothing is painted; it reads as NaN."""
    k, g = kind(), Lattice((4, 4, 40), 1, (4, 4, 0), (1.0, 1.0, 1.0))
    displacement = np.zeros([1, *g.particles, 3], np.float32)
    displacement[0, 2, 1, 7, 0] = bad
    s = tf.constant(displacement)
    mesh, reach = k.paint(g, s)
    assert float(tf.reduce_sum(mesh)) == np.prod(g.particles) - 1
    if np.isfinite(bad):
        np.testing.assert_array_equal(reach, np.float32([bad, 0, 0]))
    else:
        assert np.isinf(reach).all()
    force = k.read_gradient(g, mesh, s).numpy()
    assert np.isnan(force[0, 2, 1, 7]).all() and np.isnan(force).sum() == 3
    ds = k.paint_vjp(g, s, None, mesh)[0].numpy()
    assert np.isfinite(ds).all() and not ds[0, 2, 1, 7].any()
    dpotential, ds = k.read_gradient_vjp(g, mesh, s, tf.ones_like(s))
    assert np.isfinite(dpotential).all() and np.isnan(ds).sum() == 3


@needs_library
def test_same_bits_on_any_number_of_threads() -> None:
    """More threads than there are cores, in a process of its own, and this process's number."""
    code = (
        "import sys, tensorflow as tf\n"
        "from tests.particle_mesh import test_kernels\n"
        "from flowpm_dist.particle_mesh.kernels import Compiled\n"
        "tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))\n"
        "print(test_kernels.digest(Compiled()), test_kernels.digest(Compiled()))"
    )
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    # Not as ranks of this job.
    launcher = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "HOROVOD_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    env |= {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    own = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    more = str(own + 4)
    words = [sys.executable, "-c", code, more]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {digest(Compiled()), *done.stdout.split()} == {digest(Compiled())}


@needs_library
def test_wrong_shapes_are_refused() -> None:
    c, k = Case(), Compiled()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"s is \[2,4,8,35,3\], not \[2,4,8"):
        k.paint(c.g, c.s[:, :, :, 1:])
    with pytest.raises(tf.errors.InvalidArgumentError, match="dmesh is"):
        k.paint_vjp(c.g, c.s, None, c.mesh[:, 1:])
    with pytest.raises(tf.errors.InvalidArgumentError, match="factors is"):
        k.kick(c.g, c.mesh, c.s, c.s, c.factors[:, :1])


def test_lattices_without_whole_cells_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 8, 36\) particles, refined by 1.3, has no whole"):
        Lattice(PARTICLES, 1.3, (0, 0, 0), CELL)
