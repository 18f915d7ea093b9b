"""From white noise to what is observed: structure formation, redshift space, bias."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import tensorflow as tf

from flowpm_dist.cosmology.parameters import Cosmology
from flowpm_dist.evolution.nbody import HaloError
from flowpm_dist.grid.box import Box
from flowpm_dist.grid.field import Field
from flowpm_dist.grid.fourier import cic_window, to_spectrum
from flowpm_dist.initial.lpt_sources import SequentialFFT, second_order_source
from flowpm_dist.simulation.simulation import Simulation
from flowpm_dist.simulation.state import State
from meshimpl.compat import mtf
from meshimpl.mesh_function import MeshFunction, replicated

STRUCTURES = ("linear", "1lpt", "2lpt", "pm")
"""What forms structure, by cost: linear theory on the grid, LPT, the particle mesh."""

LAGRANGIAN = ("b1", "b2", "bs2")
EULERIAN = ("b",)
BIASES = (*EULERIAN, *LAGRANGIAN)

Parameters = Mapping[str, tf.Tensor]


class ForwardModel:
    """The density that white noise becomes, or that of its tracers, mean 1; differentiable.

    Bias, where there is any, is either linear in the density that has formed (Eulerian),

        1 + b (rho - 1),

    or of second order in the linear overdensity delta at the particles' origins, at the final
    scale factor (Lagrangian; Matsubara 2008, Modi, Castorina and Seljak 2017),

        particles of weight 1 + b1 delta + b2 (delta^2 - <delta^2>) + bs2 (s^2 - <s^2>),

    s_ij = (d_i d_j / laplacian - delta_ij / 3) delta, on the grid as it is: of b2 and bs2 only fits
    on the same grid can be compared.

    Args:
        simulation: box, steps, LPT order, and the cosmology unless parameters say otherwise. For
            "1lpt" and "2lpt" its `lpt_order` must be 1 and 2; "linear" and LPT make no step, and
            give the universe at the last of the steps.
        structure: one of `STRUCTURES`.
        redshift_space: the line of sight "x", "y" or "z", or None.
        bias: name -> value: "b", or some of "b1", "b2", "bs2"; empty for matter. A value stands
            unless `parameters` have another.

    Raises:
        ValueError: choices that do not fit each other.
    """

    def __init__(
        self,
        simulation: Simulation,
        structure: Literal["linear", "1lpt", "2lpt", "pm"] = "pm",
        *,
        redshift_space: Literal["x", "y", "z"] | None = None,
        bias: Mapping[str, float] | None = None,
    ) -> None:
        if structure not in STRUCTURES:
            raise ValueError(
                f"structure {structure!r} is not one of {', '.join(map(repr, STRUCTURES))}"
            )
        order = simulation.options.lpt_order
        if structure in ("1lpt", "2lpt") and order != int(structure[0]):
            raise ValueError(f"{structure} needs a simulation of lpt_order {structure[0]}")
        self.bias = dict(bias or {})
        unknown = [name for name in self.bias if name not in BIASES]
        if unknown or ("b" in self.bias and len(self.bias) > 1):
            raise ValueError(f"bias {', '.join(self.bias)}: either b, or some of b1, b2, bs2")
        if structure == "linear" and (redshift_space or self._lagrangian):
            raise ValueError(
                "linear theory on the grid moves no particles: neither redshift space nor "
                "Lagrangian bias goes with it"
            )
        self.simulation, self.structure = simulation, structure
        self.axis = redshift_space

    @property
    def _lagrangian(self) -> bool:
        return any(name in LAGRANGIAN for name in self.bias)

    def fitted(self, name: str) -> bool:
        """Whether the model depends on a parameter of this name."""
        return name in self.bias or name in self.simulation.cosmology.names

    def run(self, noise: tf.Tensor, parameters: Parameters) -> State:
        """The universe, without bias; for linear theory that of LPT.

        Args:
            noise: this rank's block [..., x, y, z].
            parameters: of cosmology and bias, float64 [...] of all chains.

        Raises:
            HaloError: a particle left the halo, on every rank.
        """
        cosmology = self._cosmology(parameters)
        make = self.simulation.run if self.structure == "pm" else self.simulation.lpt
        return make(white_noise=Field(noise, self._box_of(noise)), cosmology=cosmology)

    def _box_of(self, noise: tf.Tensor) -> Box:
        """Of one universe, or of all chains of which this is the rank's block."""
        if noise.shape.rank == 3:
            return self.simulation.box
        replicas = self.box.mesh.axis_size("replica")
        return self.simulation.box_of(noise.shape[0] * replicas)

    def _cosmology(self, parameters: Parameters) -> Cosmology | list[Cosmology] | None:
        own = self.simulation.cosmology
        chosen = {name: x for name, x in parameters.items() if name in own.names}
        if not chosen:
            return None
        if next(iter(chosen.values())).shape.rank == 0:
            return own.replace(**chosen)
        rows = zip(*(tf.unstack(x) for x in chosen.values()), strict=True)
        return [own.replace(**dict(zip(chosen, row, strict=True))) for row in rows]

    def observe(self, state: State, parameters: Parameters) -> tf.Tensor:
        """What is seen of a universe: this rank's block of a density [..., x, y, z], mean 1."""
        mesh = state.box.mesh
        values = {
            name: replicated(mesh, tf.cast(parameters.get(name, value), tf.float64))
            for name, value in self.bias.items()
        }
        if self.structure == "linear":
            delta = state.linear_delta.block
            contrast = delta * _factor(state.linear_growth, state.box)
        else:
            weights = self._weights(state, values) if self._lagrangian else None
            density = state.density(redshift_space=self.axis, weights=weights)
            contrast = density.block - 1
        if "b" in values:
            contrast = _of_these(values["b"], state.box) * contrast
        return 1 + contrast

    def __call__(self, noise: tf.Tensor, parameters: Parameters) -> tf.Tensor:
        """`observe` what `run` makes."""
        return self.observe(self.run(noise, parameters), parameters)

    def _weights(self, state: State, values: dict[str, tf.Tensor]) -> tf.Tensor:
        box = state.box
        delta = state.linear_delta.block * _factor(state.linear_growth, box)
        zero = tf.zeros(box.number_shape.to_integer_list, tf.float64)
        rows = [_of_these(values.get(name, zero), box) for name in LAGRANGIAN]
        factors = tf.stack([tf.reshape(row, box.local_batch) for row in rows], axis=-1)
        return self._expansion(box)(delta, factors)

    def _expansion(self, box: Box) -> MeshFunction:
        if box.batch not in self._expansions:
            self._expansions[box.batch] = bias_expansion(box)
        return self._expansions[box.batch]

    @functools.cached_property
    def _expansions(self) -> dict[int | None, MeshFunction]:
        return {}

    def linear_response(self, parameters: Parameters) -> tf.Tensor:
        """Modes of the observed density over those of the noise, in linear theory; differentiable.

        b D sqrt(P / V_cell), and the cloud-in-cell window where there are particles; without what
        redshift space adds.

        Args:
            parameters: float64 [...] of all chains.

        Returns:
            Of this rank's modes [kz, ky, kx], or of its chains, too, where parameters have them.
        """
        chains = next((x.shape[0] for x in parameters.values() if x.shape.rank), None)
        cosmology = self._cosmology(parameters)
        response = self.simulation.linear_amplitude(cosmology)
        box = self.box if chains is None else self.simulation.box_of(chains)
        name = "b" if "b" in self.bias else "b1"
        if name in self.bias:
            values = parameters.get(name, self.bias[name])
            shared = replicated(box.mesh, tf.cast(values, tf.float64))
            factor = _of_these(shared, box) if shared.shape.rank else _factor(shared, box)
            response = response * (factor if name == "b" else 1 + factor)
        if self.structure == "linear":
            return response
        kx, ky, kz = (tf.constant(k, box.dtype) for k in box.wavenumbers())
        return response * cic_window(kx, ky, kz, box)

    @property
    def box(self) -> Box:
        """Of one universe, or of one for each replica."""
        return self.simulation.box_of_replicas

    def with_room(self, attempt: Callable[[], Any]) -> Any:
        """What an attempt gives; where a particle leaves the halo, again with a halo that would do.

        A halo that was given, not "auto", stays as it is.
        """
        while True:
            try:
                return attempt()
            except HaloError as error:
                if not self._may_grow:
                    raise
                self.simulation.halo = error.needed

    def hold_halo(self, seed: int = 0) -> None:
        """Fix an automatic halo at that of a universe of the prior.

        Else it would follow the field while it is sought, and functions be compiled for each width.
        """
        if self.structure == "pm" and self.simulation.halo == "auto":
            self._may_grow = True
            batch = self.simulation.box_of_replicas.batch
            seeds = seed if batch is None else [seed] * batch
            self.simulation.halo = self.simulation.lpt(seed=seeds).halo

    _may_grow = False


def bias_expansion(box: Box) -> MeshFunction:
    """`f(delta, factors)`: the particles' weights of the Lagrangian bias expansion [..., x, y, z].

    Args of f:
        delta: linear overdensity [..., x, y, z].
        factors: b1, b2 and bs2, [..., 3].
    """
    names = mtf.Dimension("bias", len(LAGRANGIAN))

    def build(_: Any, delta: Any, factors: Any) -> Any:
        b1, b2, bs2 = mtf.unstack(factors, names)
        square = mtf.square(delta)
        # sum_ij phi_ij^2 = delta^2 - 2 sum_{i<j} (phi_ii phi_jj - phi_ij^2), less delta^2 / 3
        _, minors = second_order_source(to_spectrum(delta), delta, SequentialFFT(box))
        tide = square * (2 / 3) - 2 * minors
        return 1 + b1 * delta + b2 * _centred(square, box) + bs2 * _centred(tide, box)

    return box.function(build, delta=box.shape, factors=mtf.Shape([*box.number_shape.dims, names]))


def _centred(x: Any, box: Box) -> Any:
    return x - mtf.reduce_mean(x, output_shape=box.number_shape)


def _of_these(values: tf.Tensor, box: Box) -> tf.Tensor:
    """Of a number for each chain those of this rank, in the box's dtype, [..., 1, 1, 1]."""
    if box.batch is not None:
        values = tf.broadcast_to(values, [box.batch])
        values = values[box.batch_offset : box.batch_offset + box.local_batch[0]]
    return _factor(values, box)


def _factor(values: tf.Tensor, box: Box) -> tf.Tensor:
    """A number for each chain of this rank as a factor of fields."""
    return tf.cast(values, box.dtype)[..., tf.newaxis, tf.newaxis, tf.newaxis]
