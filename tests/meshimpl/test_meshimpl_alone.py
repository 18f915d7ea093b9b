"""meshimpl is installed and used without flowpm_dist and what only that needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

from meshimpl.horovod_wheel import __main__ as horovod_command
from meshimpl.horovod_wheel import wheel
from meshimpl.launch import __main__ as launch_command

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mesh_model.py"
# A module that is None there cannot be imported.
ALONE = """
import runpy, sys
absent = "flowpm_dist astropy camb h5py healpy matplotlib pydantic scipy sklearn typer zarr".split()
sys.modules.update(dict.fromkeys(absent))
sys.argv = ["mesh_model.py", "--steps", "11"]
runpy.run_path({example!r}, run_name="__main__")
print(sys.modules["meshimpl"].__file__)
"""


def test_the_distribution_alone(tmp_path: Path) -> None:
    source = tmp_path / "meshimpl"
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "meshimpl", source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (built,) = tmp_path.glob("meshimpl-*.whl")
    library = tmp_path / "library"
    zipfile.ZipFile(built).extractall(library)
    for path in (*wheel.HERE.glob("*.txt"), *wheel.HERE.glob("*.toml")):
        assert (library / path.relative_to(ROOT)).read_text() == path.read_text()
    code = ALONE.format(example=str(EXAMPLE))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PATH": "", "PYTHONPATH": str(library), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    first, second, place = done.stdout.splitlines()
    assert first.startswith("step   0  loss") and second.startswith("step  10  loss")
    assert float(second.split()[-1]) < float(first.split()[-1])
    assert Path(place).is_relative_to(library)


def test_its_packages_are_all_named() -> None:
    named = tomllib.loads((ROOT / "meshimpl" / "pyproject.toml").read_text())
    found = find_packages(str(ROOT), include=["meshimpl", "meshimpl.*"])
    assert sorted(named["tool"]["setuptools"]["packages"]) == sorted(found)


def test_launch_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    given: list[object] = []

    def relaunch(ranks: int, argv: list[str], program: list[str]) -> int:
        given.extend([ranks, argv, program])
        return 7

    monkeypatch.setattr(launch_command, "relaunch", relaunch)
    monkeypatch.setattr(sys, "argv", ["launch", "3", str(EXAMPLE), "--steps", "2"])
    assert launch_command.main() == 7
    assert given == [3, ["--steps", "2"], [sys.executable, str(EXAMPLE)]]
    monkeypatch.setattr(sys, "argv", ["launch", "3", "no_such.py"])
    with pytest.raises(SystemExit, match="2"):
        launch_command.main()
    assert "there is no script no_such.py" in capsys.readouterr().err


def test_horovod_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def install(mpi: str) -> None:
        raise wheel.BuildError(f"no mpicxx for {mpi}")

    monkeypatch.setattr(wheel, "install", install)
    monkeypatch.setattr(sys, "argv", ["horovod_wheel", "--mpi", "system"])
    assert horovod_command.main() == 1
    assert capsys.readouterr().err == "error: no mpicxx for system\n"
