"""An installed package compiles kernels and Horovod into the user's cache, and finds them there."""

import io
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf
from commands import flowpm_here, plain

from flowpm_dist.particle_mesh.kernels import build, compiled, nvrtc
from meshimpl.horovod_wheel import wheel
from meshimpl.launch import rank, user_cache

ROOT = Path(__file__).parents[2]
FITTING = build.identity(tf.__version__)
OTHERS = build.identity("1.0"), FITTING.replace("kernels ", "kernels 0")
COMPILER = """
import struct, sys, time
words = sys.argv[1:]
out = words[words.index("-o") + 1]
if "-shared" not in words:
    named = [word[19:-1] for word in words if word.startswith("-DFLOWPM_IDENTITY")]
    open(out, "w").write("".join(named))
    raise SystemExit
open({links!r}, "a").write("link\\n")
text = b"".join(open(word, "rb").read() for word in words if word.endswith(".o"))
library = {library}
with open(out, "wb") as file:
    for part in (library[:99], library[99:]):
        file.write(part)
        file.flush()
        time.sleep({seconds})
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """An installation without a library, and an empty cache; a library loads as its path."""
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "PATH", tmp_path / "installed.so")
    monkeypatch.setattr(tf, "load_op_library", lambda path: Path(path))
    return tmp_path


load = compiled.load.__wrapped__
"""Without what it remembers."""


def library_of(text: str) -> bytes:
    """A file that has the head of a shared library, a text, and a table of one section."""
    body = text.encode()
    head = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q10xHH", 64 + len(body), 64, 1)
    return head.ljust(64, b"\0") + body + bytes(64)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(library_of(text))
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
    whole = cached.read_bytes()
    for cut in (whole[:-1], whole[: 64 + len(FITTING)]):
        cached.write_bytes(cut)  # the loader would read beyond the end
        assert load() == (None, "_kernels.so is damaged: its end is missing")
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


def compile_with(places, monkeypatch, library: str, seconds: float = 0.0) -> Path:
    """Takes a program as the compiler, which links this slowly; returns the list of its links."""
    links, script = places / "links", places / "compiler.py"
    script.write_text(COMPILER.format(links=str(links), library=library, seconds=seconds))
    monkeypatch.setenv("CXX", f"{sys.executable} -I -S {script}")
    return links


def test_two_builds_in_one_cache_leave_one_library(places, monkeypatch):
    """Who comes second waits, and takes the library; nobody ever sees a part of one."""
    links = compile_with(places, monkeypatch, repr(library_of(FITTING)), seconds=0.3)
    path, whole = compiled.cached_path(), library_of(FITTING)
    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(compiled.build_into_cache) for _ in range(2)]
        while not all(each.done() for each in builds):
            assert not path.exists() or path.read_bytes() == whole
            time.sleep(0.01)
        assert [each.result() for each in builds] == [path, path]
    assert path.read_bytes() == whole and links.read_text() == "link\n"
    assert {*path.parent.iterdir()} == {path, path.with_suffix(".lock")}
    compiled.build_into_cache()
    assert links.read_text() == 2 * "link\n"  # asked for again, it is built again


BROKEN = {
    "cut": f"{library_of(FITTING)!r}[:-1]",
    "a third": f"{library_of(FITTING)!r}[:50]",
    "others": repr(library_of(OTHERS[0])),
    "empty": "b''",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_library_that_is_not_whole_is_not_published(places, monkeypatch, kind):
    """The older one stays, and nothing else does."""
    compile_with(places, monkeypatch, BROKEN[kind])
    older = written(compiled.cached_path(), FITTING)
    with pytest.raises(build.BuildError, match="left a library that (is damaged|was built from)"):
        compiled.build_into_cache()
    assert older.read_bytes() == library_of(FITTING)
    assert {*older.parent.iterdir()} == {older, older.with_suffix(".lock")}


def give_away(path: Path, monkeypatch) -> None:
    """Lets a path belong to another user."""
    real = Path.stat

    def stat(self, **options):
        found = real(self, **options)
        if self != path:
            return found
        return SimpleNamespace(st_mode=found.st_mode, st_uid=os.geteuid() + 1)

    monkeypatch.setattr(Path, "stat", stat)


def share(path: Path, monkeypatch) -> None:
    path.chmod(path.stat().st_mode | 0o020)


FAULTS = {
    "owner": (give_away, "belongs to another user.*set FLOWPM_CACHE to a folder of your own"),
    "mode": (share, "can be changed by other users.*run chmod -R go-w /"),
}


@pytest.mark.parametrize("variable", ["FLOWPM_CACHE", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("fault", FAULTS)
def test_code_is_not_loaded_from_a_cache_of_others(places, monkeypatch, variable, level, fault):
    """Neither the file nor a folder of the cache may be another user's.

    The library of the installation may be root's or a colleague's, as the whole installation.
    """
    if variable == "XDG_CACHE_HOME":
        monkeypatch.delenv("FLOWPM_CACHE")
        monkeypatch.setenv(variable, str(places / "cache"))
    cached = written(compiled.cached_path(), FITTING)
    installed = written(compiled.PATH, FITTING)
    (spoil, words), chain = FAULTS[fault], [cached, *cached.parents]
    assert load() == (installed, None)
    installed.unlink()
    assert load() == (cached, None)
    spoil(chain[level], monkeypatch)
    operations, reason = load()
    assert operations is None and re.search(f"{chain[level]} {words}", reason)
    written(compiled.PATH, FITTING)
    spoil(compiled.PATH, monkeypatch)
    assert load() == (installed, None)


@pytest.mark.parametrize("fault", FAULTS)
def test_machine_code_of_gpus_is_not_loaded_from_others(places, monkeypatch, fault):
    monkeypatch.setattr(nvrtc, "compiled", lambda capability: library_of("own"))
    assert nvrtc.gpu_code((9, 0)) == library_of("own")
    (kept,) = (places / "cache").glob("kernels/*/gpu.cubin")
    kept.write_bytes(library_of("foreign"))
    assert nvrtc.gpu_code((9, 0)) == library_of("foreign")
    kept.write_bytes(library_of("foreign")[:-1])
    assert nvrtc.gpu_code((9, 0)) == library_of("own") == kept.read_bytes()
    kept.write_bytes(library_of("foreign"))
    spoil, words = FAULTS[fault]
    spoil(kept, monkeypatch)
    with pytest.warns(UserWarning, match=f"compiled again: .*{words}"):
        assert nvrtc.gpu_code((9, 0)) == library_of("own")


def open_to_all(path: Path, monkeypatch) -> None:
    path.chmod(0o777)


def container(path: Path, monkeypatch) -> None:
    """Shows the owner as a container does that knows this user alone."""
    give_away(path, monkeypatch)
    monkeypatch.setattr(rank, "_unknown_owners", lambda: {os.geteuid() + 1})


@pytest.mark.parametrize(
    "spoil, words",
    [
        (give_away, "belongs to another user"),
        (open_to_all, "set FLOWPM_CACHE to a folder that only you can write to"),
        (share, ""),
        (container, ""),
    ],
)
def test_folders_above_a_cache(places, monkeypatch, spoil, words):
    """Whoever can rename the cache can put another in its place; a group above it is trusted."""
    cached = written(compiled.cached_path(), FITTING)
    spoil(places, monkeypatch)
    reason = load()[1] or ""
    assert words in reason and (f"{places} " in reason) == bool(words)
    assert bool(words) or load() == (cached, None)


def test_a_cache_for_code_is_private_whatever_the_umask(places, monkeypatch):
    """The user's own folder, which FLOWPM_CACHE names, stays as it is."""
    compile_with(places, monkeypatch, repr(library_of(FITTING)))
    before = os.umask(0o002)
    try:
        (places / "cache").mkdir()
        with pytest.raises(
            build.BuildError, match=f"{places}/cache can be changed by .*chmod -R go-w"
        ):
            compiled.build_into_cache()
        (places / "cache").chmod(0o1777)  # as /tmp
        compiled.build_into_cache()
        monkeypatch.delenv("FLOWPM_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(places))
        (places / "flowpm-dist").mkdir()
        path = compiled.build_into_cache()
    finally:
        os.umask(before)
    assert load() == (path, None)


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


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("level", range(3))
def test_horovod_is_not_installed_from_others(steps, monkeypatch, fault, level):
    wheel.install()
    (built,) = (user_cache() / "horovod").glob("*/horovod-0.whl")
    spoil, words = FAULTS[fault]
    spoil([built, *built.parents][level], monkeypatch)
    steps.clear()
    done = flowpm_here("build", "horovod")
    assert done.returncode == 1 and re.search(words, plain(done.stderr))
    assert steps == ["installing what Horovod needs"]


def test_a_wheel_that_is_cut_short_is_not_published(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWPM_CACHE", str(tmp_path / "cache"))
    facts = {"flavour": "cpu", "python": "cpython-311", "machine": "x86_64"}
    target, log = wheel.Target(tmp_path, "openmpi", "cpu"), tmp_path / "log"
    operations = tmp_path / "horovod-0/horovod/tensorflow"
    operations.mkdir(parents=True)
    log.touch()
    monkeypatch.setattr(wheel, "PATCHES", ())
    monkeypatch.setattr(wheel, "_source", lambda *_: log.touch() or tmp_path / "horovod-0")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("horovod.so", bytes(1000))

    def built(content):
        def run(step, command, **_):
            folder = Path(command[command.index("--wheel-dir") + 1])
            folder.mkdir(mode=0o777)
            assert (operations / "exchange.cc").read_bytes() == wheel.EXCHANGE.read_bytes()
            (folder / "horovod-0.whl").write_bytes(content)

        monkeypatch.setattr(wheel, "run", run)
        return wheel.build(target, facts, log)

    with pytest.raises(wheel.BuildError, match="horovod-0.whl was not written to its end"):
        built(packed.getvalue()[:500])
    assert [*(tmp_path / "cache/horovod").iterdir()] == []
    before = os.umask(0o002)
    try:
        assert built(packed.getvalue()).read_bytes() == packed.getvalue()
    finally:
        os.umask(before)


def test_horovod_without_a_compiler(steps, monkeypatch):
    monkeypatch.setattr(wheel, "missing_compiler", lambda: "apt-get install g++ make")
    done = flowpm_here("build", "horovod")
    assert done.returncode == 1
    assert "apt-get install g++ make" in done.stderr
    assert "build" not in steps


def test_an_environment_that_is_a_link_is_not_emptied(tmp_path, monkeypatch):
    """As between two working trees of git: the set-up of one would empty the other's."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import set_up

    (other := tmp_path / "other").mkdir()
    (other / "kept").touch()
    (tmp_path / ".venv").symlink_to(other)
    with pytest.raises(wheel.BuildError, match="is a link, whose folder would be emptied"):
        set_up.make_venv(tmp_path / ".venv")
    assert (other / "kept").exists()


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


def test_an_installed_package_has_all_that_is_built_from_and_the_style_of_reports(tmp_path):
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
    for path in (wheel.EXCHANGE, *wheel.HERE.glob("*.txt"), *wheel.HERE.glob("*.toml")):
        assert (built.horovod / path.name).read_text() == path.read_text()
    style = Path("flowpm_dist/jobs/report.css")
    assert (tmp_path / "lib" / style).read_text() == (ROOT / style).read_text()
