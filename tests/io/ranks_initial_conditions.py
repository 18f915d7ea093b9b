"""Initial conditions of other codes: each rank reads its part of the files."""

import numpy as np
import pytest
from foreign_snapshots import BOX, UNITS, A, gadget_binary, grafic, music, split
from ranks import SIZE, shared_folder

import flowpm_dist as fpm
from flowpm_dist.io import SnapshotError

N = 8
CELL = BOX / N
PLANCK = fpm.Cosmology(Omega_m=0.3, Omega_b=0.05, h=0.7, n_s=0.96, sigma8=0.8)


def by_rows(x, y, z):
    return (x * N + y) * N + z


def by_columns(x, y, z):
    return (z * N + y) * N + x + 1


def in_tiles(x, y, z):
    """As N-GenIC numbers a glass of 4^3 particles, which is a lattice by columns."""
    tile = (x // 4 * 2 + y // 4) * 2 + z // 4
    return 64 * tile + (z % 4 * 4 + y % 4) * 4 + x % 4 + 1


def universe(number, real):
    """Displacements and velocities by site, and the particles in an order of their own."""
    rng = np.random.default_rng(2)
    sites = np.stack(np.meshgrid(*[np.arange(N)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    moved, slow = rng.normal(size=(2, N**3, 3)).astype(real)
    each = {
        "position": np.mod(sites * CELL + moved, BOX).astype(real), "velocity": slow,
        "mass": np.ones(N**3, real), "id": number(*sites.T).astype("u8"),
    }  # fmt: skip
    order = rng.permutation(N**3)
    shape = (N, N, N, 3)
    return moved.reshape(shape), slow.reshape(shape), {k: v[order] for k, v in each.items()}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("number", [by_rows, by_columns, in_tiles])
def test_particles_in_binary_files_go_to_the_ranks_of_their_sites(mesh, tmp_path_factory, number):
    """From 5 files, one of which is empty and none of which is the part of a rank."""
    folder = shared_folder(tmp_path_factory)
    moved, slow, particles = universe(number, "f8")
    if mesh.rank == 0:
        parts = split({1: particles}, [100, 0, 250, 7, N**3 - 357])
        gadget_binary(folder / "ics", parts, order=">", named=True)
    mesh.barrier()
    state = fpm.State.from_snapshot(folder, mesh=mesh, cosmology=PLANCK, units=UNITS)
    assert (state.a, state.box.grid, state.box.size) == (A, (N,) * 3, (BOX,) * 3)
    place = state.box.place
    # The velocity in the file is over sqrt(a); canonical it is a times that in km/s / 100.
    canonical = slow * np.sqrt(A) * A / 100
    np.testing.assert_allclose(state.displacement.block, moved[place], rtol=0, atol=1e-13)
    np.testing.assert_allclose(state.velocity.block, canonical[place], rtol=1e-14)


@pytest.mark.ranks(2)
def test_all_ranks_refuse_particles_that_number_no_lattice(mesh, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    _, _, particles = universe(by_rows, "f4")
    particles["id"] = np.random.default_rng(5).permutation(particles["id"])
    if mesh.rank == 0:
        gadget_binary(folder / "ics", [{1: particles}])
    mesh.barrier()
    message = "number no lattice: it has ids from 0 to 511 of 512 .*fpm.read_particles reads"
    with pytest.raises(SnapshotError, match=message):
        fpm.State.from_snapshot(folder, mesh=mesh, cosmology=PLANCK, units=UNITS)


@pytest.mark.ranks(1, 2, 4)
def test_each_rank_reads_its_part_of_white_noise(mesh, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    noise = np.random.default_rng(3).normal(size=(N, N, N))
    if mesh.rank == 0:
        music(folder / "wnoise_0003.bin", noise)
        grafic(folder / "grafic", noise, "<u8")
    mesh.barrier()
    sim = fpm.Simulation(PLANCK, N, BOX, [0.1, 1.0], mesh=mesh)
    expected = sim.lpt(white_noise=noise, a=0.1)
    for name in ("wnoise_0003.bin", "grafic"):
        state = sim.lpt(white_noise=folder / name, a=0.1)
        np.testing.assert_array_equal(
            state.white_noise.block, noise[state.box.place].astype(np.float32)
        )
        np.testing.assert_array_equal(state.displacement.block, expected.displacement.block)
    assert mesh.size == SIZE
