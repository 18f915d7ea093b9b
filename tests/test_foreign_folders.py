"""Folders and files that somebody else has packed: their links and names lead nowhere."""

import shutil
from pathlib import Path

import pytest
from commands import flowpm_here

from flowpm_dist.io.files import no_link, remove, save_arrays, write_text
from flowpm_dist.jobs.folder import OutputError, WorkFolder
from flowpm_dist.jobs.job import JOBS, job_class
from flowpm_dist.jobs.results import Table
from flowpm_dist.simulate.folder import PARTIAL
from flowpm_dist.studies.process import Claim, run
from flowpm_dist.studies.summary import write_rows

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
    for resume in (True, False):
        with pytest.raises(OutputError, match=f"^{link} is a symbolic link"):
            FOLDERS["simulate"](folder.path).begin(resume=resume, overwrite=True)
    with pytest.raises(OutputError, match=f"^{link} is a symbolic link"):
        folder.check(resume=True, needed=0)
    link.unlink()
    folder.begin(overwrite=True)
    for published in folder.all_contents:
        link_of(folder.path, published, victims, to_folder=to_folder)
    (folder.partial / "run.toml").write_text("")
    folder.publish()
    assert [path.name for path in folder.path.iterdir()] == ["run.toml"]


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
    "claim": (".claim", lambda path: Claim(path.parent).take()),
    "log": ("log.txt", lambda path: run(["true"], path)),
    "any": ("any", lambda path: open(path, "a+", opener=no_link)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_no_link(tmp_path, victims, name):
    file, write = IN_PLACE[name]
    link = link_of(tmp_path / "out", file, victims, to_folder=False)
    with pytest.raises(OSError, match="it is a symbolic link: remove it"):
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
