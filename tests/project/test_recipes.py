"""The recipes of an image and of a conda environment: they fit the package and the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PYTHONS = SpecifierSet(re.findall(r'python_requires="(.*)"', (ROOT / "setup.py").read_text())[0])
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", ["Containerfile", "environment.yml", "docs/howto/clusters.md"])
def test_a_recipe_names_what_is_there(name):
    text = (ROOT / name).read_text()
    made = re.findall(r"\bmake ([a-z-]+)", text)
    assert "setup" in made and {*made} <= {*TARGETS}
    for folder in re.findall(r"\btests/\w+", text):
        assert (ROOT / folder).is_dir()


def test_both_have_a_python_that_the_package_supports_and_the_compilers():
    image, conda = ((ROOT / name).read_text() for name in ("Containerfile", "environment.yml"))
    assert re.search(r"FROM docker.io/library/python:(\S+)-slim", image)[1] in PYTHONS
    assert re.search(r"- python=(\S+)", conda)[1] in PYTHONS
    (packages,) = re.findall(r"--no-install-recommends (.*) &&", image)
    assert {*packages.split()} == {"g++", "gcc", "make"}  # what README says is needed
    assert {"gcc", "gxx", "make"} <= {*re.findall(r"^  - (\w+)$", conda, re.MULTILINE)}


def test_the_user_of_the_image_owns_the_folder():
    """`make setup` writes to it, and WORKDIR makes folders as root."""
    text = (ROOT / "Containerfile").read_text()
    folder, user = (re.search(rf"^{key} (\S+)", text, re.M)[1] for key in ("WORKDIR", "USER"))
    before, _, _ = text.partition(f"\nUSER {user}")
    assert re.search(
        rf"install --directory --owner={user} --group={user} {folder}\n", before + "\n"
    )


def test_an_image_takes_no_environment_of_the_host():
    """A .venv, or kernels, that the host has built would hide what the image must build."""
    left_out = (ROOT / ".dockerignore").read_text().split()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {".venv*", ".git", "build", "**/_kernels*"} <= {*left_out}
    assert ".venv" in ignored
