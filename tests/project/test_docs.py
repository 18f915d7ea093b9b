"""The blocks of code in the documentation run as they stand, in the order in which they stand.

Python blocks of a file share their names. Comments in the text, which no reader sees, help:

    <!-- test: skip because ... -->              the next block does not run
    <!-- test: with grid=128 as grid=16 -->      words of the next block that are replaced, in order
    <!-- test: before
    x = 1
    -->                                          Python that runs before the next block, or last

A shell block's commands must be known with all their options, and the files they name must exist;
test_examples.py runs them. A script of examples/ has a function `parser` for that. A TOML
block must fit into the run file that its comment names, as in
`<!-- test: within examples/train.toml -->`.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tomli_w
from typer.main import get_command

from flowpm_dist.cli.program import app
from flowpm_dist.cosmoflow.planning.declarations import DECLARATIONS
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.volumes.draws import Lanes
from flowpm_dist.cosmoflow.volumes.universes import maker_of
from flowpm_dist.cosmology import Cosmology
from flowpm_dist.emulate.options import EmulationOptions
from flowpm_dist.observables.tracers import ObservationError
from flowpm_dist.reconstruction import Posterior
from flowpm_dist.reconstruction.observed import model_of, observed_kind
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.simulate.options import SimulationOptions
from flowpm_dist.statistics import STATISTICS
from flowpm_dist.studies.options import StudyOptions
from flowpm_dist.studies.tuning.options import TuneOptions
from meshimpl.process_mesh import ProcessMesh

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TAKE_AWAY = ROOT / "docs" / "howto" / "take_away.md"
# By a section that only it has among those not looked for before.


def load_study(path: Path) -> StudyOptions:
    """A study file; its subject is relative to its folder."""
    if not (subject := path.with_name("study_simulation.toml")).exists():
        subject.write_text((ROOT / "examples" / subject.name).read_text())
    return StudyOptions.load(path)


LOADERS = {
    "study": load_study,
    "tune": TuneOptions.load,
    "truth": EmulationOptions.load,
    "network": TrainingPlan.load,
    "data": ReconstructionOptions.load,
    "box": SimulationOptions.load,
}
SCRIPT = re.compile(r"examples/.*\.py")
PIECE = re.compile(
    r"^<!-- test: (?P<kind>\w+)(?P<words>.*?)-->$|^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """Code of a document, with what the comments before it say."""

    language: str
    code: str
    line: int
    before: str = ""
    within: str = ""
    skipped: bool = False
    reason: str = ""
    replaced: list[tuple[str, str]] = field(default_factory=list)

    def text(self) -> str:
        """The code as it is tested."""
        code = self.code
        for old, new in self.replaced:
            assert old in code, f"line {self.line}: nothing to replace: {old}"
            code = code.replace(old, new)
        return code


def blocks_of(text: str) -> list[Block]:
    """The blocks of a document, of every language.

    Raises:
        ValueError: a comment that is not understood, or has no block behind it.
    """
    found: list[Block] = []
    following = Block("", "", 0)
    for piece in PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 1
        kind, words = piece["kind"], (piece["words"] or "").strip()
        if kind is None:
            following.language, following.code = piece["language"], piece["code"]
            following.line = line + 1
            found.append(following)
            following = Block("", "", 0)
        elif kind == "skip" and words.startswith("because "):
            following.skipped, following.reason = True, words
        elif kind == "before":
            following.before = words
        elif kind == "within":
            following.within = words
        elif kind == "with" and " as " in words:
            old, new = words.split(" as ")
            following.replaced.append((old, new))
        else:
            raise ValueError(f"line {line}: not understood: test: {kind} {words}")
    if following.before and following == Block("", "", 0, before=following.before):
        found.append(Block("python", "", text.count("\n"), following.before))
    elif following != Block("", "", 0):
        raise ValueError("the last comment has no block behind it")
    return found


def marked(documents: list[Path], languages: tuple[str, ...]) -> list[object]:
    """The documents that have blocks in these languages."""
    return [
        pytest.param(path, id=path.relative_to(ROOT).with_suffix("").as_posix())
        for path in documents
        if any(block.language in languages for block in blocks_of(path.read_text()))
    ]


@pytest.mark.parametrize("path", marked([p for p in DOCUMENTS if p != TAKE_AWAY], ("python",)))
def test_python(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": path.stem}
    # A page's own network and statistic are not there for other tests.
    with patch.dict(DECLARATIONS), patch.dict(STATISTICS):
        for block in blocks_of(path.read_text()):
            if block.language == "python" and not block.skipped:
                for code, line in ((block.before, 1), (block.text(), block.line)):
                    # A failure then shows line numbers of the document.
                    exec(compile("\n" * (line - 1) + code, str(path), "exec"), names)


# What the recipes that need an optional package must have made.
TRUTHS = {
    "glass": "assert [window.za[0] for window in windows] == [*edges['Z_MIN']]",
    "arviz_base": "assert (tree['posterior']['sigma8'] == samples.values[..., 0]).all()",
    "pandas": "assert len(halos) and (frame['position_y'] == halos.position[:, 1]).all()",
    "blackjax": "at = np.asarray(state.position); assert abs(at - start).max() > 0\n"
    "assert float(state.logdensity) == density(at)[0] and float(jax.grad(log_density)(at)[3]) == "
    "density(at)[1][3]",
    "numpyro": "drawn = chain.get_samples(); assert drawn.shape == (5, density.dimension)\n"
    "assert density(np.asarray(drawn[-1]))[0] > density(start)[0]",
}


def test_recipes_that_take_results_away(tmp_path, monkeypatch):
    """All blocks of the page, with those for optional packages that are installed."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    missing, left = [], dict(TRUTHS)
    for block in blocks_of(TAKE_AWAY.read_text()):
        if block.language != "python":
            continue
        exec(block.before, names)
        needed = re.findall(r"\w+", block.reason.partition("because ")[2].partition(" may be")[0])
        packages = [name for name in needed if name != "and"]
        if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
            missing += absent
            left.pop(packages[0])
            continue
        exec(block.text(), names)
        exec(left.pop(packages[0]) if packages else "", names)
    assert not left
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize("path", marked(DOCUMENTS, ("sh", "bash")))
def test_shell(path, monkeypatch):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    command = get_command(app)
    for block in blocks_of(path.read_text()):
        if block.language not in ("sh", "bash") or block.skipped:
            continue
        for line in re.split(r"\n|; ", block.text()):
            words = shlex.split(line, comments=True)
            if not words or words[0] in ("for", "done"):
                continue
            words = words[1:] if words[0] == "do" else words
            if words[0] == "make":
                assert words[1] in targets, line
                continue
            if script := next(filter(SCRIPT.fullmatch, words), None):
                monkeypatch.syspath_prepend(str((ROOT / script).parent))
                names = runpy.run_path(str(ROOT / script), run_name=Path(script).stem)
                names["parser"]().parse_args(words[words.index(script) + 1 :])
                continue
            assert Path(words[0]).name == "flowpm-dist", f"not known how to test: {line}"
            name, *options = words[1:]
            with command.get_command(None, name).make_context(name, list(options)):
                pass
            for word in words:
                assert not word.startswith("examples/") or (ROOT / word).is_file(), line


@pytest.mark.parametrize("path", marked(DOCUMENTS, ("toml",)))
def test_run_files(path, tmp_path, monkeypatch):
    for block in blocks_of(path.read_text()):
        if block.language != "toml" or block.skipped:
            continue
        run_file = tomllib.loads((ROOT / block.within).read_text())
        for section, keys in tomllib.loads(block.text()).items():
            run_file[section] = keys
        kind = next(name for name in LOADERS if name in run_file)
        monkeypatch.chdir(tmp_path)
        if block.before:
            exec(block.before, {})
        (tmp_path / "run.toml").write_text(tomli_w.dumps(run_file))
        LOADERS[kind](tmp_path / "run.toml")


def test_a_file_with_a_forward_model(tmp_path, monkeypatch):
    """`reconstruct` accepts its structure, bias and likelihood, and `train` the first two."""
    pages = [ROOT / "docs" / "howto" / name for name in ("own_likelihood.md", "own_bias.md")]
    blocks = [block for page in pages for block in blocks_of(page.read_text())]
    files = [b.code for b in blocks if "class StudentT" in b.code or "class Lognormal" in b.code]
    assert len(files) == 2
    (tmp_path / "survey.py").write_text("\n".join(files))
    (requested,) = (tomllib.loads(b.code) for b in blocks if "survey:LOGNORMAL" in b.code)
    run_file = tomllib.loads((ROOT / "examples" / "reconstruct.toml").read_text()) | requested
    run_file["box"] = {"grid": 8, "size": 64.0}
    run_file["run"] = {"precision": "float64"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run_file))
    options, mesh = ReconstructionOptions.load(tmp_path / "run.toml"), ProcessMesh("row:1")
    model = model_of(options, mesh)
    observed = observed_kind(options)(options, model)
    assert type(observed.likelihood).__name__ == "StudentT"
    state = observed.truth.state
    contrast = np.exp(state.linear_delta.block * float(state.linear_growth) - 0.8) - 1
    np.testing.assert_allclose(observed.data, 1 + 1.2 * contrast + 0.1 * contrast**2, rtol=1e-12)
    posterior = Posterior(model, observed.likelihood, options.priors.ranges)
    slope = posterior.evaluate(posterior.space.normal(1)).gradient
    assert posterior.space.names == ("q", "freedom")
    assert slope.parameters.shape == (2,) and np.all(slope.parameters != 0)
    table = tomllib.loads((ROOT / "examples" / "survey_training.toml").read_text())
    table["observation"] = requested["observation"]
    table["priors"] = {"sigma8": [0.7, 0.9], "q": requested["priors"]["q"]}
    table["cosmology"]["Omega_m"] = 0.3
    (tmp_path / "train.toml").write_text(tomli_w.dumps(table))
    training = TrainingPlan.load(tmp_path / "train.toml")
    assert (training.parameters, training.network.input) == (("sigma8",), "asinh")
    maker = maker_of(training, mesh, Lanes.of(mesh, 4))
    assert isinstance(maker.model.formation, type(model.formation))
    del run_file["priors"]
    run_file["observation"]["bias"] = {"b1": 1.0}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run_file))
    with pytest.raises(ObservationError, match="has the parameters b1, q; bias must have a value"):
        model_of(ReconstructionOptions.load(tmp_path / "run.toml"), mesh)


def declaration_of(tutorial: str, ending: str) -> str:
    """The cell of a tutorial that declares a network, with the end of the guide's file."""
    cells = (ROOT / "docs" / "tutorials" / f"{tutorial}.py").read_text().split("\n# %%")
    (cell,) = (cell for cell in cells if "\nDECLARATIONS[" in cell)
    return cell + ending


@pytest.mark.parametrize("name", ["shallow", "training", "own_arrays"])
def test_a_file_with_a_network_is_the_program(name, tmp_path, monkeypatch, capsys):
    """The guide's file, and the tutorials' with its ending, know the network they declare."""
    blocks = blocks_of((ROOT / "docs" / "howto" / "own_network.md").read_text())
    (code,) = (block.code for block in blocks if "__main__" in block.code)
    if name != "shallow":
        tutorial = (ROOT / "docs" / "tutorials" / f"{name}.py").read_text()
        assert "python tiny.py train run.toml" in tutorial
        name, code = "tiny", declaration_of(name, code[code.index("\nif __name__") :])
    (tmp_path / f"{name}.py").write_text(code)
    run_file = tomllib.loads((ROOT / "examples" / "train.toml").read_text())
    run_file["network"]["name"] = name
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run_file))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "train", "run.toml", "--check"])
    with patch.dict(DECLARATIONS), pytest.raises(SystemExit) as end:
        runpy.run_path(f"{name}.py", run_name="__main__")
    message = capsys.readouterr()
    assert not end.value.code, message.err
    assert tomllib.loads(message.out)["network"]["name"] == name


def test_readme_and_the_demo_are_one_simulation(tmp_path, monkeypatch):
    """README's Python block and examples/demo.toml, on fewer particles, to the bit."""
    monkeypatch.chdir(tmp_path)
    code = next(b for b in blocks_of(DOCUMENTS[0].read_text()) if b.language == "python").text()
    made: dict[str, Any] = {}
    exec(code, made)
    options = SimulationOptions.load(ROOT / "examples" / "demo.toml", {("box", "grid"): 16})
    cosmology = Cosmology(**options.cosmology.model_dump(exclude_none=True))
    state = options.simulation(cosmology, mesh="row:1").run(seed=options.initial.seed)
    np.testing.assert_array_equal(state.displacement.numpy(), made["state"].displacement.numpy())


def test_no_page_or_message_names_a_package_that_no_index_has():
    """Extras are installed from a checkout: pip install '.[tune]'."""
    files = [*DOCUMENTS, *ROOT.glob("docs/tutorials/*.py"), *ROOT.glob("examples/**/*.toml")]
    files += [*ROOT.glob("flowpm_dist/**/*.py"), *ROOT.glob("meshimpl/**/*.py")]
    wrong = re.compile(r"""pip install ['"]?(flowpm|meshimpl)""")
    assert len(files) > 300
    assert not [path for path in files if wrong.search(path.read_text())]


def test_comments_are_understood():
    text = "<!-- test: with n=8 as n=4 -->\n<!-- test: before\nx = 1\n-->\n```python\nn=8\n```\n"
    (block,) = blocks_of(text)
    assert (block.text(), block.before, block.line) == ("n=4\n", "x = 1", 6)
    for wrong in ("skip", "wth a as b", "within examples/train.toml"):
        with pytest.raises(ValueError, match="not understood|no block"):
            blocks_of(f"<!-- test: {wrong} -->\n")
