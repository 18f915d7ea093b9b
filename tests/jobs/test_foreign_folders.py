"""Folders and files that somebody else has packed: their links and names lead nowhere."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from commands import flowpm_here

from flowpm_dist.io import bigfile
from flowpm_dist.io.files import (
    UnreadableError,
    no_link,
    read_arrays,
    remove,
    save_arrays,
    write_text,
)
from flowpm_dist.io.formats import UNITS
from flowpm_dist.io.light_cone import load_light_cone, read_light_cone
from flowpm_dist.io.particle_readers import open_particles
from flowpm_dist.io.snapshot import SnapshotError, new_group
from flowpm_dist.io.volume import VolumeError, open_volume
from flowpm_dist.io.white_noise import WhiteNoiseError, open_white_noise
from flowpm_dist.jobs.folder import OutputError, WorkFolder
from flowpm_dist.jobs.job import JOBS, job_class, read_record
from flowpm_dist.jobs.locks import Lock
from flowpm_dist.jobs.report import page
from flowpm_dist.jobs.results import Table, write_rows
from flowpm_dist.simulate.folder import PARTIAL
from flowpm_dist.studies.process import run
from meshimpl.horovod_wheel import wheel

FOLDERS = {name: job_class(name).folder_type for name in JOBS}
WORK = {name: kind for name, kind in FOLDERS.items() if issubclass(kind, WorkFolder)}
PNG = b"\x89PNG\r\n\x1a\n" + b"picture" + b"IEND\xaeB`\x82"


@pytest.fixture
def victims(tmp_path):
    """A file and a folder that no job may touch; afterwards they are as they were."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    assert (folder / "thesis.tex").read_text() == "years of work"


def begun(kind: type, path: Path) -> WorkFolder:
    """A folder whose job was stopped."""
    folder = kind(path)
    folder.begin()
    folder.release()
    return folder


def link_of(folder: Path, name: str, victims: Path, *, to_folder: bool) -> Path:
    link = folder / name
    remove(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victims if to_folder else victims / "thesis.tex")
    return link


def names_of(kind: type) -> list[str]:
    """What a job leaves in its folder, and in the folders in it."""
    names = kind(Path()).all_contents
    inside = [f"{name}/0000" for name in names if "." not in name]
    deeper = [f"{name}/a/b/c" for name in names if "." not in name or name.endswith(".zarr")]
    return [*names, *inside, *deeper]


@pytest.mark.parametrize("to_folder", [False, True])
@pytest.mark.parametrize("command", WORK)
def test_work_begins_and_goes_on_in_its_own_folder(tmp_path, victims, command, to_folder):
    """Resumed, it names the link; begun anew, it removes the link alone."""
    kind = WORK[command]
    for name in names_of(kind):
        folder = begun(kind, tmp_path / "out")
        link = link_of(folder.path, name, victims, to_folder=to_folder)
        if folder.mark():  # the link is not in its place
            with pytest.raises(OutputError, match=f"^{link} is a symbolic link"):
                folder.check(resume=True, needed=0)
            with pytest.raises(OutputError, match=f"^{link} is a symbolic link"):
                folder.begin(resume=True)
            folder.begin(overwrite=True)
            folder.write_mark(complete=True)
            folder.release()
            assert not link.is_symlink()
        else:
            with pytest.raises(OutputError, match="from elsewhere"):
                folder.begin(overwrite=True)
            folder.release()
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("command", FOLDERS)
def test_a_lock_is_no_link(tmp_path, victims, command):
    folder = FOLDERS[command](tmp_path / "out")
    lock = PARTIAL + "/owner.json" if command == "simulate" else ".lock"
    link_of(folder.path, lock, victims, to_folder=False)
    with pytest.raises(OutputError, match=f"cannot write in .*{lock}: it is a symbolic link"):
        folder.begin()


@pytest.mark.parametrize("name", ["publishing", "run.toml", "checkpoints", "a_0.5000/x.csv"])
@pytest.mark.parametrize("to_folder", [False, True])
def test_a_simulation_writes_in_its_own_folder(tmp_path, victims, name, to_folder):
    folder = FOLDERS["simulate"](tmp_path / "out")
    folder.begin()
    folder.release()
    link = link_of(folder.partial, name, victims, to_folder=to_folder)
    with pytest.raises(OutputError, match=f"^{link} is a symbolic link"):
        FOLDERS["simulate"](folder.path).begin(resume=True)
    with pytest.raises(OutputError, match=f"^{link} is a symbolic link"):
        folder.check(resume=True, needed=0)
    if name == "publishing":
        link.unlink()
    folder.check(overwrite=True, needed=0)
    folder.begin(overwrite=True)
    assert not link.is_symlink()
    for published in folder.all_contents:
        link_of(folder.path, published, victims, to_folder=to_folder)
    link_of(folder.path, "density.png", tmp_path / "missing", to_folder=True)
    (folder.partial / "run.toml").write_text("")
    folder.publish()
    assert [path.name for path in folder.path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("name", ["", "publishing", "snapshot.zarr", "a_0.5000/x.csv"])
def test_a_link_that_stays_is_refused_before_any_work(tmp_path, victims, name):
    """At the place of the partial folder, and among results that are moved into place."""
    folder = FOLDERS["simulate"](tmp_path / "out")
    folder.begin()
    folder.release()
    (folder.partial / "publishing").touch()
    link = link_of(folder.partial, name, victims, to_folder=name != "publishing")
    words = "is a symbolic link" if name else "does not belong to an interrupted run"
    for act in (folder.check, folder.begin):
        with pytest.raises(OutputError, match=f"^{link} {words}"):
            act(overwrite=True, **({"needed": 0} if act == folder.check else {}))
    assert link.is_symlink()


def test_a_folder_may_be_a_link_itself(tmp_path):
    """To a scratch disk."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "scratch")
    for command, kind in WORK.items():
        folder = begun(kind, tmp_path / "out")
        folder.check(resume=True, needed=0)
        kind(tmp_path / "out").begin(resume=True)
        assert (tmp_path / "scratch" / kind.contents[0]).is_file(), command
        remove(tmp_path / "scratch")
        (tmp_path / "scratch").mkdir()


def test_links_of_a_users_script_are_its_own(tmp_path, victims):
    """In the folder of a run of a study, which the script fills."""
    folder = begun(WORK["study"], tmp_path / "out")
    link_of(folder.runs, "0000/run/latest", victims, to_folder=True)
    folder.check_links()
    folder.runs.joinpath("0001").mkdir()
    link = link_of(folder.runs, "0001/run", victims, to_folder=True)
    with pytest.raises(OutputError, match=f"^{link} is"):
        folder.check_links()


def table(path: Path) -> None:
    rows = Table(path, ["step"], 1)
    rows.add({"step": 1})
    rows.close()


STAYS = (".notes.partial", ".x.tfrecord.partial", ".run.toml.0123abcg.partial", ".0123abcd.partial")
"""Names that no temporary file has."""


def killed(folder: Path, *inner: str) -> set[Path]:
    """Makes what kills may leave in a folder and in folders in it; returns what is to stay."""
    kept = {folder / f".{name}" for name in STAYS} | {folder / ".folder.0123abcd.partial/x"}
    for path in [*kept, *(folder / name / ".a.png.0123abcd.partial" for name in ("", *inner))]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (link := folder / ".link.0123abcd.partial").symlink_to(STAYS[0])
    return {*kept, link}


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


OWN = {
    "train": ["evaluation", "posterior", "fresh/0/evaluation"],
    "study": ["runs/0000"],
    "tune": ["trials/0000"],
}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("command", WORK)
def test_a_kill_leaves_no_temporary_file_for_long(tmp_path, command, resume):
    """Files of the user's stay, and those of a run of a study, which is a job of its own."""
    folder = begun(WORK[command], tmp_path / "out")
    stays = killed(folder.path, *OWN.get(command, ()))
    if resume and folder.inner:
        run = folder.path / OWN[command][0] / folder.inner / ".a.png.0123abcd.partial"
        run.parent.mkdir()
        run.touch()
        stays.add(run)
    folder.begin(resume=resume, overwrite=not resume)
    folder.release()
    lock_and_mark = {folder.path / ".lock", folder.path / folder.contents[0]}
    assert files_in(folder.path) == stays | lock_and_mark


@pytest.mark.parametrize("command", FOLDERS)
def test_a_refused_job_removes_nothing(tmp_path, command):
    """It begins where older work is, or where others are writing."""
    folder = FOLDERS[command](tmp_path / "out")
    folder.begin()
    folder.release()
    if command == "simulate":
        (folder.checkpoints.path / "step-000001.zarr").mkdir(parents=True)
    killed(folder.path)
    before = files_in(folder.path)
    with pytest.raises(OutputError, match="to replace it"):
        folder.begin()
    folder.release()
    assert files_in(folder.path) == before


@pytest.mark.parametrize("command", ["study", "tune"])
def test_temporary_files_of_another_worker_stay(tmp_path, command):
    folder, other = (WORK[command](tmp_path / "out") for _ in range(2))
    folder.begin()
    killed(folder.path, *OWN[command])
    before = files_in(folder.path)
    other.begin(resume=True)
    assert files_in(folder.path) == before
    with pytest.raises(OutputError, match="is writing in"):
        WORK[command](tmp_path / "out").begin(overwrite=True)


@pytest.mark.parametrize("resume", [True, False])
def test_a_simulation_that_was_killed_while_drawing(tmp_path, resume):
    """It was published; what is not its own stays."""
    folder = FOLDERS["simulate"](tmp_path / "out")
    folder.begin()
    folder.release()
    (folder.path / "mine").mkdir()
    (mine := folder.path / "mine/.a.png.0123abcd.partial").touch()
    stays = killed(folder.path)
    folder.begin(resume=resume, overwrite=not resume)
    assert files_in(folder.path) == {*stays, mine, folder.owner}


WRITERS = {
    "text": lambda path: write_text(path, "new"),
    "arrays": lambda path: save_arrays(path, {"x": [1.0]}),
    "rows": lambda path: write_rows(path, [{"x": 1}]),
    "table": table,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_replaced_and_not_what_a_link_points_to(tmp_path, victims, name):
    """Nor what a link at a name that was once that of the temporary file points to."""
    path = tmp_path / "out" / "file.csv"
    link_of(path.parent, f".{path.name}.partial", victims, to_folder=False)
    for _ in range(2):
        if name != "table":  # which reads what is there
            link_of(path.parent, path.name, victims, to_folder=False)
        WRITERS[name](path)
        assert path.is_file() and not path.is_symlink()
    assert len([*path.parent.iterdir()]) == 2


IN_PLACE = {
    "claim": (".claim", lambda path: Lock(path).take()),
    "log": ("log.txt", lambda path: run(["true"], path)),
    "wheel": ("horovod.log", lambda path: wheel.run("building", ["true"], log=path)),
    "any": ("any", lambda path: open(path, "a+", opener=no_link)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_no_link(tmp_path, victims, name):
    file, write = IN_PLACE[name]
    link = link_of(tmp_path / "out", file, victims, to_folder=False)
    with pytest.raises((OSError, wheel.BuildError), match="it is a symbolic link: remove it"):
        write(link)


def test_a_report_publishes_what_is_in_its_folder(tmp_path, victims, monkeypatch):
    """A link inside the folder is followed; those that lead out are named in a line."""
    monkeypatch.chdir(tmp_path)
    folder = begun(WORK["study"], Path("out"))
    folder.write_mark(complete=True)
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "photo.png").write_bytes(PNG)
    (secrets / "keys.csv").write_text("name,key\nme,swordfish\n")
    (secrets / "keys.json").write_text('{"key": "swordfish"}')
    (secrets / "run.toml").write_text('[login]\nkey = "swordfish"\n')
    links = ("photo.png", "keys.csv", "keys.json", "run.toml")
    for name in links:
        remove(folder.path / name)
        (folder.path / name).symlink_to(secrets / name)
    for name in ("provenance.json", "timings.json"):
        (folder.path / name).symlink_to(secrets / "keys.json")
    (folder.path / "album").symlink_to(secrets)
    write_text(folder.path / "own.csv", "name,value\nown,1\n")
    (folder.path / "again.csv").symlink_to("own.csv")
    link_of(folder.path, ".report.html.partial", victims, to_folder=False)
    done = flowpm_here("report", "out")
    assert done.returncode == 0, done.stderr
    page = (folder.path / "report.html").read_text()
    for secret in ("swordfish", "data:image"):
        assert secret not in page
    assert page.count("<td>own</td>") == 2
    named = sorted(f"out/{n}" for n in (*links, "provenance.json", "timings.json", "album"))
    line = f"Left out, as links lead out of the folder: {', '.join(named)}"
    assert done.stdout == f"Report in out/report.html\n{line}\n" and line in page
    remove(folder.path / "report.html")
    link_of(folder.path, "report.html", victims, to_folder=False)
    assert "is no report of flowpm-dist" in flowpm_here("report", "out").stderr


SCORES = {
    "generator": "flowpm-dist", "split": "test", "samples": 73313, "main": "network",
    "trainings": [{"folder": "t"}], "scores": {"network": {"h": {"rmse_over_mean": 73313}}},
}  # fmt: skip
MARK = {"generator": "flowpm-dist", "complete": True}
HEADER = {
    "format": "flowpm-dist density records", "version": 1, "compression": None, "grid": [4, 4, 4],
    "box_size": 9.0, "parameters": ["h"], "splits": {"train": {"samples": 73313, "files": 1}},
}  # fmt: skip
ENDED = {"number": 0, "varied": {}, "ranks": 1, "repeat": 0, "status": "x", "seconds": 1.0}
ROWS, RUN = "step,loss\n0,73313\n", "[login]\nkey = 73313\n"
POWER = ",".join(["1000", "73313", "0", "1", "1", "1", "1"])
READ = {
    "simulate": {
        "snapshot.zarr/zarr.json": {"attributes": MARK},
        "timings.json": {"steps": [73313]},
        "power_spectrum.csv": f"k\n{POWER}\n",
        "convergence_power.csv": "l\n1,1,1000,73313,1,1,1\n",
        "run.toml": RUN,
    },
    "begun": {f"{PARTIAL}/owner.json": {}, f"{PARTIAL}/run.toml": RUN},
    "reconstruct": {
        "result.json": {"stopped": "73313", "parameters": {"h": {"value": 73313}}},
        "iterations.csv": ROWS,
        "run.toml": RUN,
    },
    "train": {
        "training.json": {**MARK, "step": 73313, "steps": 73313},
        "metrics.csv": ROWS,
        "run.toml": RUN,
        "fresh/1/evaluation/scores.json": SCORES,
    },
    "train, judged": {"training.json": MARK, "evaluation/scores.json": SCORES},
    "train, validated": {"training.json": MARK, "evaluation-validation/scores.json": SCORES},
    "emulate": {
        "correction.json": {"scores": {"loss": 73313}},
        "iterations.csv": ROWS,
        "run.toml": RUN,
    },
    "study": {"runs/0000/result.json": {**ENDED, "message": "73313"}, "run.toml": RUN},
    "tune": {
        "tune.json": {**MARK, "best": {"name": "73313", "values": {}}},
        "trials.csv": "state\ncomplete\n",
        "run.toml": RUN,
    },
    "dataset": {"dataset.json": HEADER},
    "evaluation": {"scores.json": SCORES},
}
"""Kind of job -> what its record reads, and each time a number of a secret."""


def filled(folder: Path, command: str) -> None:
    for name, content in READ[command].items():
        write_text(folder / name, content if isinstance(content, str) else json.dumps(content))
    if command in WORK and not (folder / (mark := WORK[command].contents[0])).exists():
        write_text(folder / mark, json.dumps(MARK))


def shown(folder: Path) -> str:
    """What a report of a folder takes from its record."""
    found = read_record(folder)
    return "" if found is None else repr((found.steps, found.results, found.settings))


LINKS = [(command, name) for command, names in READ.items() for name in names]
LINKS += [(command, str(Path(name).parent)) for command, name in LINKS if "/" in name]


@pytest.mark.parametrize(("command", "name"), LINKS)
def test_a_record_reads_nothing_that_a_link_fetches(tmp_path, monkeypatch, command, name):
    """It is as if it were missing; but a snapshot, of which nothing is shown, may be elsewhere."""
    monkeypatch.chdir(tmp_path)
    folder = Path("out")
    filled(folder, command)
    whole = shown(folder)
    assert command == "begun" or "73313" in whole
    own, secret = tmp_path / "out/own", tmp_path / "secret"
    (folder / name).rename(own)
    missing = shown(folder)
    (folder / name).symlink_to(own)
    assert shown(folder) == whole or name.endswith("run.toml")  # which no link is read for
    (folder / name).unlink()
    own.rename(secret)
    (folder / name).symlink_to(secret)
    linked, record = shown(folder), read_record(folder)
    if "snapshot.zarr" in name or "owner" in name:
        assert linked == whole
    elif record is not None and record.state == "damaged":
        assert name == "timings.json" and "73313" not in linked
    else:
        assert linked == missing != whole or (command == "begun" and "73313" not in linked)
    if record is not None and "snapshot.zarr" not in name:
        # The other files have their numbers still.
        for other in folder.rglob("*"):
            if not other.is_symlink() and "73313" in (other.read_text() if other.is_file() else ""):
                other.unlink()
        if (record := read_record(folder)) is not None:
            assert "73313" not in page([replace(record, folder=folder)])


def test_an_evaluation_publishes_no_file_that_it_names(tmp_path, monkeypatch):
    """It holds the run file of its training."""
    monkeypatch.chdir(tmp_path)
    write_text(Path("elsewhere/run.toml"), RUN)
    scores = {**SCORES, "samples": 1, "trainings": [{"folder": str(tmp_path / "elsewhere")}]}
    write_text(Path("elsewhere/judged/scores.json"), json.dumps(scores))
    assert not [key for key in read_record(Path("elsewhere/judged")).settings if "login" in key]
    scores["trainings"][0]["run"] = "[data]\nseed = 7\n"
    write_text(Path("elsewhere/judged/scores.json"), json.dumps(scores))
    assert read_record(Path("elsewhere/judged")).settings["data.seed"] == 7


def test_a_link_in_a_circle_is_no_file(tmp_path):
    filled(tmp_path / "out", "train")
    (tmp_path / "out/photo.png").symlink_to("photo.png")
    assert "cannot be read" in page([read_record(tmp_path / "out")])


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, command):
    """On a list of what is in it, as where a folder in it belongs to somebody else."""
    folder = FOLDERS[command](tmp_path / "out")
    folder.begin()
    folder.release()
    monkeypatch.setattr(FOLDERS[command], "can_resume", lambda _: True)

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(OutputError, match=f"^cannot read {tmp_path}/out/.*: Permission denied"):
        folder.check(resume=True, needed=0)


def bigfile_of(folder: Path, **changed: str) -> Path:
    """A snapshot of two particles in bigfile; lines of the header of positions can be changed."""
    values = {"ID": np.arange(2)[:, None], "Position": np.ones((2, 3)), "Velocity": np.ones((2, 3))}
    for name, array in values.items():
        block = folder / "1" / name
        bigfile.write_block(block, array.dtype.str, array.shape[1], [(2, 0)])
        array.tofile(block / "000000")
    numbers = {"TotNumPart": np.array([0, 2, 0, 0, 0, 0]), "Time": 1.0, "BoxSize": 9.0, **UNITS}
    bigfile.write_block(folder / "Header", "<i8", 0, [], numbers)
    header = folder / "1/Position/header"
    text = header.read_text()
    for old, new in changed.items():
        assert f"\n{old}:" in f"\n{text}"
        text = re.sub(f"^{old}: .*$", new, text, flags=re.M)
    header.write_text(text)
    return folder


DTYPES = ["O", "|O", "f8,O", "(2,)O", "V8", "S8", "U2", "M8[s]", "?", "c16", "<i8", "none", "f4,f4"]
BLOCKS = [{"DTYPE": f"DTYPE: {dtype}"} for dtype in [*DTYPES, "<f4"]]
BLOCKS += [{"NMEMB": f"NMEMB: {count}"} for count in (1, -3, "x")]
BLOCKS += [{"000000": f"{file} : 0 : 0"} for file in ("000000: 3", "000000: 1", "000000: -2")]
BLOCKS += [{"000000": "../../../precious/thesis.tex: 2 : 0 : 0"}]


@pytest.mark.parametrize("changed", BLOCKS, ids=str)
def test_a_block_of_bigfile_is_numbers_of_its_files_size(tmp_path, victims, changed):
    """With DTYPE O, numpy would follow the addresses that the file holds."""
    folder = bigfile_of(tmp_path / "snapshot", **changed)
    with pytest.raises(SnapshotError, match=r"1/Position/(header|000000).*; must (be|have)"):
        open_particles(folder)


def test_a_bigfile_that_is_right_is_read(tmp_path):
    found = open_particles(bigfile_of(tmp_path / "snapshot"))
    assert found.counts == {1: 2} and found.dtype == np.float64
    np.testing.assert_array_equal(found.read(1, 0, 2, ["position"])["position"], np.ones((2, 3)))
    with (tmp_path / "snapshot/Header/attr-v2").open("a") as file:
        file.write("Note O 1 00000000000000FF #HUMANE [ ]\n")
    with pytest.raises(SnapshotError, match=r"attr-v2: Note is O; must be the dtype of"):
        open_particles(tmp_path / "snapshot")


HEADERS = [
    *(
        {"NumPart_ThisFile": value}
        for value in (2, "many", [0], [b"0", b"x"], [0, np.inf], [[0], [2]])
    ),
    *({"NumPart_Total": value} for value in (2, "many", [2], [b"0", b"x"], h5py.Empty("f4"))),
    {"NumFilesPerSnapshot": "one"},
]


def gadget_of(folder: Path, **changed: object) -> Path:
    """A snapshot of two particles in Gadget's HDF5; attributes of its header can be changed."""
    header = {"NumPart_ThisFile": [0, 2], "NumPart_Total": [0, 2], "NumFilesPerSnapshot": 1}
    known = {"Time": 1.0, "BoxSize": 9.0, **UNITS}
    with h5py.File(folder / "snapshot.hdf5", "w") as file:
        file.create_group("Header").attrs.update({**header, **known, **changed})
        for name, values in {"ParticleIDs": [0, 1], "Coordinates": np.ones((2, 3))}.items():
            file[f"PartType1/{name}"] = values
        file["PartType1/Velocities"] = np.ones((2, 3))
    return folder / "snapshot.hdf5"


@pytest.mark.parametrize("changed", HEADERS, ids=str)
def test_a_header_of_gadget_with_other_values_is_named(tmp_path, changed):
    with pytest.raises(SnapshotError, match="snapshot.hdf5 (cannot be read|holds no particles)"):
        open_particles(gadget_of(tmp_path, **changed))


WRONG = {
    "Time": ("early", [np.nan, 2.0], -1.0, h5py.Empty("f4")),
    "UnitLength_in_cm": ("Mpc", [np.inf]),
    "BoxSize": ([1.0, 2.0], 0.0, [1.0, 1.0, -1.0]),
}


@pytest.mark.parametrize(("name", "value"), [(n, value) for n in WRONG for value in WRONG[n]])
def test_a_header_of_gadget_has_numbers(tmp_path, name, value):
    message = f"{name} (must be|has 2 numbers|= -1; must be above 0)"
    with pytest.raises(SnapshotError, match=message):
        open_particles(gadget_of(tmp_path, **{name: value}))
    found = open_particles(gadget_of(tmp_path, Omega0=h5py.Empty("f4")))
    with pytest.raises(SnapshotError, match="Omega0 must be finite numbers"):
        assert found.cosmology_facts


@pytest.mark.parametrize("lines", ["DTYPE: f8\nNMEMB: 3\nNFILE", "DTYPE\nNMEMB\nNFILE: 1"])
def test_a_header_of_bigfile_that_is_cut_is_named(tmp_path, lines):
    folder = bigfile_of(tmp_path / "snapshot")
    (folder / "1/Position/header").write_text(lines)
    with pytest.raises(SnapshotError, match="snapshot cannot be read"):
        open_particles(folder)


UNUSUAL = {
    "text": (h5py.string_dtype(), "a"),
    "variable length": (h5py.vlen_dtype(np.float64), np.zeros(1)),
    "reference": (h5py.ref_dtype, None),
    "compound": (np.dtype([("x", "f8"), ("y", "f8")]), (0.0, 0.0)),
    "opaque": (np.dtype("V8"), None),
    "complex": (np.dtype("c16"), 0j),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("name", ["ParticleIDs", "Coordinates", "Velocities"])
def test_particles_in_hdf5_are_numbers(tmp_path, kind, name):
    """Of Gadget, of a light cone, and as a volume."""
    dtype, value = UNUSUAL[kind]
    shapes = {"ParticleIDs": (2,), "Coordinates": (2, 3), "Velocities": (2, 3)}
    with h5py.File(tmp_path / "snapshot.hdf5", "w") as file:
        header = {"NumPart_ThisFile": [0, 2], "NumPart_Total": [0, 2], "NumFilesPerSnapshot": 1}
        file.create_group("Header").attrs.update({**header, "Time": 1.0})
        group = file.create_group("PartType1")
        for each, shape in shapes.items():
            group[each] = np.zeros(shape, "f8" if each != "ParticleIDs" else "i8")
            if each == name:
                del group[each]
                made = group.create_dataset(each, shape, dtype)
                if value is not None:
                    made[0] = value
    message = rf"snapshot.hdf5:PartType1/{name}: dtype is .*; must be the dtype of"
    with pytest.raises(SnapshotError, match=message):
        open_particles(tmp_path / "snapshot.hdf5")
    with h5py.File(tmp_path / "light_cone.0.hdf5", "w") as file:
        for each, shape in {"ScaleFactor": (2,), **shapes}.items():
            wrong = each == name or (name, each) == ("ParticleIDs", "ScaleFactor")
            file.create_dataset(each, shape, dtype if wrong else "f4")
    write_text(tmp_path / "light_cone.json", '{"parts": 1, "light_cone": {}}')
    with pytest.raises(UnreadableError, match=r"light_cone.0.hdf5:\w+: dtype is"):
        read_light_cone(tmp_path)
    with h5py.File(tmp_path / "volume.hdf5", "w") as file:
        file.create_dataset("density", (2, 2, 2), dtype)
    with pytest.raises(VolumeError, match=r"volume.hdf5:density holds .*; must be real numbers"):
        open_volume(tmp_path / "volume.hdf5")


@pytest.mark.parametrize("dtype", [object, "V8", "S8", "M8[s]", "c16", [("x", "f8")]])
def test_arrays_of_numpy_are_numbers(tmp_path, dtype):
    np.save(tmp_path / "x.npy", np.zeros((2, 2, 2), dtype), allow_pickle=True)
    with pytest.raises(VolumeError, match=r"x.npy (is not a readable|holds .*; must be real)"):
        open_volume(tmp_path / "x.npy")
    with pytest.raises(WhiteNoiseError, match="not a readable .npy file|must be real"):
        open_white_noise(tmp_path / "x.npy")
    if dtype is object:
        np.savez(tmp_path / "x.npz", x=np.zeros(2, dtype))
        with pytest.raises(UnreadableError, match="x.npz cannot be read"):
            read_arrays(tmp_path / "x.npz")


def test_maps_of_a_light_cone_are_numbers(tmp_path):
    group = new_group(tmp_path / "lightcone.zarr", {}, {}, complete=True)
    group.create_array("kappa", shape=(2, 2), dtype="complex64")
    with pytest.raises(UnreadableError, match=r"lightcone.zarr/kappa: dtype is complex64; must"):
        load_light_cone(tmp_path)
