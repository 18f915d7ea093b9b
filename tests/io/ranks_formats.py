"""Snapshots for other codes, of which each rank writes a part of its own."""

import h5py
import numpy as np
import pytest
from ranks import SIZE, shared_folder
from reading import block_of

import flowpm_dist as fpm
from flowpm_dist.io import SnapshotError
from flowpm_dist.io.files import snapshot_attributes

N, LENGTH, A = 8, 32.0, 0.5
CELLS = LENGTH / N


@pytest.mark.dealt(4)
@pytest.mark.ranks(1, 2, 4)
def test_all_ranks_together_write_the_same_particles(mesh, tmp_path_factory):
    """By id: the positions in the box, and the peculiar velocities; a file of each rank."""
    folder = shared_folder(tmp_path_factory)
    sim = fpm.Simulation(
        fpm.Cosmology.planck18(), N, LENGTH, [A, 1.0], mesh=mesh, precision="float64"
    )
    state = sim.lpt(seed=2, a=A)
    sites = np.stack(np.meshgrid(*[np.arange(N)] * 3, indexing="ij"), axis=-1)
    positions = np.mod(CELLS * sites + state.displacement.numpy(), LENGTH).reshape(-1, 3)
    peculiar = 100 * state.velocity.numpy().reshape(-1, 3) / A
    files = state.save(folder, format="gadget-hdf5")
    paths = sorted(files.glob("snapshot*.hdf5"))
    assert len(paths) == SIZE
    found = []
    for path in paths:
        with h5py.File(path) as file:
            header, group = file["Header"].attrs, file["PartType1"]
            assert header["NumFilesPerSnapshot"] == SIZE
            assert header["NumPart_ThisFile"][1] * SIZE == header["NumPart_Total"][1] == N**3
            names = ("ParticleIDs", "Coordinates", "Velocities")
            found.append([group[name][...] for name in names])
    ids, x, v = (np.concatenate(part) for part in zip(*found, strict=True))
    assert sorted(ids) == list(range(N**3))
    np.testing.assert_allclose(x, positions[ids], rtol=0, atol=1e-12)
    np.testing.assert_allclose(v * np.sqrt(A), peculiar[ids], rtol=1e-13)
    files = state.save(folder, format="bigfile")
    ids = block_of(files / "1/ID")[:, 0]
    assert sorted(ids) == list(range(N**3))
    np.testing.assert_allclose(block_of(files / "1/Position"), positions[ids], atol=1e-12)
    np.testing.assert_allclose(block_of(files / "1/Velocity"), peculiar[ids], rtol=1e-13)
    assert len(list((files / "1/ID").glob("00000?"))) == SIZE
    assert snapshot_attributes(files)["complete"]
    for path in (folder / "snapshot.gadget", files):  # each rank reads a part, and sends it on
        again = fpm.State.from_snapshot(path, mesh=mesh)
        for name in ("displacement", "velocity"):
            found, expected = (getattr(each, name).block for each in (again, state))
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(FileExistsError, match="snapshot.bigfile exists"):
        state.save(folder, format="bigfile")
    if mesh.rank == 0:  # as another code leaves it
        (files / "flowpm-dist.json").unlink()
    mesh.barrier()
    with pytest.raises(SnapshotError, match="give cosmology="):
        fpm.State.from_snapshot(files, mesh=mesh)
    theirs = fpm.State.from_snapshot(files, mesh=mesh, cosmology=fpm.Cosmology.planck18())
    np.testing.assert_array_equal(theirs.velocity.block, again.velocity.block)
