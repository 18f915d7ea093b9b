"""Runs resumed from a checkpoint, on the same ranks and on others."""

import dataclasses

import numpy as np
import pytest
from ranks import OTHER_SPLITS, SHAPES, SIZE, process_mesh, shared_folder

import flowpm_dist as fpm
from flowpm_dist.evolution.corrections import ResidualNetwork
from flowpm_dist.evolution.plan import MidRun, Particles
from flowpm_dist.grid.field import Field
from flowpm_dist.io.light_cone import LightConeFiles, read_light_cone
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.session import CheckpointError, FieldCheckpoints
from flowpm_dist.observables.lensing import SourcePlane
from flowpm_dist.observables.light_cone import FlatField, LightCone

STEPS = [0.1, 0.3, 0.5, 0.8, 1.0]
NETWORK = ResidualNetwork.begun(1)
NETWORK = NETWORK.with_theta(NETWORK.theta + 0.03 * np.cos(np.arange(NETWORK.theta.size)))
NAMES = ("displacement", "velocity")


def simulation(mesh, integrator, correction=None):
    options = {"precision": "float64", "integrator": integrator, "correction": correction}
    return fpm.Simulation(
        fpm.Cosmology.planck18(), 8, 32.0, STEPS, mesh=process_mesh(mesh), **options
    )


@pytest.mark.parametrize(
    "integrator", ["fastpm", pytest.param("cola", marks=pytest.mark.ranks(1, 4))]
)
def test_a_run_goes_on_to_the_bit_and_elsewhere_to_rounding(tmp_path_factory, integrator):
    """From after the second step, of which the integrator's own velocity is kept."""
    shape, folder = SHAPES[SIZE][-1], shared_folder(tmp_path_factory)
    sim = simulation(shape, integrator)
    files = FieldCheckpoints(CheckpointStore(folder, "step"), sim.box, keep=1)

    def save(here):
        fields = {name: Field(getattr(here.particles, name), sim.box) for name in NAMES}
        about = {"done": here.done, "step": here.step, "a": here.a, "halo": here.halo}
        if here.step < 3:
            files.save(here.step, fields, {"mid": about})

    whole = sim.run(seed=3, after_step=save)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002.zarr"]

    def restored(box):
        held = FieldCheckpoints(CheckpointStore(folder, "step"), box, keep=1)
        path, about = held.latest()
        particles = Particles(*(held.block(path, name) for name in NAMES))
        return MidRun(particles=particles, **about["mid"])

    seen = []
    again = sim.run(seed=3, resume=restored, progress=lambda step, *_: seen.append(step))
    assert seen == [3, 4]
    assert again.halo == whole.halo
    for name in NAMES:
        np.testing.assert_array_equal(getattr(again, name).block, getattr(whole, name).block)
    for other in OTHER_SPLITS.get(SIZE, []):
        moved = simulation(other, integrator).run(seed=3, resume=restored)
        for name in NAMES:
            found, expected = getattr(moved, name).numpy(), getattr(whole, name).numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * abs(expected).max())
    with pytest.raises(CheckpointError, match="is of grid .8, 8, 8.; here it is .16, 16, 16."):
        finer = fpm.Box((16, 16, 16), (32.0,) * 3, sim.box.mesh)
        FieldCheckpoints(CheckpointStore(folder, "step"), finer, keep=1).latest()


def sorted_particles(folder):
    """The rows of a light cone, in an order that depends on no file."""
    rows = np.column_stack(list(read_light_cone(folder)[0].values()))
    return rows[np.lexsort(np.round(rows, 6).T)]


@pytest.mark.parametrize(
    ("correction", "z_max", "after"), [(None, 0.9, 3), (NETWORK, 2.0, 2)], ids=["plain", "network"]
)
def test_a_light_cone_goes_on_here_and_elsewhere(correction, z_max, after, tmp_path_factory):
    """Its maps are those of the whole run, of one observer and of another beside it, and go on in
    a checkpoint, as its particles do in files; they are as the universe is on any mesh. A network
    acts once for the kicks of steps 2 and 3, and the run is stopped between these."""
    shape, folder = SHAPES[SIZE][-1], shared_folder(tmp_path_factory)
    sim = simulation(shape, "fastpm", correction)
    cone = LightCone(FlatField(field_of_view=0.45, pixels=6, z_max=z_max))
    maps_of = [cone.convergence_observer([SourcePlane(0.85 * z_max)]), cone.planes_observer(400.0)]
    files = FieldCheckpoints(CheckpointStore(folder, "step"), sim.box, keep=1)
    kept, counts = folder / "particles", {}

    def observers(particles):
        return [*maps_of, cone.particles_observer(particles)]

    def save(here):
        if here.step == after:
            fields = {name: Field(getattr(here.particles, name), sim.box) for name in NAMES}
            about = {"done": here.done, "step": here.step, "a": here.a, "halo": here.halo}
            maps = {name: values.numpy() for name, values in here.measured().items()}
            assert all(
                values.any() for values in maps.values()
            )  # z < 0.9 at a > 0.53, z < 2 at 0.33
            particles.seal()
            counts["sealed"] = particles.sealed
            files.save(here.step, fields, {"mid": about, "maps": list(maps)}, maps=maps)

    with LightConeFiles(kept, sim.box.mesh) as particles:
        _, found = sim.run(seed=3, observe=observers(particles), after_step=save)
    known = sorted_particles(kept)
    assert 0 < counts["sealed"] < particles.sealed <= 2 * SIZE
    kappa, delta = found[0].kappa, found[1].delta
    np.testing.assert_allclose(
        kappa, cone.convergence(sim, [SourcePlane(0.85 * z_max)], 3).kappa, rtol=1e-9
    )
    np.testing.assert_allclose(delta, cone.planes(sim, 400.0, 3).delta, atol=1e-9)

    def restored(box):
        held = FieldCheckpoints(CheckpointStore(folder, "step"), box, keep=1)
        path, about = held.latest()
        particles = Particles(*(held.block(path, name) for name in NAMES))
        maps = {name: held.whole(path, name) for name in about["maps"]}
        return MidRun(particles=particles, measured=lambda: maps, **about["mid"])

    for other in (shape, *OTHER_SPLITS.get(SIZE, [])):
        going_on = simulation(other, "fastpm", correction)
        # A session wrote more files after the checkpoint than this one will.
        (kept / f"light_cone.{particles.sealed + 3}.hdf5").touch()
        sim.box.mesh.barrier()
        with LightConeFiles(kept, going_on.box.mesh, counts["sealed"]) as particles:
            assert len(list(kept.iterdir())) == counts["sealed"]
            sim.box.mesh.barrier()
            _, again = going_on.run(seed=3, observe=observers(particles), resume=restored)
        np.testing.assert_allclose(sorted_particles(kept), known, atol=1e-9)
        np.testing.assert_allclose(again[0].kappa, kappa, atol=1e-12 * abs(kappa.numpy()).max())
        np.testing.assert_allclose(again[1].delta, delta, atol=1e-12 * abs(delta.numpy()).max())
    with pytest.raises(ValueError, match="can be resumed only if a checkpoint stores its maps"):
        sim.run(
            seed=3,
            observe=maps_of,
            resume=lambda box: dataclasses.replace(restored(box), measured=dict),
        )
