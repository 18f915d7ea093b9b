"""An installed package compiles kernels and Horovod into the user's cache, and finds them there."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
from commands import flowpm_here

from flowpm_dist.particle_mesh.kernels import build, compiled
from meshimpl.horovod_wheel import wheel

ROOT = Path(__file__).parents[1]
FITTING = build.identity(tf.__version__)
OTHERS = build.identity("1.0"), FITTING.replace("kernels ", "kernels 0")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """An installation without a library, and an empty cache; a library loads as its path."""
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "PATH", tmp_path / "installed.so")
    monkeypatch.setattr(tf, "load_op_library", lambda path: Path(path))
    return tmp_path


load = compiled.load.__wrapped__
"""Without what it remembers."""


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_library_of_the_installation_comes_first(places):
    assert load() == (None, compiled.NOT_BUILT)
    cached = written(compiled.cached_path(), FITTING)
    assert load() == (cached, None)
    assert load() == (cached, None)
    installed = written(compiled.PATH, FITTING)
    assert load() == (installed, None)
    for other in OTHERS:
        written(installed, other)
        assert load() == (cached, None)
    cached.unlink()
    assert "was built from other sources, or for another TensorFlow" in load()[1]


def test_each_tensorflow_and_each_source_has_its_own_library(places, monkeypatch):
    first = compiled.cached_path()
    assert first.is_relative_to(places / "cache")
    monkeypatch.setattr(tf, "__version__", "2.99.0")
    second = compiled.cached_path()
    changed = written(places / "ops.cc", "changed")
    monkeypatch.setattr(build, "sources", lambda: [changed])
    assert len({first, second, compiled.cached_path()}) == 3


def test_kernels_are_built_where_they_are_looked_for(places, monkeypatch):
    monkeypatch.setattr(build, "build", lambda path, objects: written(path, FITTING))
    monkeypatch.setattr(compiled, "load", load)
    done = flowpm_here("build", "kernels")
    assert done.returncode == 0, done.stderr
    assert str(compiled.cached_path()) in done.stdout

    def broken(path, objects):
        raise build.BuildError("no C++ compiler (g++ is not there)")

    monkeypatch.setattr(build, "build", broken)
    done = flowpm_here("build", "kernels")
    assert (done.returncode, "no C++ compiler" in done.stderr) == (1, True)


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """What building Horovod would run; wheels are empty files."""
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path))
    ran: list[str] = []
    facts = {"flavour": "cpu", "python": "cpython-311", "machine": "x86_64"}

    def build_wheel(target, facts, log):
        assert target.tools is not None
        ran.append("build")
        return written(wheel.cache_folder(facts) / "horovod-0.whl", "")

    monkeypatch.setattr(wheel, "run", lambda step, command, **_: ran.append(step))
    monkeypatch.setattr(wheel, "built_against", lambda target: facts)
    monkeypatch.setattr(wheel, "missing_compiler", lambda: None)
    monkeypatch.setattr(wheel, "build", build_wheel)
    monkeypatch.setattr(wheel, "prove", lambda target, folder: wheel.say("MPI 1, NCCL 0"))
    return ran


def test_horovod_is_built_once(steps):
    needs, tools, installs = (
        "installing what Horovod needs",
        "fetching CMake and the build packages",
        "installing Horovod",
    )
    done = flowpm_here("build", "horovod")
    assert (done.returncode, "MPI 1" in done.stdout) == (0, True), done.stderr
    assert steps == [needs, tools, "build", installs]
    steps.clear()
    wheel.install()
    assert steps == [needs, installs]


def test_horovod_without_a_compiler(steps, monkeypatch):
    monkeypatch.setattr(wheel, "missing_compiler", lambda: "apt-get install g++ make")
    done = flowpm_here("build", "horovod")
    assert done.returncode == 1
    assert "apt-get install g++ make" in done.stderr
    assert "build" not in steps


@pytest.mark.parametrize("with_horovod", [True, False])
def test_one_gpu_needs_no_cuda_toolkit(tmp_path, monkeypatch, capsys, with_horovod):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import set_up

    def no_toolkit():
        raise wheel.BuildError("Horovod with NCCL needs NVIDIA's compiler nvcc")

    monkeypatch.setattr(wheel, "cuda_home", no_toolkit)
    monkeypatch.setattr(wheel, "missing_compiler", lambda: None)
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(set_up, "inputs_of", lambda venv, mpi: {"venv": str(venv)})
    venv = tmp_path / ".venv-gpu"
    monkeypatch.setattr(set_up, "make_venv", lambda path: (path / "bin").mkdir(parents=True))
    monkeypatch.setattr(wheel.Target, "python", sys.executable)
    done = []
    for step in ("install_packages", "install_project", "remove"):
        monkeypatch.setattr(set_up, step, lambda *_, step=step: done.append(step))
    set_up.set_up("gpu", "openmpi", with_horovod)
    assert done == ["install_packages", "install_project", "remove"]
    assert set_up.read_stamp(venv)["horovod"] == ""
    assert ("one rank only: no CUDA toolkit" in capsys.readouterr().out) == with_horovod


def test_a_target_of_this_python_needs_no_environment_of_ours(tmp_path):
    here = wheel.Target(Path(sys.prefix), "openmpi", "cpu", tmp_path)
    assert here.python == Path(sys.executable)
    environment = wheel._environment(here, tmp_path)
    assert environment["HOROVOD_CMAKE"] == str(tmp_path / "bin" / "cmake")
    assert environment["PYTHONPATH"] == str(tmp_path)


def test_an_installed_package_has_all_that_is_built_from(tmp_path):
    tree = tmp_path / "project"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("flowpm_dist", "meshimpl"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    built = SimpleNamespace(
        kernels=tmp_path / "lib/flowpm_dist/particle_mesh/kernels",
        horovod=tmp_path / "lib/meshimpl/horovod_wheel",
    )
    wanted = {path.name for path in build.sources()}
    assert len(wanted) > 10
    assert wanted <= {path.name for path in built.kernels.iterdir()}
    for path in (wheel.REQUIREMENT, wheel.BUILD_REQUIREMENTS, wheel.MPI_REQUIREMENT):
        assert (built.horovod / path.name).read_text() == path.read_text()
