"""Results on disk: whole or absent, each rank its part, the folder's owner never surprised."""

import errno
import fcntl
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zarr
from full_disk import disk_of

from flowpm_dist.grid.field import project
from flowpm_dist.io import SnapshotError, figures, load_snapshot
from flowpm_dist.io.figures import save_figure
from flowpm_dist.io.files import (
    SNAPSHOT,
    WriteError,
    snapshot_attributes,
    write_text,
    written_whole,
)
from flowpm_dist.io.particles import mark_particles_complete
from flowpm_dist.io.snapshot import FIELDS, chunk_shape, mark_complete, write_snapshot
from flowpm_dist.io.volume import VolumeError, open_volume
from flowpm_dist.jobs import folder
from flowpm_dist.jobs import progress as progress_module
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.progress import (
    OUTPUT_VARIABLE,
    TERMINAL_VARIABLE,
    Progress,
    output_columns,
    terminal_environment,
)
from flowpm_dist.options.regular_files import human_size
from flowpm_dist.simulate.folder import FILES, PARTIAL, SimulationFolder
from flowpm_dist.simulate.session import write_power_spectrum


class ThreadMesh:
    """A mesh whose ranks are threads of this process."""

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols, self.size = rows, cols, rows * cols
        self._barrier = threading.Barrier(self.size, timeout=30)
        self._arrays: list = [None] * self.size
        self._rank = threading.local()

    @property
    def rank(self) -> int:
        return self._rank.number

    def barrier(self) -> None:
        self._barrier.wait()

    def gather_to_root(self, array):
        self._arrays[self.rank] = array
        self.barrier()
        gathered = list(self._arrays)
        self.barrier()
        return gathered if self.rank == 0 else None

    def run(self, work) -> list:
        """The result, or the exception, of each rank."""
        found: list = [None] * self.size

        def one(rank: int) -> None:
            self._rank.number = rank
            try:
                found[rank] = work()
            except Exception as error:
                found[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found


@dataclass
class Dtype:
    as_numpy_dtype: type


class BlockField:
    """One rank's block of a whole array."""

    def __init__(self, whole: np.ndarray, mesh: ThreadMesh) -> None:
        self.grid, self.mesh, self.dtype = whole.shape, mesh, Dtype(whole.dtype.type)
        row, col = divmod(mesh.rank, mesh.cols)
        x, y = whole.shape[0] // mesh.rows, whole.shape[1] // mesh.cols
        self.offset = (row * x, col * y, 0) + (0,) * (whole.ndim - 3)
        self.block = whole[row * x : (row + 1) * x, col * y : (col + 1) * y]


def whole_fields(grid=(8, 6, 4), dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    vectors = ("displacement", "velocity")
    return {
        name: rng.standard_normal(grid + ((3,) if name in vectors else ())).astype(dtype)
        for name in FIELDS
    }


def write(path: Path, wholes: dict[str, np.ndarray], rows=1, cols=1) -> list:
    mesh = ThreadMesh(rows, cols)

    def work() -> None:
        fields = {name: BlockField(whole, mesh) for name, whole in wholes.items()}
        write_snapshot(path, fields, {"a": 0.5, "box_size": [1.0, 2.0, 3.0]})

    return mesh.run(work)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 1), (1, 3), (4, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_snapshot_reads_back_bit_equal_from_any_mesh(tmp_path, rows, cols, dtype):
    wholes = whole_fields(dtype=dtype)
    assert write(tmp_path / SNAPSHOT, wholes, rows, cols) == [None] * (rows * cols)
    mark_complete(tmp_path / SNAPSHOT)
    snapshot = load_snapshot(tmp_path)
    assert set(snapshot.arrays) == set(FIELDS)
    for name, whole in wholes.items():
        assert snapshot[name].dtype == dtype
        np.testing.assert_array_equal(snapshot[name], whole)
        assert snapshot.arrays[name].attrs["units"] == FIELDS[name][0]
    assert snapshot.attributes["a"] == 0.5
    assert "velocity" in snapshot.attributes["conventions"]
    with pytest.raises(KeyError, match="displacement"):
        snapshot["positions"]


def test_no_chunk_is_shared_by_two_ranks(tmp_path):
    write(tmp_path / SNAPSHOT, whole_fields(), rows=4, cols=2)
    for _, array in zarr.open_group(tmp_path / SNAPSHOT, mode="r").arrays():
        assert array.chunks[:2] == (2, 3)


@pytest.mark.parametrize(
    ("block", "limit"),
    [((8, 8, 8), 10**6), ((512, 512, 512, 3), 2**25), ((6, 10, 14), 100), ((7, 7, 7, 3), 1)],
)
def test_chunks_tile_a_block_within_the_limit(block, limit):
    chunk = chunk_shape(block, 4, limit)
    assert all(n % c == 0 for n, c in zip(block, chunk, strict=True))
    assert 4 * np.prod(chunk) <= max(limit, 4 * np.prod(block[3:]))
    assert chunk == block or 4 * np.prod(chunk) > limit / 100 or limit < 100


def test_an_incomplete_snapshot_is_refused(tmp_path):
    write(tmp_path / SNAPSHOT, whole_fields())
    with pytest.raises(SnapshotError, match="not complete"):
        load_snapshot(tmp_path / SNAPSHOT)
    with pytest.raises(SnapshotError, match="not a snapshot"):
        load_snapshot(tmp_path / "nowhere")
    zarr.create_group(tmp_path / "other")
    with pytest.raises(SnapshotError, match="not a snapshot"):
        load_snapshot(tmp_path / "other")


def test_a_missing_chunk_is_noticed_before_the_mark_and_when_it_is_lost_later(tmp_path):
    write(tmp_path / SNAPSHOT, whole_fields(), rows=2)
    chunk = tmp_path / SNAPSHOT / "density" / "c" / "1" / "0" / "0"
    chunk.rename(tmp_path / "chunk")
    with pytest.raises(WriteError, match="density lacks 1 of 2 chunks"):
        mark_complete(tmp_path / SNAPSHOT)
    (tmp_path / "chunk").rename(chunk)
    mark_complete(tmp_path / SNAPSHOT)
    load_snapshot(tmp_path / SNAPSHOT)
    chunk.unlink()
    with pytest.raises(SnapshotError, match="density lacks 1 of 2 chunks: copy the snapshot again"):
        load_snapshot(tmp_path / SNAPSHOT)


def test_a_full_disk_on_one_rank_is_told(tmp_path, monkeypatch):
    real = zarr.Array.__setitem__

    def fill(self, place, values):
        if self.path == "" and "velocity" in str(self.store) and place[0].start > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, place, values)

    monkeypatch.setattr(zarr.Array, "__setitem__", fill)
    found = write(tmp_path / SNAPSHOT, whole_fields(), rows=2)
    assert isinstance(found[1], WriteError)
    assert "velocity: No space left on device" in str(found[1])
    with pytest.raises(SnapshotError):
        load_snapshot(tmp_path)


def test_the_systems_own_error_is_told(tmp_path):
    """Not a pretended error: the system refuses files above a size."""
    fields = whole_fields((32,) * 3)
    with disk_of(20_000):
        found = write(tmp_path / SNAPSHOT, fields)[0]
    assert isinstance(found, WriteError)
    assert str(found) == f"cannot write {tmp_path}/{SNAPSHOT}/white_noise: File too large"
    with pytest.raises(SnapshotError):
        load_snapshot(tmp_path)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(WriteError, match=f"^cannot write {path}: No space"), written_whole(path):
        raise full
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def finish(path: Path, text: str = "new", *, overwrite: bool = False) -> SimulationFolder:
    """A finished run, without its physics."""
    out = SimulationFolder(path)
    out.begin(overwrite=overwrite)
    fill_partial(out, text)
    out.publish()
    return out


def fill_partial(out: SimulationFolder, text: str = "new") -> None:
    for name in FILES:
        (out.partial / name).write_text(text)
    write(out.partial / SNAPSHOT, whole_fields((4, 4, 4)))
    mark_complete(out.partial / SNAPSHOT)


def replacing(path: Path, *outputs: str) -> SimulationFolder:
    """A run that has written what is to replace a finished one."""
    finish(path, "old")
    out = SimulationFolder(path, outputs)
    out.begin(overwrite=True)
    fill_partial(out)
    return out


def cut_short(patch: pytest.MonkeyPatch, after: int) -> None:
    """Interrupt the process when it moves one more path than this into place."""
    left, real = iter(range(after)), Path.replace

    def replace(self, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(self, target)

    patch.setattr(Path, "replace", replace)


def test_a_finished_run_is_all_there_and_nothing_more(tmp_path):
    out = finish(tmp_path / "deep" / "out")
    assert out.is_finished()
    assert {p.name for p in out.path.iterdir()} == {*FILES, SNAPSHOT}


def test_a_finished_run_is_replaced_only_when_asked(tmp_path):
    out = finish(tmp_path, "old")
    with pytest.raises(OutputError, match="finished run: add --overwrite"):
        out.check(overwrite=False, needed=0)
    with pytest.raises(OutputError, match="finished run"):
        out.begin(overwrite=False)
    (tmp_path / "notes.txt").write_text("mine")
    out.check(overwrite=True, needed=0)
    again = SimulationFolder(tmp_path)
    again.begin(overwrite=True)
    assert out.is_finished()
    fill_partial(again)
    assert (tmp_path / "run.toml").read_text() == "old"
    again.publish()
    assert (tmp_path / "run.toml").read_text() == "new"
    assert {p.name for p in tmp_path.iterdir()} == {*FILES, SNAPSHOT, "notes.txt"}


def test_a_failed_run_leaves_the_old_results(tmp_path):
    out = replacing(tmp_path)
    out.discard()
    assert out.is_finished()
    assert (tmp_path / "run.toml").read_text() == "old"
    assert not out.partial.exists()


def test_foreign_files_are_neither_overwritten_nor_deleted(tmp_path):
    (tmp_path / "run.toml").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"holds run.toml from elsewhere"):
            SimulationFolder(tmp_path).check(overwrite=overwrite, needed=0)
    (tmp_path / "run.toml").unlink()
    (tmp_path / PARTIAL).mkdir()
    (tmp_path / PARTIAL / "precious").write_text("mine")
    with pytest.raises(OutputError, match="does not belong to an interrupted run"):
        SimulationFolder(tmp_path).begin(overwrite=True)
    assert (tmp_path / PARTIAL / "precious").exists()


class Marks:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
PICKLE = {"id": "pickle", "protocol": 5}
# data type and codecs of zarr 3, or data type, filters and compressor of zarr 2
DANGEROUS = {
    "codec": ("float32", [{"name": "numcodecs.pickle", "configuration": {}}, BYTES]),
    "last codec": ("float32", [BYTES, {"name": "pickle", "configuration": {}}]),
    "objects": ("object", [{"name": "bytes"}]),
    "bytes": ("variable_length_bytes", [{"name": "vlen-bytes"}]),
    "objects, zarr 2": ("|O", [PICKLE], None),
    "filter, zarr 2": ("<f4", [PICKLE], None),
    "compressor, zarr 2": ("<f4", None, PICKLE),
}


def dangerous_array(path: Path, kind: str, chunk: bytes) -> None:
    """A zarr array of 4^3 values whose one chunk is given."""
    dtype, codecs, *compressor = DANGEROUS[kind]
    about = {"shape": [4] * 3, "fill_value": 0 if dtype != "variable_length_bytes" else ""}
    path.mkdir()
    if compressor:
        about |= {"zarr_format": 2, "chunks": [4] * 3, "dtype": dtype, "order": "C"}
        about |= {"filters": codecs, "compressor": compressor[0]}
        (path / ".zarray").write_text(json.dumps(about))
        (path / "0.0.0").write_bytes(chunk)
        return
    about |= {"zarr_format": 3, "node_type": "array", "data_type": dtype, "codecs": codecs}
    grid = {"name": "regular", "configuration": {"chunk_shape": [4] * 3}}
    about |= {"chunk_grid": grid, "chunk_key_encoding": {"name": "default"}, "attributes": {}}
    (path / "zarr.json").write_text(json.dumps(about))
    (path / "c/0/0").mkdir(parents=True)
    (path / "c/0/0/0").write_bytes(chunk)


@pytest.mark.parametrize("kind", DANGEROUS)
def test_pickles_in_zarr_are_refused_and_never_run(tmp_path, kind):
    """As a volume, in a group of volumes, and in what says that it is a snapshot."""
    chunk = pickle.dumps(Marks(tmp_path / "ran"))
    dangerous_array(tmp_path / "volume.zarr", kind, chunk)
    zarr.create_group(tmp_path / "group.zarr", zarr_format=2 if "zarr 2" in kind else 3)
    dangerous_array(tmp_path / "group.zarr/density", kind, chunk)
    for path in ("volume.zarr", "group.zarr"):
        with pytest.raises(VolumeError, match=path):
            open_volume(tmp_path / path)
    if "zarr 2" not in kind:
        snapshot = tmp_path / "snapshot.zarr"
        write(snapshot, whole_fields())
        mark_complete(snapshot)
        shutil.rmtree(snapshot / "density")
        dangerous_array(snapshot / "density", kind, chunk)
        with pytest.raises(SnapshotError, match="cannot be read|must be .*real numbers"):
            load_snapshot(snapshot)
        with pytest.raises(VolumeError, match="cannot be read|must be .*real numbers"):
            open_volume(snapshot)
    assert not (tmp_path / "ran").exists()
    pickle.loads(chunk)
    assert (tmp_path / "ran").exists()  # it would have run


def test_one_who_looks_at_a_lock_keeps_nobody_out(tmp_path):
    """As `flowpm-dist runs` does; a job that begins at that moment waits for it."""
    out = SimulationFolder(tmp_path)
    out.begin(overwrite=False)
    out.release()
    with out.owner.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        threading.Timer(0.05, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        SimulationFolder(tmp_path).begin(overwrite=True)


def test_two_runs_do_not_share_a_folder(tmp_path):
    out = SimulationFolder(tmp_path)
    out.begin(overwrite=False)
    with pytest.raises(OutputError, match=f"another run is writing.*{os.getpid()}"):
        SimulationFolder(tmp_path).begin(overwrite=True)
    assert out.partial.exists()
    out.discard()
    SimulationFolder(tmp_path).begin(overwrite=False)


@pytest.mark.parametrize("moved", range(len(FILES) + 2))
def test_a_publication_cut_short_is_taken_up(tmp_path, monkeypatch, moved):
    out = replacing(tmp_path)
    cut_short(monkeypatch, moved)
    if moved <= len(FILES):
        with pytest.raises(KeyboardInterrupt):
            out.publish()
        assert not out.is_finished()
    else:
        out.publish()
    monkeypatch.undo()
    out.release()
    with pytest.raises(OutputError, match="finished run"):
        SimulationFolder(tmp_path).begin(overwrite=False)
    assert {p.name for p in tmp_path.iterdir()} == {*FILES, SNAPSHOT}
    assert {(tmp_path / name).read_text() for name in FILES} == {"new"}
    assert load_snapshot(tmp_path)["density"].shape == (4, 4, 4)


def leave_output(folder: Path, name: str, text: str) -> None:
    (folder / name / "snapshot.bigfile").mkdir(parents=True)
    mark_particles_complete(folder / name / "snapshot.bigfile", {"config": text})


def test_states_on_the_way_are_of_one_run_though_publication_is_cut_short(tmp_path, monkeypatch):
    """After the new one has moved into place, and before the snapshot."""
    for name in ("a_0.2500", "a_0.5000"):
        leave_output(tmp_path, name, "old")
    out = replacing(tmp_path, "a_0.5000")
    leave_output(out.partial, "a_0.5000", "new")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_short(patch, len(FILES) + 1)
        out.publish()
    assert (tmp_path / "a_0.5000").is_dir() and not out.is_finished()
    out.release()
    with pytest.raises(OutputError, match="finished run"):
        SimulationFolder(tmp_path).begin(overwrite=False)
    assert {p.name for p in tmp_path.iterdir()} == {*FILES, SNAPSHOT, "a_0.5000"}
    about = snapshot_attributes(tmp_path / "a_0.5000" / "snapshot.bigfile")
    assert about["config"] == "new"


def test_a_publication_that_fails_loses_neither_run(tmp_path, monkeypatch):
    out, real = replacing(tmp_path), Path.replace

    def replace(self, target):
        if self.name == "timings.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        return real(self, target)

    with monkeypatch.context() as patch, pytest.raises(WriteError, match="timings.json"):
        patch.setattr(Path, "replace", replace)
        out.publish()
    out.remove_partial()
    assert (out.partial / SNAPSHOT).is_dir() and (out.partial / f"replaced-{SNAPSHOT}").is_dir()
    with pytest.raises(OutputError, match="finished run"):
        SimulationFolder(tmp_path).begin(overwrite=False)
    assert (tmp_path / "timings.json").read_text() == "new"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_killed_while_it_writes_leaves_nothing_whole(tmp_path, number):
    root = Path(__file__).parents[2]
    script = f"""
        import sys, time
        sys.path[:0] = {[str(root), str(root / "tests" / "support")]}
        from tests.io import test_io
        out = test_io.SimulationFolder(test_io.Path("{tmp_path}"))
        out.begin(overwrite=True)
        test_io.fill_partial(out, "half")
        print("written", flush=True)
        time.sleep(60)
    """
    finish(tmp_path, "old")
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    process.send_signal(number)
    process.wait(30)
    assert (tmp_path / PARTIAL / SNAPSHOT).exists()
    assert (tmp_path / "run.toml").read_text() == "old"
    later = SimulationFolder(tmp_path)
    later.begin(overwrite=True)
    assert [p.name for p in later.partial.iterdir()] == ["owner.json"]
    assert json.loads((later.partial / "owner.json").read_text())["pid"] == os.getpid()


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file is not a folder"):
        SimulationFolder(tmp_path / "file" / "out").check(overwrite=False, needed=0)
    with pytest.raises(OutputError, match="Not a directory"):
        SimulationFolder(tmp_path / "file" / "out").begin(overwrite=False)
    with pytest.raises(OutputError, match="free, the run needs about 8.0 TiB"):
        SimulationFolder(tmp_path).check(overwrite=False, needed=2**43)
    monkeypatch.setattr(folder.os, "access", lambda *_: False)
    with pytest.raises(OutputError, match="no permission to write in"):
        SimulationFolder(tmp_path / "out").check(overwrite=False, needed=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="no permission"):
        SimulationFolder(tmp_path / "out").check(overwrite=False, needed=0)


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (4, 2)])
def test_a_slab_is_the_mean_over_its_layers(rows, cols):
    whole = whole_fields((8, 4, 6))["density"]
    mesh = ThreadMesh(rows, cols)
    found = mesh.run(lambda: project(BlockField(whole, mesh), 3))
    np.testing.assert_allclose(found[0], whole[:, :, :3].mean(axis=2, dtype=float), rtol=1e-12)
    assert found[1:] == [None] * (mesh.size - 1)


def test_figures_are_drawn_even_of_a_uniform_universe(tmp_path):
    figure = figures.density_figure(np.ones((8, 4)), (2.0, 1.0, 2.0), 0.25, 1.0)
    save_figure(figure, tmp_path / "density.png")
    k, power = np.array([0.1, 0.2, 0.4]), np.array([3.0, 2.0, 1.0])
    figure = figures.power_spectrum_figure(k, power, power, np.ones_like, nyquist=0.5, a=0.5)
    save_figure(figure, tmp_path / "power.png")
    for name in ("density.png", "power.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@dataclass
class Spectrum:
    k: np.ndarray
    power: np.ndarray
    modes: np.ndarray


def test_the_power_spectrum_table_reads_as_numbers_with_names(tmp_path):
    spectrum = Spectrum(np.array([0.1, 0.2]), np.array([1e4, 5e3]), np.array([6, 18]))
    write_power_spectrum(tmp_path / "p.csv", spectrum, np.array([1.1e4, 4e3]), 8.0)
    table = np.genfromtxt(tmp_path / "p.csv", delimiter=",", names=True)
    np.testing.assert_allclose(table["modes"], spectrum.modes)
    np.testing.assert_allclose(table["particle_noise_Mpch3"], 8.0)
    plain = np.loadtxt(tmp_path / "p.csv", delimiter=",", skiprows=1)
    np.testing.assert_allclose(plain[:, 3], [1.1e4, 4e3])
    assert (tmp_path / "p.csv").read_text().startswith("k [h/Mpc],P [(Mpc/h)^3],modes,linear")


@dataclass
class Poles:
    power: np.ndarray
    orders: tuple[int, ...]


def test_multipoles_are_further_columns_of_the_table(tmp_path):
    spectrum = Spectrum(np.array([0.1, 0.2]), np.array([1e4, 5e3]), np.array([6, 18]))
    poles = Poles(np.array([[3.0, 2.0], [-1.0, 1.0]]), (0, 2))
    write_power_spectrum(tmp_path / "p.csv", spectrum, np.array([1.0, 2.0]), 8.0, poles)
    header = (tmp_path / "p.csv").read_text().splitlines()[0]
    assert header.split(",")[4:-1] == [f"P{n} in redshift space [(Mpc/h)^3]" for n in (0, 2)]
    table = np.loadtxt(tmp_path / "p.csv", delimiter=",", skiprows=1)
    np.testing.assert_allclose(table[:, 4:-1], poles.power.T)


def shown(rank: int) -> str:
    stream = io.StringIO()
    with Progress(rank, stream) as progress:
        progress.note("initial conditions")
        progress.step(1, 2, 0.55, 0.25)
        progress.step(2, 2, 1.0, 0.25)
    return stream.getvalue()


def test_progress_is_a_line_for_each_step_and_from_rank_0_alone():
    assert shown(rank=0).splitlines() == [
        "initial conditions",
        "step 1/2  a = 0.5500  0.25 s",
        "step 2/2  a = 1.0000  0.25 s",
    ]
    assert shown(rank=1) == ""


def test_counts_that_change_often_are_told_now_and_then():
    stream = io.StringIO()
    with Progress(0, stream) as progress:
        for done in range(1, 11):
            progress("files", done, 10, "fine" if done == 1 else "")
    assert stream.getvalue().splitlines() == ["files  1/10  fine", "files 10/10"]


def test_progress_is_a_bar_where_the_parent_has_a_terminal(monkeypatch):
    monkeypatch.setenv(TERMINAL_VARIABLE, "80")
    assert "2/2" in shown(rank=0)
    assert "step" not in shown(rank=0)
    assert shown(rank=1) == ""


def test_a_count_of_another_process_moves_the_bar_and_other_lines_stay_above(monkeypatch):
    monkeypatch.setenv(TERMINAL_VARIABLE, "80")
    stream = io.StringIO()
    with Progress(0, stream) as progress:
        progress.relay("loading TensorFlow")
        progress.relay("step  3/10  a = 0.3000  0.25 s")
        progress.relay("warning: 3/10 [of] it")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())  # without colours
    assert "loading TensorFlow\n" in shown and "warning: 3/10 [of] it\n" in shown
    assert " 3/10 a = 0.3000  0.25 s" in shown and "step  3/10" not in shown
    monkeypatch.delenv(TERMINAL_VARIABLE)
    stream = io.StringIO()
    with Progress(0, stream) as progress:
        progress.relay("step  3/10  a = 0.3000  0.25 s")
    assert stream.getvalue() == "step  3/10  a = 0.3000  0.25 s\n"


@pytest.mark.parametrize("widgets", [True, False])
def test_progress_is_a_bar_in_a_notebook_with_widgets(monkeypatch, widgets):
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    monkeypatch.setattr(progress_module, "find_spec", lambda name: widgets or None)
    progress = Progress(0, io.StringIO())
    assert (progress._bar is not None) == widgets
    assert not widgets or progress._bar.console.is_jupyter


def test_a_rank_believes_what_its_parent_says_of_the_terminal(monkeypatch):
    """mpirun gives each rank a terminal of its own as standard output, also into a file."""
    main, of_rank = os.openpty()
    with os.fdopen(of_rank, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setenv("TERM", "xterm")
        assert output_columns() is not None
        assert OUTPUT_VARIABLE in terminal_environment()
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "2" if "SIZE" in name else "0")
        assert output_columns() is None
        assert terminal_environment() == {}
        monkeypatch.setenv(OUTPUT_VARIABLE, "90")
        assert output_columns() == 90
    os.close(main)


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 bytes"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**60, "1048576")]
)
def test_sizes_as_people_read_them(count, text):
    assert human_size(count).startswith(text)
