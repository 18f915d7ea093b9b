"""Files of catalogues, and galaxies, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from catalogues import SIZE, about, assert_same, made
from ranks import shared_folder

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.occupation import populate
from flowpm_dist.catalogues.options import HOD
from flowpm_dist.grid.space import Space
from meshimpl.process_mesh import ProcessMesh

pytestmark = pytest.mark.ranks(2, 4)


def dealt(mesh: ProcessMesh) -> Catalogue:
    """The halos of one process, each on the rank in whose block it is."""
    halos = made(200, mesh=mesh)
    space = Space(SIZE, mesh)
    owner = space.to_owners(space.places(halos.position)).ranks
    mine = halos.of(owner == mesh.rank)
    part = Catalogue("halos", mine.columns, about(), mesh, 0, False, mine.members)
    return part.sorted()


@pytest.mark.parametrize("format", ["hdf5", "bigfile"])
def test_files_of_all_ranks(mesh, format, tmp_path_factory):
    mine, path = dealt(mesh), shared_folder(tmp_path_factory) / "halos"
    mine.write(path, format)
    again = Catalogue.read(path, mesh)
    assert_same(mine, again)
    assert_same(made(200, mesh=mesh), Catalogue.read(path, mesh).whole())
    mine.whole().write(path, format, overwrite=True)
    assert_same(mine, Catalogue.read(path, mesh))


def test_the_same_galaxies_on_any_mesh(mesh):
    mine, hod = dealt(mesh), HOD(log_M_min=11, log_M_0=10, log_M_1=11)
    galaxies = populate(mine, hod)
    assert np.isin(galaxies.host, mine.id).all()
    expected = populate(made(200, mesh=mesh), hod)
    assert expected.total > 300
    assert_same(expected, galaxies.whole())
