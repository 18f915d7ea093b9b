"""TensorFlow's notices at import are left out; whatever else it prints is not."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest

import flowpm_dist as fpm
import meshimpl
from flowpm_dist.options import keys_of
from flowpm_dist.simulation.options import SolverKeys, SolverOptions

NOTICES = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795238643.656653    9910 port.cc:153] oneDNN custom operations are on.",
)
NEWS = "E0000 00:00:1795238643.656653    9910 allocator.cc:1] out of memory"


@pytest.fixture
def errors_of_import(tmp_path: Path):
    """What comes on standard error from importing a stand-in for TensorFlow that ends so."""

    def run(ending: str = "", level: str = "2") -> str:
        lines = [f"import os; os.write(2, {line + chr(10)!r}.encode())" for line in NOTICES]
        lines += [f"os.write(2, {NEWS + chr(10)!r}.encode())", ending]
        (tmp_path / "tensorflow.py").write_text("\n".join(lines))
        code = (
            "import sys\n"
            "from meshimpl.imports import import_tensorflow\n"
            "import_tensorflow()\n"
            "print('after', file=sys.stderr)\n"
        )
        path = f"{tmp_path}{os.pathsep}{Path(meshimpl.__file__).parents[1]}"
        env = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": level}
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
        return result.stderr

    return run


def test_public_names_are_listed_and_typed(tmp_path: Path) -> None:
    """By `dir`, and by mypy, which reads imports that Python leaves until they are needed."""
    code = "import flowpm_dist, sys; print(*dir(flowpm_dist), 'tensorflow' in sys.modules)"
    *listed, loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    public = [name for name in listed if not name.startswith("__")]
    assert {*fpm.__all__} <= {*public} and "lazy_names" not in public and loaded == "False"
    assert fpm.__version__ == version("flowpm-dist")
    script = tmp_path / "script.py"
    names = [f"reveal_type(fpm.{name})\n" for name in fpm.__all__]
    call = "fpm.Simulation(fpm.Cosmology.planck18(), 8, 16.0, [0.1, 1.0], lptorder=2)\n"
    script.write_text(f"import flowpm_dist as fpm\n{''.join(names)}fpm.no_such_name\n{call}")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent"]
    command += [f"--cache-dir={tmp_path}", "--ignore-missing-imports", str(script)]
    root = Path(meshimpl.__file__).parents[1]
    lines = subprocess.run(command, capture_output=True, text=True, cwd=root).stdout.splitlines()
    revealed = [line.partition("Revealed type is ")[2] for line in lines[: len(names)]]
    assert all(revealed) and not any(each == '"Any"' for each in revealed), lines
    assert 'has no attribute "no_such_name"' in lines[len(names)]
    assert 'Unexpected keyword argument "lptorder" for "Simulation"' in lines[len(names) + 1]


def test_options_are_the_keywords_of_a_simulation() -> None:
    hints, keys = get_type_hints(SolverOptions), get_type_hints(SolverKeys)
    assert list(keys) and {*keys} == {*keys_of(SolverOptions)}
    for name in {*keys} & {*hints}:
        assert keys[name] in (hints[name], hints[name] | str), name


def test_only_the_notices_are_left_out(errors_of_import) -> None:
    assert errors_of_import().splitlines() == [NEWS, "after"]


def test_everything_is_printed_on_request(errors_of_import) -> None:
    assert errors_of_import(level="0").splitlines() == [*NOTICES, NEWS, "after"]


def test_a_failed_import_is_still_reported(errors_of_import) -> None:
    errors = errors_of_import("raise ImportError('no libfoo')").splitlines()
    assert errors[0] == NEWS
    assert errors[-1] == "ImportError: no libfoo"


def test_keras_is_loaded_when_it_is_used() -> None:
    """Nor does the garbage collector look through TensorFlow.

    It looks 600 times otherwise. What users made before is collected as ever.
    """
    code = (
        "import gc, sys\n"
        "from meshimpl import compat, imports\n"
        "phases = []\n"
        "gc.callbacks.append(lambda phase, _: phases.append(phase))\n"
        "imports.import_tensorflow()\n"
        "assert len(phases) < 10 and gc.isenabled() and not gc.get_freeze_count()\n"
        "assert not {'keras', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "import tensorflow as tf\n"
        "assert tf.keras.optimizers.Adam.__module__.startswith('keras')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed")
def test_horovod_loads_keras_for_its_layer_alone() -> None:
    code = (
        "import sys\n"
        "from meshimpl import imports\n"
        "imports.import_tensorflow()\n"
        "from meshimpl import engine\n"
        "horovod = engine.import_horovod()\n"
        "assert horovod.allreduce and 'keras' not in sys.modules\n"
        "assert not hasattr(horovod, 'no_such_name')\n"
        "from horovod.tensorflow import SyncBatchNormalization\n"
        "assert issubclass(SyncBatchNormalization, sys.modules['keras'].layers.Layer)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_notebook_is_not_told_of_each_graph(tmp_path):
    """TensorFlow prints to the standard output of an interactive Python what is logged as INFO."""
    lines = """
import flowpm_dist as fpm
steps = fpm.scale_factor_steps(0.1, 1.0, 1)
sim = fpm.Simulation(fpm.Cosmology.planck18(), grid=4, box_size=64.0, steps=steps)
state = sim.lpt(seed=1)
"""
    command = [sys.executable, "-i", "-q"]
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "Error" not in done.stderr
    assert done.stdout == ""
