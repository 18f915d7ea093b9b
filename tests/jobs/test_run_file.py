"""Run files of any kind: one model, whose rules hold for Python callers, too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from flowpm_dist.jobs.run_file import ConfigError, RunFile
from flowpm_dist.options import AnyPath, Options, Problem, Variants, constructed


class Euler(Options):
    exponent: float = Field(default=1.0, gt=0, description="a number above 0")


class Leap(Options):
    order: int = Field(default=2, ge=1, description="a whole number of at least 1")


SCHEMES: dict[str, type[Options]] = {"euler": Euler, "leap": Leap}


class Steps(Options):
    first: float = Field(default=0.1, ge=0, description="a number of at least 0")
    last: float = Field(default=1.0, gt=0, description="a number above 0")
    file: AnyPath | None = Field(default=None, description="a file")
    column: int = Field(default=1, ge=1, description="a whole number of at least 1")
    scheme: Annotated[Options, Variants("scheme", SCHEMES, "euler", flat=True)] = Euler()

    def problems(self) -> Iterator[Problem]:
        if self.first >= self.last:
            yield self.problem("first", f"must be below last = {self.last}")

    def idle(self) -> dict[str, str]:
        return {} if self.file else {"column": "file"}


class Flat(Options):
    sky: Literal["flat"] = Field(default="flat", description='"flat" or "full"')
    width: float = Field(gt=0, description="a number above 0")


class Full(Options):
    sky: Literal["full"] = Field(default="full", description='"flat" or "full"')
    nside: int = Field(default=8, ge=1, description="a whole number of at least 1")


class Sky(RunFile):
    steps: Steps
    cone: Annotated[
        Flat | Full | None, Variants("sky", {"flat": Flat, "full": Full}, default="flat")
    ] = None
    may_differ = ("steps.file", "steps.column")
    may_grow = ("steps.last",)
    younger = {"steps.scheme": "euler"}

    def problems(self) -> Iterator[Problem]:
        if self.cone is not None and self.steps.last < 1:
            yield self.problem("steps.last", "a light cone needs 1")

    def idle(self) -> dict[str, str]:
        return {"steps.first": "the flat sky"} if isinstance(self.cone, Full) else {}


def load(folder: Path, text: str) -> Sky:
    (folder / "run.toml").write_text(text)
    return Sky.load(folder / "run.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", None),
        ("[steps]\nlast = 0.05", ["steps.first = 0.1: must be below last = 0.05"]),
        (
            "[steps]\nfirst = -1\nlast = 0\ncolunm = 2\n[cone]\n[stepps]",
            [
                "stepps is not a section; did you mean steps? (sections: steps, cone)",
                "steps.first = -1: must be a number of at least 0",
                "steps.last = 0: must be a number above 0",
                "steps.colunm is not a key; did you mean column? (keys of [steps]: first, last, "
                "file, column, scheme, exponent, order)",
                "cone.width is missing: must be a number above 0",
            ],
        ),
        ("[steps]\ncolumn = 2", ["steps.column = 2: goes with file"]),
        ('[steps]\nscheme = "leap"\norder = 3', None),
        (
            '[steps]\nscheme = "leap"\nexponent = 1.0',
            ['steps.exponent = 1.0: goes with scheme = "euler", not with "leap"'],
        ),
        ("[steps]\nexponent = 0", ["steps.exponent = 0: must be a number above 0"]),
        (
            '[steps]\nscheme = "laep"',
            [
                "steps.scheme = 'laep': there is no such scheme; did you mean leap?; must be "
                '"euler" or "leap"'
            ],
        ),
        ("[steps]\nscheme = 1\norder = 3", ["steps.scheme = 1: must be"]),
        ("[cone]\nwidth = 1\nnside = 2", ['cone.nside = 2: goes with sky = "full", not with']),
        ("cone = 1", ["cone = 1: must be a section [cone] with keys below it"]),
        ("[steps]\nlast = 0.5\n[cone]\nwidth = 1", ["steps.last = 0.5: a light cone needs 1"]),
        ('[steps]\nfirst = 0.2\n[cone]\nsky = "full"', ["steps.first = 0.2: goes with the flat"]),
        ("[cone]\nfirst = 2\nwidth = 1", ["cone.first is not a key; it belongs in [steps]"]),
    ],
)  # fmt: skip
def test_all_problems_of_a_file(tmp_path, text, message):
    if message is None:
        load(tmp_path, text)
        return
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    found = [str(problem) for problem in caught.value.problems]
    assert len(found) == len(message)
    for problem, expected in zip(found, message, strict=True):
        assert problem.startswith(expected)


def test_python_is_refused_by_the_same_rules():
    with pytest.raises(ValueError, match=r"^first = 2.0: must be below last = 1.0$"):
        constructed(Steps, {"first": 2.0})
    with pytest.raises(ValueError, match=r"^exponent = 2: goes with scheme = "):
        constructed(Steps, {"scheme": "leap", "exponent": 2})
    with pytest.raises(TypeError, match="no option 'exponant'; did you mean exponent?"):
        constructed(Steps, {"exponant": 2})
    assert constructed(Steps, {"scheme": Leap(order=3)}).scheme == Leap(order=3)


def test_resolved_files_have_what_means_something(tmp_path):
    run = load(tmp_path, '[steps]\nfile = "a.txt"\nscheme = "leap"\n[cone]\nsky = "full"')
    assert run.to_table() == {
        "steps": {
            "last": 1.0, "file": str(tmp_path / "a.txt"), "column": 1, "scheme": "leap", "order": 2,
        },
        "cone": {"sky": "full", "nside": 8},
    }  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    assert load(tmp_path / "elsewhere", run.resolved()) == run


def test_a_resumed_run_may_differ_where_it_says(tmp_path):
    load(tmp_path, "[steps]\nfirst = 0.3\nlast = 0.8\n")
    begun = tmp_path / "begun.toml"
    begun.write_text(load(tmp_path, "[steps]\nfirst = 0.3\nlast = 0.8\n").resolved())
    load(tmp_path, '[steps]\nfirst = 0.3\nlast = 0.9\nfile = "a"').check_resumed(
        begun, begun, "the run"
    )
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "[steps]\nfirst = 0.2\nlast = 0.7\n").check_resumed(begun, begun, "the run")
    assert [str(problem) for problem in caught.value.problems] == [
        "steps.first = 0.2: the run has 0.3; to resume it, give that",
        "steps.last = 0.7: the run has 0.8; to resume it, give that or more",
    ]


def test_a_file_of_before_a_key_was_there_is_resumed_with_what_it_meant(tmp_path):
    """Not with the default, which may have changed: only for keys of which it is known."""
    run = load(tmp_path, "[steps]\nfirst = 0.3\nlast = 0.8\n")
    begun = tmp_path / "begun.toml"
    begun.write_text(run.resolved().replace('scheme = "euler"\n', ""))
    assert begun.read_text() != run.resolved()
    run.check_resumed(begun, begun, "the run")
    other = load(tmp_path, '[steps]\nfirst = 0.3\nlast = 0.8\nscheme = "leap"\n')
    with pytest.raises(ConfigError, match="steps.scheme = "):
        other.check_resumed(begun, begun, "the run")
    begun.write_text(run.resolved().replace("last = 0.8\n", ""))
    with pytest.raises(ConfigError, match="steps.last = 0.8: the run has none; to resume"):
        run.check_resumed(begun, begun, "the run")
