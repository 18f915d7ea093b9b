"""A folder that some hosts do not see is found on all ranks, before anything is written."""

import socket
from pathlib import Path

import pytest
from ranks import shared_folder

import flowpm_dist.jobs.session as sharing
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.session import NOT_VISIBLE, VISIBLE, check_shared, visibility
from meshimpl import ProcessMesh, launch

pytestmark = pytest.mark.ranks(2)


@pytest.fixture
def folder(tmp_path_factory):
    """One that both ranks have."""
    return shared_folder(tmp_path_factory)


@pytest.fixture
def elsewhere(monkeypatch):
    """Ranks that are alone on their host; what a rank looks for never appears on rank 1."""
    here = launch.detect()
    alone = launch.RankEnvironment(here.rank, here.size, 0, 1, here.launcher)
    monkeypatch.setattr(launch, "detect", lambda environment=None: alone)
    monkeypatch.setattr(socket, "gethostname", lambda: f"node{here.rank}")
    appears = sharing._appears

    def own(path: Path) -> bool:
        return appears(path) if here.rank == 0 else False

    return lambda: monkeypatch.setattr(sharing, "_appears", own)


def test_a_folder_that_all_see(elsewhere, folder):
    mesh = ProcessMesh("row:2")
    below = folder / "not" / "there" / "yet"
    assert visibility(below, mesh) == [("node0", VISIBLE), ("node1", VISIBLE)]
    check_shared(below, mesh)
    mesh.barrier()
    assert not list(folder.iterdir())


def test_a_folder_that_one_host_has_for_itself(elsewhere, folder):
    elsewhere()
    mesh = ProcessMesh("row:2")
    assert visibility(folder, mesh) == [("node0", VISIBLE), ("node1", NOT_VISIBLE)]
    said = "not the same folder on all hosts: node1 does not see what node0 writes there"
    with pytest.raises(OutputError, match=said):
        check_shared(folder, mesh)
