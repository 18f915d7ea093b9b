"""The reference pages of the documentation have every key and every option.

The truth is what the program takes: the keys of the examples' run files, which other tests run, and
the keys and options that it lists in its messages.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowpm_dist.cli.program import COMMANDS, app
from flowpm_dist.jobs.job import JOBS, job_class
from flowpm_dist.options import keys_of, model_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import site_reference  # noqa: E402


def rows(page: str, section: str) -> dict[str, list[str]]:
    """Returns the cells of the rows of a section by their keys."""
    text = page.partition(f"\n## [{section}]")[2].partition("\n## ")[0]
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip("| `"): cells for cells in lines}


OF_SUBJECTS = ("vary", "space", "shortened")
"""Sections whose keys are those of another run file."""


def flat_keys(table: dict) -> list[str]:
    """Returns the keys of a table as "section.key"; tables may be nested or keys dotted."""
    return [
        key if "." in key else f"{key}.{name}"
        for key, inner in table.items()
        for name in (inner if isinstance(inner, dict) and "." not in key else [key])
    ]


@pytest.mark.parametrize("name", JOBS)
def test_every_key_of_a_run_file_is_on_its_page(name):
    page, model = site_reference.run_file(name), job_class(name).options_type
    for section in model.model_fields:
        if (part := model_of(model, section)) is not None:
            missing = set(keys_of(part)) - set(rows(page, section))
            assert not missing, f"[{section}] lacks {missing}"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.stem)
def test_every_key_of_the_examples_is_on_a_page(path):
    run = tomllib.loads(path.read_text())
    of_subjects = [key for free in OF_SUBJECTS for key in flat_keys(run.pop(free, {}))]
    own = [f"{section}.{key}" for section, keys in run.items() for key in keys]
    for wanted in (own, of_subjects):
        lacking = []
        for name in JOBS:
            page = site_reference.run_file(name)
            places = (key.split(".", 1) for key in wanted)
            lacking.append({key for section, key in places if key not in rows(page, section)})
        assert set() in lacking, min(lacking, key=len)


def test_a_row_has_the_type_the_default_and_the_meaning():
    steps = rows(site_reference.run_file("simulate"), "evolution")
    assert steps["steps"][1:3] == ["integer", "`10`"]
    assert "number of steps" in steps["steps"][3]
    assert "at least 1" in steps["steps"][3]
    assert 'Only with `integrator = "cola"`' in steps["exponent"][3]


def test_every_option_of_every_command_is_on_the_page():
    page = site_reference.commands()
    for name in COMMANDS:
        text = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        printed = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        options = set(re.findall(r"│[* ]+(--[a-z-]+)", printed))
        assert "--help" in options
        assert options <= set(re.findall(r"--[a-z-]+", text)), name
