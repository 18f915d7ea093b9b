"""Files of particles on a light cone, over ranks and sessions."""

import numpy as np
import pytest
from ranks import SIZE, shared_folder
from sky_runs import solo

from flowpm_dist.io import read_light_cone
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.light_cone import NUMBERS, ROWS, LightConeFiles


class StopError(Exception):
    """A session ends."""


def add(files, *numbers):
    a = np.array(numbers, np.float32)
    places = np.stack([a, 10 * a, 100 * a], axis=-1)
    files.append(places, -places, a)


@pytest.mark.ranks(1, 2, 4)
def test_files_are_numbered_over_ranks_and_sessions(mesh, tmp_path_factory):
    """A rank without particles makes no file; a session on fewer ranks resumes; all are counted."""
    folder = shared_folder(tmp_path_factory) / "cone"
    with pytest.raises(StopError), LightConeFiles(folder, mesh) as files:
        files.describe({"z_max": 0.5})
        files.seal()
        assert files.sealed == 0
        if mesh.rank == SIZE - 1:
            add(files, 1.0)
        files.seal()
        assert files.sealed == 1
        add(files, 10.0 + mesh.rank)
        files.seal()
        assert files.sealed == 1 + SIZE
        add(files, 20.0 + mesh.rank)
        raise StopError
    mesh.barrier()
    names = [f"light_cone.{number}.hdf5" for number in range(1 + SIZE)]
    assert sorted(path.name for path in folder.iterdir()) == names
    with pytest.raises(UserError, match=r"no light_cone.json .* its particles are not complete"):
        read_light_cone(folder)
    mesh.barrier()
    if mesh.rank:
        return
    with LightConeFiles(folder, solo(), sealed=1) as files:
        files.describe({"z_max": 0.5})
        add(files, 2.0)
        add(files, 3.0, 4.0)
    assert sorted(path.name for path in folder.iterdir()) == [*names[:2], "light_cone.json"]
    found, about = read_light_cone(folder)
    assert about["z_max"] == 0.5
    np.testing.assert_array_equal(found["ScaleFactor"], [1, 2, 3, 4])
    np.testing.assert_array_equal(found["Velocities"][:, 1], [-10, -20, -30, -40])
    for name in names[:2]:
        assert (folder / name).stat().st_size < ROWS * NUMBERS * 4 + 2**14
    (folder / names[0]).unlink()
    with pytest.raises(UserError, match="of 2 files of a light cone, light_cone.0.hdf5 is missing"):
        read_light_cone(folder)
    with pytest.raises(UserError, match="there is none"):
        read_light_cone(folder.parent)
