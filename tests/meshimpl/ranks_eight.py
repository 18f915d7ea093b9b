"""Eight ranks, in pencils with more rows than columns and with three axes, against one rank.

On 2 x 2 ranks a row taken for a column goes unseen, and so does a sum over the wrong plane where a
mesh has only two axes.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from mesh_groups import groups_of
from ranks import SIZE, by_rank_zero, process_mesh, shapes_of
from reference import relative_rms

import flowpm_dist as fpm
from flowpm_dist.grid.decomposition import default_mesh
from meshimpl import MeshError, ProcessMesh
from meshimpl.compat import mtf
from meshimpl.mesh_function import mesh_function
from meshimpl.operations.fft import irfft3d, rfft3d
from meshimpl.operations.halo import halo_exchange
from tests.meshimpl.ranks_halo import padded_block

pytestmark = [pytest.mark.ranks(8), pytest.mark.timeout(240, method="thread")]
PENCILS, THREE_AXES = shapes_of("any_mesh") if SIZE == 8 else ("", "")
ODD = "row:1,col:3"
GRID = (16, 12, 10)
NOISE = np.random.default_rng(2).normal(size=(2, *GRID))


def test_every_line_and_plane(any_mesh: ProcessMesh) -> None:
    """Also the planes that have no process set of their own."""
    for names, groups in groups_of(any_mesh).items():
        group = any_mesh.communicator(*names)
        assert group.ranks in groups
        for reduction, expected in (("sum", sum), ("max", max), ("mean", np.mean)):
            found = group.allreduce(tf.constant(float(any_mesh.rank)), reduction).numpy()
            assert found == expected(group.ranks)


def test_three_axes_are_cut_along_the_first() -> None:
    mesh = process_mesh(THREE_AXES)
    assert mesh.without("replica").axes == (("row", 2), ("col", 2))
    for axis in ("row", "col"):
        with pytest.raises(MeshError, match=f"name '{axis}' first in the mesh"):
            mesh.without(axis)


def test_fft_and_halos(any_mesh: ProcessMesh) -> None:
    """Of sides that do not divide alike, and an odd one; the halo reaches beyond a neighbour."""
    mesh = any_mesh
    grid, widths = (8, 6, 5), {"x": (3, 1), "y": 2}
    shape = mtf.Shape([mtf.Dimension(n, s) for n, s in zip("xyz", grid, strict=True)])

    @mesh_function(mesh, "x:row;x_halo:row;ky:row;y:col;y_halo:col;kz:col", a=(shape, tf.float64))
    def function(_: Any, a: Any) -> Any:
        spectrum = rfft3d(a)
        return spectrum, irfft3d(spectrum, shape), halo_exchange(a, widths)

    whole = np.random.default_rng(1).normal(size=grid)
    spectrum, back, padded = function(whole)
    pairs = function.gather(spectrum)[:3, :6]
    expected = np.swapaxes(np.fft.rfftn(whole), 0, 2)
    np.testing.assert_allclose(pairs[..., 0] + 1j * pairs[..., 1], expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(function.gather(back, 1), whole, rtol=0, atol=1e-14)
    begin, block = function.impl.slice_begin(shape, mesh.rank), function.impl.slice_shape(shape)
    np.testing.assert_array_equal(padded, padded_block(whole, widths, "periodic", begin, block))


def results(mesh: ProcessMesh, whole: np.ndarray) -> dict[str, np.ndarray]:
    """Density of a run, and the gradient of the sum of its squares to the white noise."""
    sim = _simulation(mesh)
    box = sim.box_of(len(whole) if whole.ndim == 4 else None)
    noise = fpm.Field(tf.constant(whole[box.place]), box)
    with tf.GradientTape() as tape:
        tape.watch(noise.block)
        density = sim.run(white_noise=noise).density()
        part = tf.reduce_sum(density.block**2)
    gradient = fpm.Field(tape.gradient(part, noise.block), box)
    return {"density": density.numpy(), "gradient": gradient.numpy()}


@functools.cache
def _simulation(mesh: ProcessMesh) -> fpm.Simulation:
    options = {"grid": GRID, "box_size": [2.0 * n for n in GRID], "steps": [0.2, 0.5, 1.0]}
    options |= {"precision": "float64", "halo": 6, "lpt_order": 1}
    return fpm.Simulation(fpm.Cosmology.planck18(), mesh=mesh, **options)


def one_rank() -> dict[str, np.ndarray]:
    """The results of each universe."""
    alone = process_mesh(f"row:{SIZE}").without("row")
    each = [results(alone, whole) for whole in NOISE]
    return {name: np.stack([found[name] for found in each]) for name in each[0]}


@pytest.mark.parametrize(
    "shape",
    [PENCILS, THREE_AXES, pytest.param(ODD, marks=pytest.mark.ranks(3))],
    ids=["pencils", "three axes", "odd"],
)
def test_a_run_and_its_gradient_are_one_ranks(shape: str) -> None:
    """To float64 rounding, amplified by the run; on three axes, a universe on each replica."""
    batched = shape == THREE_AXES
    assert shape != ODD or shape == default_mesh(SIZE, GRID)
    expected = by_rank_zero("alone", one_rank)
    for name, found in results(process_mesh(shape), NOISE if batched else NOISE[0]).items():
        assert relative_rms(found, expected[name][... if batched else 0]) < 1e-10, name
