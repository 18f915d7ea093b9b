"""The grid of ranks: places, groups, and errors that come on every rank and leave none waiting."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from mesh_groups import groups_of
from ranks import RANK, SIZE, process_mesh

from meshimpl import CollectiveError, MeshError, ProcessMesh, engine, initialise, launch, rendezvous
from meshimpl import process_mesh as process_mesh_module
from meshimpl.compat import mtf
from meshimpl.hvd_simd_mesh_impl import HvdSimdMeshImpl
from meshimpl.mesh_function import MeshFunction
from meshimpl.mesh_shape import lines_of, parse_mesh_shape

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.grappler]


@pytest.mark.ranks(2)
def test_ranks_with_one_gpu_are_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees one GPU, as under a scheduler, and cannot know whose it is."""
    check = rendezvous.check_gpus.__wrapped__
    ranks, gpus = tuple(range(SIZE)), [SimpleNamespace(name="/physical_device:GPU:0")]
    check(ranks)  # without GPUs
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    mine = process_mesh(f"row:{SIZE}").rank
    monkeypatch.setattr(launch, "gpu_identity", lambda index: bytes([mine + 1] * 16))
    check(ranks)
    monkeypatch.setattr(launch, "gpu_identity", lambda index: bytes([7] * 16))
    with pytest.raises(launch.LaunchError, match="ranks 0, 1 have the same GPU"):
        check(ranks)


def test_places(any_mesh: ProcessMesh) -> None:
    mesh = any_mesh
    assert mesh.size == SIZE == np.prod(mesh.shape)
    numbers = np.arange(SIZE).reshape(mesh.shape)
    assert numbers[mesh.coordinates] == mesh.rank
    for axis, name in enumerate(mesh.names):
        assert mesh.axis_size(name) == mesh.shape[axis]
        assert mesh.coordinate(name) == mesh.coordinates[axis]
        place = list(mesh.coordinates)
        place[axis] = slice(None)
        assert mesh.communicator(name).ranks == tuple(numbers[tuple(place)])
    assert mesh.axis_size("nowhere") == 1 and mesh.coordinate("nowhere") == 0
    assert str(mesh) == ",".join(f"{n}:{s}" for n, s in zip(mesh.names, mesh.shape, strict=True))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("shape", "sets", "of_a_rank"),
    [
        ("row:2", 1, 1),
        ("row:4,col:2", 4 + 2 + 1, 3),
        ("row:3,col:5", 3 + 5 + 1, 3),
        ("replica:1,row:4,col:2", 4 + 2 + 1, 3),
        ("replica:256,row:2,col:2", 4 + 512 + 512 + 256 + 1, 5),
        ("replica:16,row:8,col:8", 64 + 128 + 128 + 16 + 1, 5),
    ],
)
def test_number_of_process_sets(shape: str, sets: int, of_a_rank: int) -> None:
    """Lines, replicas, the world: a rank negotiates in each of its sets in every cycle."""
    axes = parse_mesh_shape(shape)
    size = math.prod(n for _, n in axes)
    kinds = lines_of(axes)
    assert len(kinds) == of_a_rank
    groups = [group for lines in kinds for group in lines.groups(size)]
    assert len(groups) == len(set(groups)) == sets
    for lines in kinds:  # each rank is in one of each kind
        assert sorted(rank for group in lines.groups(size) for rank in group) == [*range(size)]
        assert all(lines.of(rank) == group for group in lines.groups(size) for rank in group)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("others", [True, False])
def test_what_a_rank_registers(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own groups, if the engine lets it; else those of all ranks, the same on each."""
    process_sets = pytest.importorskip("horovod.common.process_sets")
    if others:
        monkeypatch.delattr(process_sets, "RANKS_REGISTER_THEIR_OWN", raising=False)
    else:
        monkeypatch.setattr(process_sets, "RANKS_REGISTER_THEIR_OWN", True, raising=False)
    lines = lines_of(parse_mesh_shape("replica:64,row:2,col:2"))
    found = engine.HorovodEngine()
    if others:
        with pytest.warns(UserWarning, match="all 324 process sets of the job"):
            groups = [found._registered(lines, rank, 256) for rank in (0, 5)]
        assert groups[0] == groups[1] and len(set(groups[0])) == len(groups[0]) == 324
    else:
        groups = [found._registered(lines, rank, 256) for rank in (0, 5)]
        assert groups[0] == [(0, 1), (0, 1, 2, 3), (0, 2), tuple(range(0, 256, 4))]
        assert groups[1] == [(4, 5), (4, 5, 6, 7), (5, 7), tuple(range(1, 256, 4))]


@pytest.mark.ranks(4)
def test_sections_of_other_meshes_are_others(line: ProcessMesh) -> None:
    """`replica:2,row:2` and `row:2,replica:2` have rows of other ranks: what is kept for the one
    must not serve the other."""
    first, second = (process_mesh(shape) for shape in ("replica:2,row:2", "row:2,replica:2"))
    rows = [mesh.without("replica") for mesh in (first, second)]
    assert rows[0].axes == rows[1].axes and rows[0].world.ranks != rows[1].world.ranks
    assert rows[0] != rows[1] and rows[0] != first
    assert first.without("replica") is rows[0]
    assert pickle.loads(pickle.dumps(rows[1])) == rows[1]


def test_every_line_and_plane_communicates(any_mesh: ProcessMesh) -> None:
    """The sum of the ranks of each group, of every set of axes, in any order of their names."""
    for names, groups in groups_of(any_mesh).items():
        group = any_mesh.communicator(*reversed(names))
        assert group.ranks in groups
        total = group.allreduce(tf.constant(any_mesh.rank)).numpy()
        assert total == sum(group.ranks)
    any_mesh.barrier()


def test_gather_to_root(mesh: ProcessMesh) -> None:
    check_gather_to_root(mesh)


def test_gather_to_root_of_more_than_a_message_holds(
    mesh: ProcessMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 counts in int32 what all the others send: no message is larger than that."""
    monkeypatch.setattr(process_mesh_module, "LARGEST_GATHER", 20)
    exchange, received = engine.HorovodEngine.exchange, []

    def counted(*args: Any) -> tf.Tensor:
        received.append(exchange(*args))
        return received[-1]

    monkeypatch.setattr(engine.HorovodEngine, "exchange", counted)
    check_gather_to_root(mesh)
    if SIZE > 1:
        assert len(received) == -(-sum(16 * rank + 16 for rank in range(SIZE)) // 20)
        assert max(part.shape[0] for part in received) <= 20


def test_a_problem_of_one_rank_is_raised_on_all(mesh: ProcessMesh) -> None:
    mesh.raise_together("", ValueError)
    mine = f"rank {RANK} has no ψ" if RANK == SIZE - 1 else ""
    with pytest.raises(FileNotFoundError, match=f"rank {SIZE - 1} has no ψ"):
        mesh.raise_together(mine, FileNotFoundError)


@pytest.mark.parametrize("length", [0, 5])
def test_array_from_root(mesh: ProcessMesh, length: int) -> None:
    """Of a length that the others do not know; also among the ranks of a part of the mesh."""
    places = zip(mesh.names, mesh.coordinates, strict=True)
    place = tuple(place if name == "row" else 0 for name, place in places)
    first = int(np.arange(SIZE).reshape(mesh.shape)[place])
    for part, root in ((mesh, 0), (mesh.without("row"), first)):
        mine = np.arange(length + mesh.rank, dtype=np.uint8) + 3 * mesh.rank
        expected = np.arange(length + root, dtype=np.uint8) + 3 * root
        found = part.array_from_root(mine)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.uint8


def check_gather_to_root(mesh: ProcessMesh) -> None:
    """Of 16 bytes from rank 0, 32 from rank 1 and so on."""
    mine = np.full((mesh.rank + 1, 2), mesh.rank + 1j, np.complex64)
    found = mesh.gather_to_root(mine)
    if mesh.rank:
        assert found is None
        return
    assert found is not None
    for rank, array in enumerate(found):
        np.testing.assert_array_equal(array, np.full((rank + 1, 2), rank + 1j, np.complex64))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("row:3,col:5", f"has 15 places, but this job has {SIZE} rank"),
        (f"row:{SIZE},row:1", "'row' is named twice"),
        ("row=4", "'row=4' is not of the form axis:size"),
        ("row:", "is not of the form axis:size"),
        (":2", "is not of the form axis:size"),
        ("row:-2", "is not of the form axis:size"),
        ("row:0", "'row' has size 0"),
        ({"row": SIZE, "col": -1}, "'col' has size -1"),
    ],
)
def test_a_mesh_that_cannot_be(line: ProcessMesh, shape: object, message: str) -> None:
    """Every rank refuses it, and the existing mesh still works."""
    with pytest.raises(MeshError, match=message):
        ProcessMesh(shape)  # type: ignore[arg-type]
    line.barrier()


def test_shapes_in_other_forms() -> None:
    axes = (("row", 2), ("col", 3))
    for shape in ("row:2,col:3", " row : 2 ; col:3,", {"row": 2, "col": 3}, axes, iter(axes)):
        assert parse_mesh_shape(shape) == axes
    assert parse_mesh_shape("") == ()


@pytest.mark.skipif(SIZE > 1, reason="a mesh without axes has one place")
def test_a_mesh_without_axes() -> None:
    mesh = ProcessMesh("")
    assert mesh.coordinates == () and mesh.world.size == 1
    mesh.barrier()


def test_initialise_again(line: ProcessMesh) -> None:
    """With shapes whose groups are there, it is harmless."""
    initialise([str(line), f"other:{SIZE}"])
    assert ProcessMesh(f"other:{SIZE}").world.ranks == line.world.ranks


@pytest.mark.ranks(4)
def test_groups_that_were_not_named_at_the_start(line: ProcessMesh, monkeypatch) -> None:
    current = engine.current()
    known = {group: s for group, s in current.process_sets.items() if len(group) != 2}
    monkeypatch.setattr(current, "process_sets", known)
    with pytest.raises(CollectiveError, match="name every mesh shape of this program"):
        ProcessMesh("a:2,b:2")
    line.barrier()


def test_unknown_axes(line: ProcessMesh) -> None:
    with pytest.raises(MeshError, match="has no axis 'plane'"):
        line.communicator("plane")
    with pytest.raises(ValueError, match="names the mesh axis 'plane'"):
        HvdSimdMeshImpl(line, "x:plane")


@pytest.mark.ranks(2, 4)
def test_a_dimension_that_does_not_divide(line: ProcessMesh) -> None:
    """As an input, and deep in a graph; on every rank, and nothing waits."""
    odd = [("x", 2 * SIZE + 1)]
    with pytest.raises(ValueError, match=f"dimension x={2 * SIZE + 1} does not divide"):
        MeshFunction(lambda _, a: a, line, "x:row", {"a": (odd, tf.float32)})
    function = MeshFunction(
        lambda graph_mesh, a: mtf.reshape(a, [mtf.Dimension("q", 2 * SIZE + 1)]),
        line,
        "q:row",
        {"a": (odd, tf.float32)},
    )
    with pytest.raises(ValueError, match="not divisible"):
        function(np.zeros(2 * SIZE + 1))
    line.barrier()


def test_without_an_axis_the_others_go_on(any_mesh):
    """Each replica is a mesh of its own: sums and coordinates stay within it."""
    section = any_mesh.without("replica")
    assert section.size == any_mesh.size // any_mesh.axis_size("replica")
    assert (
        section.names == tuple(n for n in any_mesh.names if n != "replica") or section is any_mesh
    )
    total = section.world.allreduce(tf.constant(any_mesh.coordinate("replica")))
    assert int(total) == section.size * any_mesh.coordinate("replica")
    assert section.coordinate("row") == any_mesh.coordinate("row")
    gathered = section.gather_to_root(np.array([any_mesh.rank]))
    assert (gathered is None) == (section.rank != 0)
    if gathered is not None:
        mine = any_mesh.coordinate("replica")
        places = [np.unravel_index(rank, any_mesh.shape) for (rank,) in gathered]
        if "replica" in any_mesh.names:
            assert {p[any_mesh.names.index("replica")] for p in places} == {mine}
