"""Parts of run files that several tests share, and the problems of a run file."""

import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from flowpm_dist.jobs.run_file import ConfigError

PLANCK = """
[cosmology]
Omega_m = 0.30966
Omega_b = 0.04897
h = 0.6766
n_s = 0.96822
A_s = 2.1064e-9
"""
ROUND_NUMBERS = """
[cosmology]
Omega_m = 0.3
Omega_b = 0.05
h = 0.7
n_s = 0.96
sigma8 = 0.8
"""
RUN = f"""
[box]
grid = 16
size = 64.0
{PLANCK}
[initial]
seed = 1
[evolution]
steps = 2
"""

PRIORS = """
[cosmology]
Omega_b = 0.049
h = 0.67
n_s = 0.96
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def problems_of(options: type, folder: Path, text: str) -> list[str]:
    """The problems that a model of options finds in a run file."""
    with pytest.raises(ConfigError) as caught:
        options.load(write(folder, text))
    return [str(p) for p in caught.value.problems]


def with_keys(text: str, keys: str) -> str:
    """A run file with other values, given as lines `section.key = value`."""
    table = tomllib.loads(text)
    for section, given in tomllib.loads(keys).items():
        table.setdefault(section, {}).update(given)
    return tomli_w.dumps(table)


def check_mistake(options: type, folder: Path, text: str, keys: str, message: str) -> list[str]:
    """All problems of a run file with these keys: one names the last of them, with the message."""
    name = keys.splitlines()[-1].partition(" =")[0]
    found = problems_of(options, folder, with_keys(text, keys))
    expected = rf"{re.escape(name)}[ .,\[].*{message}"
    assert any(re.match(expected, problem, re.DOTALL) for problem in found), found
    return found
