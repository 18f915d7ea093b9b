"""Small light cones with gradients, along one axis or over the whole sky."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tensorflow as tf
from ranks import SIZE, by_rank_zero, solo

import flowpm_dist as fpm
from flowpm_dist.observables.lensing import SmailDistribution, SourcePlane

GRID, SIDE = 8, 160.0  # [Mpc/h]


def cosmology_of(Omega_m, sigma8, **more):
    return fpm.Cosmology(
        Omega_m=Omega_m, sigma8=sigma8, Omega_b=0.049, h=0.68, n_s=0.965, w0=-0.9, wa=0.1, **more
    )


def weights_of(kappa):
    return tf.constant(np.cos(np.arange(tf.size(kappa).numpy()).reshape(kappa.shape)))


@dataclass(frozen=True)
class SkyRuns:
    """Runs with a light cone, with two populations of sources.

    Attributes:
        cone: the light cone.
        edges: the steps.
        plane: the redshift of sources at one redshift.
        smail: the median scale and the last redshift of the others.
        shift: shift of the mean of the others.
        curvature: Omega_k.
        mass: sum of the masses of neutrinos [eV].
    """

    cone: object
    edges: tuple[float, ...]
    plane: float
    smail: tuple[float, float]
    shift: float
    curvature: float = 0.0
    mass: float = 0.0

    @property
    def numbers(self) -> dict[str, float]:
        numbers = {"Omega_m": 0.31, "sigma8": 0.8, "Omega_k": self.curvature, "shift": self.shift}
        return numbers | ({"m_nu": self.mass} if self.mass else {})

    def simulation(self, mesh, integrator="fastpm", **options):
        steps = np.array(self.edges)
        given = dict(grid=GRID, box_size=SIDE, steps=steps, precision="float64", halo=3)
        given |= {"mesh": mesh, "integrator": integrator, **options}
        return fpm.Simulation(given.pop("cosmology", fpm.Cosmology.planck18()), **given)

    def sources(self, shift=None):
        scale, last = self.smail
        shift = self.shift if shift is None else shift
        return [SourcePlane(self.plane), SmailDistribution(scale, shift=shift, z_max=last)]

    def kappa(self, sim, noise, **given):
        numbers = self.numbers | given
        sources = self.sources(numbers.pop("shift"))
        run = dict(white_noise=noise, cosmology=cosmology_of(**numbers, radiation=self.mass > 0))
        return self.cone.convergence(sim, sources, **run).kappa

    def with_gradients(self, sim, noise):
        """Returns the maps and the gradients of a loss to white noise and to the numbers."""
        tensors = {name: tf.constant(value, tf.float64) for name, value in self.numbers.items()}
        with tf.GradientTape() as tape:
            tape.watch([noise, *tensors.values()])
            kappa = self.kappa(sim, noise, **tensors)
            # Every rank has the whole map, and counts a share of the loss.
            loss = tf.reduce_sum(weights_of(kappa) * (kappa + 20 * kappa**2)) / sim.box.mesh.size
        to_noise, to_numbers = tape.gradient(loss, [noise, tensors], unconnected_gradients="zero")
        return kappa.numpy(), to_noise.numpy(), {name: float(g) for name, g in to_numbers.items()}

    def slope(self, sim, noise, direction=0.0, **steps) -> float:
        """Returns the difference of that loss on one rank along a wave of the noise, or numbers."""
        h = 1e-6

        def at(h):
            moved = {k: v + h * steps.get(k, 0.0) for k, v in self.numbers.items()}
            map_ = self.kappa(sim, noise + h * direction * tf.sin(5 * noise), **moved)
            return float(tf.reduce_sum(weights_of(map_) * (map_ + 20 * map_**2)))

        return (at(h) - at(-h)) / (2 * h)

    def check_gradients(self, mesh, integrator, differences: Callable[[str], bool], **options):
        """Check maps and gradients of a mesh against one rank's, and these against differences.

        Args:
            mesh: the run's mesh.
            integrator: its name.
            differences: whether to check a number's gradient, or that "along" the noise, on a
                single rank.
            **options: of the simulation.
        """
        sim = self.simulation(mesh, integrator, **options)
        noise = sim.lpt(seed=3).white_noise.block
        kappa, to_noise, to_numbers = self.with_gradients(sim, noise)

        def alone():
            if SIZE == 1:
                return {"kappa": kappa, "gradient": to_noise} | to_numbers
            line = self.simulation(solo(), integrator, **options)
            field = line.lpt(seed=3).white_noise.block
            maps, gradient, numbers = self.with_gradients(line, field)
            return {"kappa": maps, "gradient": gradient} | numbers

        if SIZE == 1:
            found = to_numbers | {"along": float(tf.reduce_sum(to_noise * tf.sin(5 * noise)))}
            for name in filter(differences, found):
                # Maps hardly depend on a mass: a small step would show rounding.
                size, rel = (100.0, 2e-5) if name == "m_nu" else (1.0, 1e-6)
                step = {"direction": 1.0} if name == "along" else {name: size}
                slope = self.slope(sim, noise, **step) / size
                near = pytest.approx(slope, rel=rel)
                assert found[name] == near, f"{name}: {found[name]} and {slope}"
        names = [type(getattr(self.cone, "sky", self.cone)).__name__, integrator, *options]
        names += ["massive"] if self.mass else []
        known = by_rank_zero("-".join(names), alone)
        np.testing.assert_allclose(kappa, known["kappa"], atol=1e-12 * np.abs(known["kappa"]).max())
        size = np.abs(known["gradient"]).max()
        np.testing.assert_allclose(to_noise, known["gradient"][sim.box.place], atol=1e-10 * size)
        for name, gradient in to_numbers.items():
            assert gradient == pytest.approx(float(known[name]), rel=1e-9), name
        return kappa, to_noise, to_numbers


def wavenumbers(grid, side):
    """kx, ky and kz [h/Mpc] of a real field's transform, and the square, without 0."""
    along = 2 * np.pi * np.fft.fftfreq(grid, side / grid)
    waves = np.meshgrid(along, along, along[: grid // 2 + 1], indexing="ij")
    square = sum(k**2 for k in waves)
    square[0, 0, 0] = 1.0
    return [np.where(np.abs(k) == np.abs(along).max(), 0.0, k) for k in waves], square


def matter(grid, side, seed):
    """A periodic overdensity [x, y, z] that is smooth on the scale of cells."""
    noise = np.fft.rfftn(np.random.default_rng(seed).normal(size=[grid] * 3))
    _, square = wavenumbers(grid, side)
    noise *= square**-0.4 * np.exp(-0.5 * square * (1.2 * side / grid) ** 2)
    noise[0, 0, 0] = 0.0
    delta = np.fft.irfftn(noise, [grid] * 3, (0, 1, 2))
    return delta / delta.std()


def linear_response(cone, sim, delta, width):
    """The planes of particles that a small overdensity has displaced, by that overdensity."""
    size, side = 1e-3, sim.box.size[0]
    waves, square = wavenumbers(delta.shape[0], side)
    modes = np.fft.rfftn(delta)
    moved = np.stack(
        [np.fft.irfftn(1j * k / square * modes, delta.shape, (0, 1, 2)) for k in waves], axis=-1
    )

    def observed(sign):
        def observer(inputs):
            painter = cone.planes_observer(width)(inputs)
            measure, own = painter.measure, tf.constant(sign * size * moved)[sim.box.place]
            still = dict(displacement=own, after=tf.zeros_like(own))
            painter.measure = lambda crossing, moment, given: measure(
                crossing, replace(moment, **still), given
            )
            return painter

        return observer

    plus, minus = (sim.run(seed=1, observe=observed(sign))[1] for sign in (1.0, -1.0))
    return (plus.delta - minus.delta).numpy() / (2 * size), plus.planes.edges.numpy()
