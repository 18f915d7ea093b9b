"""Damaged and hostile files: each reader names the file in a sentence, soon, in little memory."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from catalogues import made
from damage import DAMAGES
from foreign_snapshots import (
    UNITS,
    gadget_binary,
    gadget_hdf5,
    grafic,
    music,
    particles,
    split,
    swift,
)
from run_files import RUN

from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.cli.common import planning
from flowpm_dist.cosmoflow.volumes.arrays import _opened as opened_array
from flowpm_dist.cosmoflow.volumes.tfrecords import RecordError
from flowpm_dist.cosmology import Cosmology
from flowpm_dist.evolution.corrections import CorrectionFileError, load_correction
from flowpm_dist.evolution.corrections.base import SHIPPED
from flowpm_dist.io.conversion import check_conversion, convert_snapshot
from flowpm_dist.io.errors import UserError, WorkError
from flowpm_dist.io.files import UnreadableError, read_arrays, save_arrays, write_text
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.light_cone import load_light_cone, read_light_cone, write_light_cone
from flowpm_dist.io.other_codes import particle_files
from flowpm_dist.io.particle_readers import open_particles
from flowpm_dist.io.samples import Samples
from flowpm_dist.io.snapshot import SnapshotError, mark_complete, new_array, new_group
from flowpm_dist.io.volume import VolumeError, open_volume
from flowpm_dist.io.white_noise import WhiteNoiseError, check_white_noise_file
from flowpm_dist.jobs.checkpoints import CheckpointStore
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.simulate.folder import SimulationFolder
from tests.jobs.test_foreign_folders import FOLDERS, PNG, READ, filled

SECONDS, CLOCK, MEMORY = 3, 60, 2**30
"""What a reader may take for a small file: processor time [s], time [s], and memory [bytes]."""
TIMES, LONGEST = 60, 1000
"""The number of damaged files for each reader, and the longest line of a message."""
SENTENCES = (UserError, WorkError, CorrectionFileError)
GRID, SIZE = (4, 4, 4), (8.0, 8.0, 8.0)
COSMOLOGY = Cosmology.planck18()
LCDM = COSMOLOGY.numbers()


class HangError(BaseException):
    """A reader took too long."""


@contextmanager
def bounded() -> Iterator[None]:
    """Inside, little memory is left to this process, and after some seconds HangError is raised."""

    def late(*_: object) -> None:
        raise HangError

    size = 1024 * int(_status("VmSize"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    limits = {signal.ITIMER_PROF: SECONDS, signal.ITIMER_REAL: CLOCK}
    signals = (signal.SIGPROF, signal.SIGALRM)
    handlers = [signal.signal(number, late) for number in signals]
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    try:
        for timer, seconds in limits.items():
            signal.setitimer(timer, seconds)
        yield
    finally:
        for timer in limits:
            signal.setitimer(timer, 0)
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _status(name: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


def snapshot(folder: Path) -> Path:
    path = folder / "run/snapshot.zarr"
    about = {"a": 0.5, "grid": GRID, "box_size": SIZE, "cosmology": LCDM, "seed": 1}
    group = new_group(path, about, {})
    for number, name in enumerate(("displacement", "velocity")):
        values = np.random.default_rng(number).normal(size=(*GRID, 3)).astype("f4")
        axes = ("x", "y", "z", "component")
        array = new_array(group, name, values.shape, (2, 4, 4, 3), values.dtype, axes, "1", name)
        array[...] = values
    mark_complete(path)
    return path


def read_snapshot(path: Path) -> None:
    out = path.parent / "out"
    try:
        convert_snapshot(check_conversion(path, out, "bigfile", overwrite=True), out, "bigfile")
    finally:
        shutil.rmtree(out, ignore_errors=True)


def converted(format: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        ours = snapshot(folder)
        checked = check_conversion(ours, folder, format, overwrite=False)
        path = convert_snapshot(checked, folder, format, files=2)
        shutil.rmtree(folder / "run")
        (path / "flowpm-dist.json").unlink()
        return path

    return made


def marked(format: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        path = converted(format)(folder)
        about = {"generator": "flowpm-dist", "complete": True, "a": 0.5, "grid": GRID}
        about |= {"box_size": SIZE, "cosmology": LCDM}
        (path / "flowpm-dist.json").write_text(json.dumps(about))
        return path

    return made


def foreign(make: Callable[..., Path], **options: Any) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        parts = split({kind: particles(40, "f8", "u8", kind) for kind in (0, 1)}, [25, 0, 15])
        return make(folder / "snap", parts, **options)

    return made


def read_all_types(path: Path) -> None:
    found = open_particles(path, UNITS if path.name == "snap" and not _is_hdf5(path) else None)
    for kind, count in found.counts.items():
        for begin in range(0, count, 2**16)[:4]:
            found.read(kind, begin, min(begin + 2**16, count))


def _is_hdf5(path: Path) -> bool:
    return any(path.parent.glob("*.hdf5"))


def foreign_noise(make: Callable[..., Path]) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        return make(folder / "noise", np.random.default_rng(0).normal(size=GRID))

    return made


def read_particles(path: Path) -> None:
    import flowpm_dist as fpm

    files = particle_files(path)
    if files is not None:
        fpm.State.from_snapshot(path, cosmology=None if files.written else COSMOLOGY)


def maps(folder: Path) -> Path:
    x = LabelledArray(np.arange(4.0), ("x",), "deg", "x")
    kappa = LabelledArray(np.zeros((1, 4, 4), "f4"), ("source", "y", "x"), "1", "kappa")
    write_light_cone(folder / "lightcone.zarr", {"x": x, "kappa": kappa}, {"z_max": 1.0}, {})
    return folder


def chains(folder: Path) -> Path:
    lines = ["move,chain,drawn,data,prior,sigma8"]
    lines += [f"{n},{c},{n},{n + c}.5,{n}.5,0.{n}{c}" for n in range(1, 5) for c in (1, 2)]
    write_text(folder / "draws.csv", "\n".join([*lines, ""]))
    facts = {"parameters": {"sigma8": {"value": 0.8, "prior": [0.6, 1.0]}}}
    write_text(folder / "result.json", json.dumps(facts))
    return folder


def draws(folder: Path) -> Path:
    samples, ranges = np.full((20, 2), 0.3), np.array([[0.1, 0.5], [0.6, 1.0]])
    names = np.array(["Omega_m", "sigma8"])
    save_arrays(folder / "samples.npz", {"samples": samples, "names": names, "ranges": ranges})
    return folder


def cone(folder: Path) -> Path:
    for number in range(2):
        with h5py.File(folder / f"light_cone.{number}.hdf5", "w") as file:
            for name, n in {"Coordinates": (3,), "Velocities": (3,), "ScaleFactor": ()}.items():
                file.create_dataset(
                    name, data=np.ones((5, *n)), chunks=(5, *n), maxshape=(None, *n)
                )
    about = {"generator": "flowpm-dist", "parts": 2, "light_cone": {"z_max": 1.0}}
    write_text(folder / "light_cone.json", json.dumps(about))
    return folder


def catalogue(format: str) -> Callable[[Path], Path]:
    def written(folder: Path) -> Path:
        made(9).write(folder / f"halos.{format}", format)
        return folder / f"halos.{format}"

    return written


def correction(name: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        return Path(shutil.copy(SHIPPED[name], folder / "correction.json"))

    return made


def text_file(name: str, text: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        write_text(folder / name, text)
        return folder / name

    return made


def of_own_power(folder: Path) -> Path:
    rows = [f"{k} {2e4 * k / (1 + (k / 0.02) ** 2) ** 1.3}" for k in np.geomspace(1e-3, 20.0, 40)]
    write_text(folder / "pk.txt", "\n".join(["# k P", *rows]))
    write_text(folder / "run.toml", re.sub("A_s = .*", 'power = "pk.txt"', RUN))
    return folder / "run.toml"


def read_run_file(path: Path) -> None:
    from flowpm_dist.simulate.options import SimulationOptions

    SimulationOptions.load(path)


def read_table(path: Path) -> None:
    from flowpm_dist.jobs.run_file import read_columns

    read_columns(path)


def read_n_of_z(path: Path) -> None:
    from flowpm_dist.observables.lensing.distributions import read_distribution

    read_distribution(path)


def numpy_file(folder: Path) -> Path:
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=GRID))
    return folder / "x.npy"


def arrays(folder: Path) -> Path:
    save_arrays(folder / "x.npz", {"a": np.arange(3), "b": np.ones((2, 3))})
    return folder / "x.npz"


def hdf5_volume(folder: Path) -> Path:
    with h5py.File(folder / "volume.hdf5", "w") as file:
        file.create_dataset("density", data=np.ones(GRID)).attrs["box_size"] = SIZE
    return folder / "volume.hdf5"


def zarr_volume(folder: Path) -> Path:
    made = zarr.create_group(folder / "volume", attributes={"box_size": SIZE})
    made.create_array("density", data=np.ones(GRID))
    return folder / "volume"


def read_volume(path: Path) -> None:
    open_volume(path).array[...]


def read_noise(path: Path) -> None:
    try:
        check_white_noise_file(path, GRID)
    except WhiteNoiseError as error:  # callers name the key and the file
        raise UserError(f"{path}: {error}") from error


def job_folder(command: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        out = folder / "out"
        filled(out, command)
        about = {"generator": "flowpm-dist", "seconds": 1.0, "warnings": ["w"], "versions": {}}
        write_text(out / "provenance.json", json.dumps(about))
        write_text(out / "checksums.json", json.dumps({"initial.white_noise": "a"}))
        (out / "picture.png").write_bytes(PNG)
        return out

    return made


def read_job(path: Path) -> None:
    from flowpm_dist.cli.runs import comparison, listed
    from flowpm_dist.jobs.job import records_in
    from flowpm_dist.jobs.report import page

    if records := records_in(path):
        listed(records), comparison(records * 2), page(records)
    for kind in FOLDERS.values():
        folder = kind(path)
        folder.older_work(), folder.is_complete, folder.can_resume(), folder.checksums()


def checkpoint(folder: Path) -> Path:
    import tensorflow as tf

    import flowpm_dist as fpm
    from flowpm_dist.grid.field import Field
    from meshimpl import ProcessMesh

    box = fpm.Box(GRID, SIZE, ProcessMesh("all:1"))
    field = Field(tf.ones(box.block), box)
    _checkpoints(folder).save(3, {"white_noise": field}, {"a": 0.5}, maps={"m": np.ones(3)})
    return folder


def _checkpoints(folder: Path) -> Any:
    import flowpm_dist as fpm
    from flowpm_dist.jobs.session import FieldCheckpoints
    from meshimpl import ProcessMesh

    box = fpm.Box(GRID, SIZE, ProcessMesh("all:1"))
    return FieldCheckpoints(CheckpointStore(folder, "step"), box, 2)


def read_checkpoint(folder: Path) -> None:
    checkpoints = _checkpoints(folder)
    if (latest := checkpoints.latest(a=0.5)) is not None:
        checkpoints.block(latest[0], "white_noise")
        checkpoints.whole(latest[0], "m")


N_OF_Z = "# z n\n0.1 0.5\n0.2 1.0\n0.4 0.3\n"
TABLE = "initial.seed,box.size\n1,64.0\n2,32.0\n"
READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "snapshot": (snapshot, read_snapshot),
    "gadget": (converted("gadget-hdf5"), read_particles),
    "bigfile": (converted("bigfile"), read_particles),
    "marked gadget": (marked("gadget-hdf5"), read_particles),
    "marked bigfile": (marked("bigfile"), read_particles),
    "gadget of all types": (foreign(gadget_hdf5), read_all_types),
    "swift": (foreign(swift), read_all_types),
    "gadget binary": (foreign(gadget_binary), read_all_types),
    "gadget binary, named": (foreign(gadget_binary, named=True, order=">"), read_all_types),
    "maps": (maps, load_light_cone),
    "cone": (cone, read_light_cone),
    "catalogue": (catalogue("hdf5"), Catalogue.read),
    "bigfile catalogue": (catalogue("bigfile"), Catalogue.read),
    "filter": (correction("default"), load_correction),
    "network": (correction("network"), load_correction),
    "run file": (text_file("run.toml", RUN), read_run_file),
    "table": (text_file("table.csv", TABLE), read_table),
    "n(z)": (text_file("n.txt", N_OF_Z), read_n_of_z),
    "power": (of_own_power, read_run_file),
    "npy": (numpy_file, read_volume),
    "noise": (numpy_file, read_noise),
    "noise of music": (foreign_noise(music), read_noise),
    "noise of grafic": (foreign_noise(grafic), read_noise),
    "npz": (arrays, read_arrays),
    "chains": (chains, Samples.load),
    "draws": (draws, Samples.load),
    "hdf5 volume": (hdf5_volume, read_volume),
    "zarr volume": (zarr_volume, read_volume),
    "checkpoint": (checkpoint, read_checkpoint),
    **{f"{command} folder": (job_folder(command), read_job) for command in READ},
}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """All files in a folder, with sizes and times."""
    states = {str(path): path.lstat() for path in folder.rglob("*")}
    return {
        path: (state.st_size, state.st_mtime_ns)
        for path, state in states.items()
        if not stat.S_ISDIR(state.st_mode)
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named_in_a_sentence(tmp_path, name, request):
    make, read = READERS[name]
    (tmp_path / "whole").mkdir()
    whole = make(tmp_path / "whole")
    read(whole)
    files = sorted(p for p in (tmp_path / "whole").rglob("*") if p.is_file())
    generator = np.random.default_rng([ord(c) for c in name])
    wrong, refused = [], 0
    for number in range(int(os.environ.get("ATTACKS", TIMES))):
        case = tmp_path / "case"
        shutil.copytree(tmp_path / "whole", case)
        file = files[generator.integers(len(files))].relative_to(tmp_path / "whole")
        damage = DAMAGES[number % len(DAMAGES)]
        damage(case / file, generator)
        before, told = listing(tmp_path), f"{number} {damage.__name__} {file}"
        try:
            with bounded(), warnings.catch_warnings(action="ignore"):
                read(case / whole.relative_to(tmp_path / "whole"))
        except SENTENCES as error:
            refused += 1
            lines = str(error).splitlines()
            if str(case) not in lines[0] or len(lines) > 1 and not isinstance(error, ConfigError):
                wrong.append(f"{told}: says {lines[0]:.300}")
            if max(map(len, lines)) > LONGEST:
                wrong.append(f"{told}: says much: {str(error):.500}")
        except (Exception, HangError) as error:
            wrong.append(f"{told}: {type(error).__name__}: {str(error):.300}")
        if listing(tmp_path) != before:
            wrong.append(f"{told}: files were changed")
        shutil.rmtree(case)
    assert not wrong, "\n".join([f"{len(wrong)} wrong:", *wrong])
    assert refused or read is read_job


def test_names_from_elsewhere_do_not_command_a_terminal(tmp_path, capsys, monkeypatch):
    from flowpm_dist.cli.report import report
    from flowpm_dist.cli.runs import runs

    name = "run\x1b[2J\x9b31m\r"
    filled(tmp_path / name, "train")
    (tmp_path / name / "\x1b]0;title\x07").symlink_to("/etc/hostname")
    runs([tmp_path])
    report([tmp_path], tmp_path / "report.html")
    shown = capsys.readouterr().out
    assert r"run\x1b[2J\x9b31m\r" in shown and r"\x1b]0;title\x07" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_a_copy_of_a_checkpoint_is_none(tmp_path):
    for name in ("step-000002.zarr", "step-000002-copy.zarr", "step-.zarr", "step-x.zarr"):
        (tmp_path / name).mkdir()
    assert [*CheckpointStore(tmp_path, "step").numbered()] == [2]


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000])
def test_a_name_that_is_too_long_is_refused(tmp_path, name, capsys):
    with pytest.raises(SystemExit), planning():
        SimulationFolder(tmp_path / name).check(needed=0)
    assert re.fullmatch(r"error: \S+: File name too long\n", capsys.readouterr().err)


@pytest.mark.parametrize("name", ["displacement", "velocity"])
def test_a_value_that_is_not_finite_is_named_by_its_place(tmp_path, name):
    import flowpm_dist as fpm

    path = snapshot(tmp_path)
    zarr.open_array(path / name, mode="r+")[3, 1, 2, 0] = np.inf
    with pytest.raises(UnreadableError, match=rf"{path}/{name} has inf at \[3, 1, 2, 0\]: all"):
        fpm.State.from_snapshot(path)
    with pytest.raises(SnapshotError, match=rf"{path}: {name} .* site \[3, 1, 2\] is inf along x"):
        read_snapshot(path)


def test_a_shape_of_more_chunks_than_files_is_refused_at_once(tmp_path):
    """zarr would go through the names of 10^27 chunks."""
    path = snapshot(tmp_path)
    about = json.loads((path / "velocity/zarr.json").read_text())
    about["shape"] = [10**9, 10**9, 10**9, 3]
    about["chunk_grid"]["configuration"]["chunk_shape"] = [1, 1, 1, 3]
    (path / "velocity/zarr.json").write_text(json.dumps(about))
    with bounded(), pytest.raises(SnapshotError, match="velocity lacks 9{20}"):
        read_snapshot(path)


@pytest.mark.parametrize("kind", ["link", "raw", "virtual", "elsewhere"])
def test_an_hdf5_file_that_names_a_pipe_is_refused(tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "volume.hdf5", "w") as file:
        if kind == "link":
            file["density"] = h5py.ExternalLink("pipe", "/density")
        elif kind == "raw":
            file.create_dataset("density", GRID, "f8", external=[("pipe", 0, 512)])
        else:
            layout = h5py.VirtualLayout(GRID, "f8")
            # HDF5 looks in the folder of the file for what is not elsewhere.
            name = "pipe" if kind == "virtual" else "/nowhere/pipe"
            layout[...] = h5py.VirtualSource(name, "density", GRID)
            file.create_virtual_dataset("density", layout)
    with bounded(), pytest.raises(VolumeError, match=r"volume.hdf5 .*regular file: .*pipe"):
        read_volume(tmp_path / "volume.hdf5")


@pytest.mark.parametrize("opened", [open_volume, opened_array])
def test_a_virtual_volume_without_its_parts_is_named(tmp_path, opened):
    """HDF5 reads zeros in their place."""
    path, layout = tmp_path / "volume.hdf5", h5py.VirtualLayout(GRID, "f8")
    layout[...] = h5py.VirtualSource("part.hdf5", "density", GRID)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("density", layout)
    with pytest.raises((VolumeError, RecordError), match="in the file part.hdf5, which is missing"):
        opened(Path(f"{path}:density"))
    with h5py.File(tmp_path / "part.hdf5", "w") as file:
        file["density"] = np.ones(GRID)
    opened(Path(f"{path}:density"))


def test_links_of_hdf5_are_followed_and_checked(tmp_path):
    """A virtual data set of the file itself is read; a pipe behind other links is refused."""
    layout = h5py.VirtualLayout(GRID, "f8")
    with h5py.File(tmp_path / "itself.hdf5", "w") as file:
        layout[...] = h5py.VirtualSource(file.create_dataset("parts", data=np.ones(GRID)))
        file.create_virtual_dataset("density", layout)
    with bounded():
        volume = open_volume(tmp_path / "itself.hdf5:density")
        assert volume.array[:].sum() == np.prod(GRID)
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "middle.hdf5", "w") as file:
        file["x"] = h5py.ExternalLink("pipe", "/x")
    with h5py.File(tmp_path / "far.hdf5", "w") as file:
        file["density"] = h5py.ExternalLink("middle.hdf5", "/x")
    with h5py.File(tmp_path / "soft.hdf5", "w") as file:
        file["density"] = np.ones(GRID)
        file["a"] = h5py.SoftLink("/z/x")
        file["z"] = h5py.ExternalLink("pipe", "/")
    for name in ("far.hdf5", "soft.hdf5"):
        with bounded(), pytest.raises(VolumeError, match=rf"{name} .*regular file: .*pipe"):
            read_volume(tmp_path / name)


def test_linked_folders_of_zarr_are_checked(tmp_path):
    """Pipes in them are refused; circles end; a folder that is no zarr is called so at once."""
    group = zarr.create_group(tmp_path / "v.zarr", zarr_format=3)
    group.create_array("density", data=np.ones(GRID))
    (tmp_path / "v.zarr" / "density").rename(tmp_path / "elsewhere")
    (tmp_path / "v.zarr" / "density").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "again").symlink_to(tmp_path / "v.zarr")
    volume = open_volume(tmp_path / "v.zarr")
    assert volume.array.chunks == GRID and volume.array[:].sum() == np.prod(GRID)
    os.mkfifo(tmp_path / "elsewhere" / "pipe")
    with bounded(), pytest.raises(VolumeError, match=r"regular file: .*pipe"):
        open_volume(tmp_path / "v.zarr")
    with pytest.raises(VolumeError, match=r"is not a volume: must be a .npy file"):
        open_volume(tmp_path)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["trained", "cell"], [float("nan")] * 2),
        (["trained", "cosmology", "Omega_m"], [None, 1]),
        (["trained", "steps"], "ten"),
        (["theta"], [10**4000] * 3),
        (["theta"], 7.0),
        (["theta"], ["a", "b"]),
        (["scores"], None),
    ],
)
def test_a_wrong_value_of_a_correction_is_named(tmp_path, keys, value):
    path = correction("default")(tmp_path)
    about = table = json.loads(path.read_text())
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
    path.write_text(json.dumps(about))
    with pytest.raises(CorrectionFileError, match=rf"{path} holds no correction: key {keys[0]}"):
        load_correction(path)
