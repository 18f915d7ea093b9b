"""The run file: each mistake is named with what is allowed, and all of them at once."""

import functools
import re
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from run_files import PLANCK, check_mistake, problems_of, write

from flowpm_dist.evolution.adjoints import DirectAdjoint
from flowpm_dist.evolution.corrections import SHIPPED, load_correction
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.jobs.run_file import ConfigError, completions
from flowpm_dist.simulate.options import EvolutionOptions, SimulationOptions

GOOD = f"""
[box]
grid = 64
size = 256.0
{PLANCK}
[initial]
seed = 1
"""
BULLFROG, COLA = 'integrator = "bullfrog"\n', 'integrator = "cola"\n'

problems = functools.partial(problems_of, SimulationOptions)


def test_the_issue_example_with_defaults(tmp_path):
    run = SimulationOptions.load(write(tmp_path, GOOD))
    assert run.box.grid == (64, 64, 64)
    assert run.box.size == (256.0, 256.0, 256.0)
    assert run.cosmology.transfer == "eisenstein-hu"
    assert (run.cosmology.w0, run.cosmology.wa) == (-1.0, 0.0)
    assert (run.evolution.a_start, run.evolution.a_stop, run.evolution.steps) == (0.1, 1.0, 10)
    assert (run.run.precision, run.run.halo) == ("float32", "auto")


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace("grid = 64", "grid = [32, 64, 16]").replace("256.0", "[1, 2.5, 3]"),
        GOOD.replace("A_s = 2.1064e-9", "sigma8 = 0.8\nw0 = -0.9\nwa = 0.2")
        + '[run]\nhalo = 4\nprecision = "float64"\n[mesh]\nshape = "row:2,col:2"',
        GOOD
        + 'noise = "nested"\nfixed_amplitude = true\npaired = true\nlpt_order = 3\n[evolution]\n'
        + 'edges = [0, 0.25, 1]\nintegrator = "bullfrog"\nmesh_factor = 2\ndeconvolve = true\n'
        + '[results]\nmultipoles = "y"',
        GOOD
        + '[evolution]\nspacing = "log a"\nsteps = 4\nintegrator = "cola"\n'
        + 'half_step = "geometric"\nforce_gradient = "spectral"',
    ],
)
def test_resolved_reads_back_the_same(tmp_path, text):
    run = SimulationOptions.load(write(tmp_path, text))
    again = SimulationOptions.load(write(tmp_path, run.resolved()))
    assert again.model_dump() == run.model_dump()


def resolved(folder: Path, text: str) -> dict:
    return tomllib.loads(SimulationOptions.load(write(folder, text)).resolved())


def test_resolved_holds_all_that_has_a_meaning_and_nothing_else(tmp_path):
    plain = resolved(tmp_path, GOOD)
    assert plain["evolution"] == {
        "a_start": 0.1, "a_stop": 1.0, "steps": 10, "spacing": "a", "integrator": "fastpm",
        "half_step": "arithmetic", "force_gradient": "finite-difference", "mesh_factor": 1,
        "deconvolve": True, "exchange": "exact", "pyramid": "off",
    }  # fmt: skip
    assert plain["initial"] == {
        "seed": 1, "lpt_order": 2, "noise": "cells", "fixed_amplitude": False, "paired": False,
    }  # fmt: skip
    listed = GOOD + '[evolution]\nedges = [0.1, 1.0]\nintegrator = "bullfrog"\n'
    unused = {"a_start", "a_stop", "steps", "spacing", "half_step"}
    assert not unused & set(resolved(tmp_path, listed)["evolution"])
    given = resolved(tmp_path, with_noise(tmp_path, np.zeros((8, 8, 8))))
    assert set(given["initial"]) == {"white_noise", "lpt_order"}


@pytest.mark.parametrize(
    ("lines", "count"), [("", 10), ("steps = 3", 3), ("edges = [0.1, 0.2, 0.5, 1]", 3)]
)
def test_the_number_of_steps(tmp_path, lines, count):
    run = SimulationOptions.load(write(tmp_path, f"{GOOD}[evolution]\n{lines}"))
    assert run.evolution.step_count == count


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("grid = 64", "grid = 63", "box.grid", "63.*even whole number"),
        ("grid = 64", "grid = 2", "box.grid", "2.*from 4 to"),
        ("grid = 64", "grid = -64", "box.grid", "-64.*from 4 to"),
        ("grid = 64", "grid = 64.0", "box.grid", "64.0.*whole number"),
        ("grid = 64", "grid = true", "box.grid", "True.*whole number"),
        ("grid = 64", 'grid = "64"', "box.grid", "'64'.*whole number"),
        ("grid = 64", "grid = [64, 64]", "box.grid", r"\[64, 64\].*three"),
        ("grid = 64", "", "box.grid", "is missing.*whole number"),
        ("size = 256.0", "size = -256.0", "box.size", "-256.0.*from 0.01 to 100000"),
        ("size = 256.0", "size = [1.0, 2.0, 0.0]", "box.size", "0.01 to 100000 in Mpc/h"),
        ("size = 256.0", "size = 1e-6", "box.size", "1e-06.*from 0.01 to"),
        ("size = 256.0", "size = 1e9", "box.size", "1000000000.0.*to 100000 in Mpc/h"),
        ("size = 256.0", "size = inf", "box.size", "inf.*from 0.01"),
        ("h = 0.6766", "h = 67.66", "cosmology.h", "67.66.*above 0.1, below 3"),
        ("h = 0.6766", "h = nan", "cosmology.h", "nan"),
        ("A_s = 2.1064e-9", "A_s = 2.1", "cosmology.A_s", "2.1.*below 1e-6"),
        ("Omega_b = 0.04897", "Omega_b = 0.4", "cosmology.Omega_b", "below Omega_m = 0.30966"),
        (
            "Omega_b = 0.04897",
            'Omega_b = 0\ntransfer = "camb"',
            "cosmology.Omega_b",
            "0.*camb.*bar",
        ),
        ("n_s = 0.96822", "n_s = 1\nwa = 1.5", "cosmology.wa", "must be at most -0.2"),
        ("n_s = 0.96822", 'n_s = 1\ntransfer = "EH"', "cosmology.transfer", "'EH'.*eisenstein-hu"),
        ("seed = 1", "seed = -1", "initial.seed", "-1.*from 0 to 2.63 - 1"),
        ("seed = 1", "seed = 9223372036854775808", "initial.seed", r"from 0 to 2\^63 - 1"),
        ("seed = 1", "seed = 1\nlpt_order = 4", "initial.lpt_order", "4.*1, 2 or 3"),
        ("seed = 1", 'seed = 1\nnoise = "white"', "initial.noise", "'white'.*nested"),
        ("seed = 1", "seed = 1\npaired = 1", "initial.paired", "1: must be true or false"),
        ("seed = 1", 'seed = 1\nfixed_amplitude = "no"', "initial.fixed_amplitude", "true or"),
        ("seed = 1", 'seed = 1\n[results]\nmultipoles = "w"', "results.multipoles", "'w'.*\"z\""),
        ("seed = 1", "seed = 1\n[evolution]\nsteps = 0", "evolution.steps", "0.*at least 1"),
        ("seed = 1", "seed = 1\n[run]\nhalo = 0", "run.halo", "0.*at least 1"),
        ("seed = 1", 'seed = 1\n[run]\nhalo = "big"', "run.halo", "'big'.*auto"),
        ("seed = 1", 'seed = 1\n[run]\nprecision = "half"', "run.precision", "float32"),
        ("seed = 1", 'seed = 1\n[mesh]\nshape = "row2"', "mesh.shape", "'row2' is not.*axis:size"),
        ("seed = 1", 'seed = 1\n[mesh]\nshape = "row:2,row:2"', "mesh.shape", "named twice"),
        ("seed = 1", 'seed = 1\n[mesh]\nshape = "rov:2"', "mesh.shape", "did you mean row"),
        ("seed = 1", 'seed = 1\n[mesh]\nshape = "row:0"', "mesh.shape", "size 0"),
        ("seed = 1", 'seed = 1\n[mesh]\nshape = "replica:2"', "mesh.shape", "one simulation"),
        ("seed = 1", "seed = 1\n[evolution]\na_start = 1.0", "evolution.a_start", "below a_stop"),
        ("[box]", "[Box]", "Box", "did you mean box"),
        ("[box]", "steps = 3\n[box]", "steps", r"belongs in \[evolution\]"),
        ("size =", "sice =", "box.sice", "did you mean size.*grid, size"),
        ("Omega_m", "omega_m", "cosmology.omega_m", "did you mean Omega_m"),
        ("seed = 1", "seed = 1\nsteps = 3", "initial.steps", r"belongs in \[evolution\]"),
    ],
)
def test_one_mistake(tmp_path, old, new, where, message):
    found = problems(tmp_path, GOOD.replace(old, new, 1))
    assert any(p.split(" ")[0] == where and re.search(message, p) for p in found), found


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('integrator = "euler"', '\'euler\'.*"fastpm", "bullfrog" or "cola"'),
        ('half_step = "harmonic"', "'harmonic'.*geometric"),
        (BULLFROG + 'half_step = "geometric"', 'with integrator = "fastpm" or "cola", not with'),
        ('half_step = "geometric"\nintegrator = 3', 'must be "fastpm", "bullfrog"'),
        ('spacing = "z"', "'z'.*\"log a\""),
        (BULLFROG + 'a_start = 0\nspacing = "log a"', "later than a_start"),
        ("a_start = 0", "starts at 0: only bullfrog can start there; fastpm must start later"),
        (COLA + "edges = [0.0, 1.0]", "starts at 0.*; cola must start later"),
        (COLA + "exponent = 0", "0.*grow or to decay; .*other than 0"),
        ('adjoint = "direct"', "goes with reconstruct and emulate, which need"),
        ("a_start = -0.1", "-0.1.*from 0"),
        ("mesh_factor = 0", "0.*from 1 to 4"),
        ("mesh_factor = 5", "5.*from 1 to 4"),
        ("mesh_factor = 1.3", "1.3: .*an even number along each side.*are 1.28125 and 1.3125"),
        ("deconvolve = 1", "1.*true or false"),
        ("pyramid = 1", '"off", "1%" or "0.1%"'),
        ('exchange = "bfloat16"', '"exact" or "float16"'),
        ("edges = [0.5]", "two or more increasing"),
        ("edges = 0.5", "two or more increasing"),
        ('edges = [0.1, "now"]', "two or more increasing"),
        ("edges = [0.1, 2.5]", "two or more increasing scale factors from 0 to 2"),
        ("edges = [0.1, 0.5, 0.5]", "0.5 is followed by 0.5"),
        ("edges = [0.5, 0.1]", "0.5 is followed by 0.1"),
        ("edges = [0.1, 1]\nsteps = 1", "1: goes with equal steps, not with edges"),
        ("edges = [0.1, 1]\na_stop = 0.9", "0.9: goes with equal steps"),
    ],
)
def test_one_mistake_of_the_evolution(tmp_path, keys, message):
    keys = re.sub("^", "evolution.", keys, flags=re.MULTILINE)
    assert len(check_mistake(SimulationOptions, tmp_path, GOOD, keys, message)) == 1


def test_messages_in_float16_need_float32(tmp_path):
    keys = 'run.precision = "float64"\nevolution.exchange = "float16"'
    message = 'goes with precision = "float32", not with "float64"'
    assert len(check_mistake(SimulationOptions, tmp_path, GOOD, keys, message)) == 1


def test_cola_follows_second_order(tmp_path):
    cola = '[evolution]\nintegrator = "cola"\n'
    (found,) = problems(tmp_path, f"{GOOD}lpt_order = 1\n{cola}")
    assert found == "initial.lpt_order = 1: COLA follows LPT of order 2; must be 2 or 3"
    run = SimulationOptions.load(write(tmp_path, f"{GOOD}lpt_order = 3\n{cola}"))
    assert run.initial.lpt_order == 3


@pytest.mark.parametrize("line", ['noise = "nested"', "paired = true", "fixed_amplitude = true"])
def test_what_only_a_seed_can_be(tmp_path, line):
    text = with_noise(tmp_path, np.zeros((8, 8, 8)))
    message = f"initial.{line}: goes with a seed, not with white_noise"
    assert problems(tmp_path, text + line) == [message]
    (both,) = problems(tmp_path, f"{text}{line}\nseed = 1")
    assert "both are given" in both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "sigma8 = 0.8", "is not a key"),
        (GOOD.replace("A_s = 2.1064e-9", ""), "A_s, cosmology.sigma8 neither"),
        (GOOD.replace("A_s =", "sigma8 = 0.8\nA_s ="), "A_s, cosmology.sigma8 both"),
        (GOOD.replace("seed = 1", ""), "seed, initial.white_noise neither"),
        (GOOD.replace("[initial]\nseed = 1", ""), "seed, initial.white_noise neither"),
        ("box = 3\n" + GOOD.split("size = 256.0")[1], r"box = 3: must be a section \[box\]"),
        (GOOD.replace("64", "64 64"), "not TOML.*line 3"),
        (GOOD.replace("seed = 1", "seed = 1\nseed = 2"), r"line \d+: initial.seed is given twice"),
        (GOOD + "[box]\ngrid = 8", r"line \d+: the section \[box\] is given twice"),
    ],
)
def test_mistakes_between_keys(tmp_path, text, message):
    found = problems(tmp_path, text)
    assert any(re.search(message, p) for p in found), found


def test_all_mistakes_are_told_at_once(tmp_path):
    text = (
        GOOD.replace("grid = 64", "grid = 63")
        .replace("h = 0.6766", "H = 0.6766")
        .replace("seed = 1", 'white_noise = "none.npy"')
    )
    found = problems(tmp_path, text + "[evolution]\na_start = 2.0\nsteps = -1\n[extra]\n")
    message = {p.split(" ")[0] for p in found}
    assert message == {
        "box.grid", "cosmology.H", "cosmology.h", "initial.white_noise",
        "evolution.a_start", "evolution.steps", "extra",
    }  # fmt: skip


def test_a_wrong_key_causes_no_second_complaint(tmp_path):
    text = GOOD + '[evolution]\na_start = "early"\na_stop = 0.05\n'
    assert [p.split(" ")[0] for p in problems(tmp_path, text)] == ["evolution.a_start"]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        SimulationOptions.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="regular file"):
        SimulationOptions.load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        SimulationOptions.load(tmp_path / "latin.toml")


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    (tmp_path / "marked.toml").write_text(GOOD, encoding="utf-8-sig")
    plain = SimulationOptions.load(write(tmp_path, GOOD))
    assert SimulationOptions.load(tmp_path / "marked.toml") == plain


def with_noise(folder: Path, array: np.ndarray | None, name: str = "noise.npy") -> str:
    if array is not None:
        np.save(folder / name, array)
    return GOOD.replace("64", "8").replace("seed = 1", f'white_noise = "{name}"')


def test_white_noise_is_found_beside_the_run_file(tmp_path):
    text = with_noise(tmp_path, np.zeros((8, 8, 8), np.float32))
    run = SimulationOptions.load(write(tmp_path, text))
    assert run.initial.white_noise == tmp_path / "noise.npy"
    (tmp_path / "elsewhere").mkdir()
    again = SimulationOptions.load(write(tmp_path / "elsewhere", run.resolved()))
    assert again.initial.white_noise == tmp_path / "noise.npy"


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, "there is no such file"),
        (np.zeros((8, 8, 4)), r"shape \(8, 8, 4\); must be box.grid = \(8, 8, 8\)"),
        (np.zeros((8, 8, 8), np.complex64), "dtype <c8"),
        (np.zeros((8, 8, 8), np.int64), "dtype <i8"),
        (np.where(np.arange(512).reshape(8, 8, 8) == 500, np.nan, 0.0), r"nan at \[7, 6, 4\]"),
        (np.where(np.arange(512).reshape(8, 8, 8) == 0, np.inf, 0.0), r"inf at \[0, 0, 0\]"),
    ],
)
def test_white_noise_that_cannot_be_used(tmp_path, array, message):
    found = problems(tmp_path, with_noise(tmp_path, array))
    assert len(found) == 1
    assert found[0].startswith("initial.white_noise")
    assert re.search(message, found[0])


def test_white_noise_of_either_byte_order_and_of_another_mean(tmp_path):
    """The rules are those of `Simulation.run`."""
    noise = np.random.default_rng(0).standard_normal((8, 8, 8)).astype(">f4")
    path = write(tmp_path, with_noise(tmp_path, noise))
    with warnings.catch_warnings(action="error"):
        read = SimulationOptions.load(path)
    with_noise(tmp_path, noise.astype("<f4"))
    assert SimulationOptions.load(path).checksums() == read.checksums()
    with_noise(tmp_path, noise + 1)
    with pytest.warns(UserWarning, match="white_noise has a mean of 0.976, .* has 0 \\+- 0.04"):
        SimulationOptions.load(path)
    with_noise(tmp_path, 3 * noise)
    with pytest.warns(UserWarning, match="a standard deviation of 3.03, .* has 1 \\+- 0.03"):
        SimulationOptions.load(path)
    with_noise(tmp_path, 0.3 * noise)  # as a search finds it
    with warnings.catch_warnings(action="error"):
        SimulationOptions.load(path)


def test_white_noise_that_is_no_array(tmp_path):
    (tmp_path / "noise.npy").write_text("not an array")
    assert "not a readable .npy" in problems(tmp_path, with_noise(tmp_path, None))[0]
    np.savez(tmp_path / "noise.npz", a=np.zeros(3))
    assert ".npz archive" in problems(tmp_path, with_noise(tmp_path, None, "noise.npz"))[0]


def mesh_of(
    folder: Path, shape: str | None, ranks: int, grid: str = "[16, 12, 8]", mesh_factor: float = 1
) -> str:
    text = GOOD.replace("grid = 64", f"grid = {grid}")
    text += f"[evolution]\nmesh_factor = {mesh_factor}\n"
    run = SimulationOptions.load(
        write(folder, text + (f'[mesh]\nshape = "{shape}"' if shape else ""))
    )
    return run.mesh_for(ranks, source=folder / "run.toml")


def test_a_mesh_that_fits(tmp_path):
    assert mesh_of(tmp_path, "row:4,col:3", 12) == "row:4,col:3"
    assert mesh_of(tmp_path, "replica:1,col:2", 2) == "replica:1,col:2"


@pytest.mark.parametrize(
    ("shape", "ranks", "message"),
    [
        ("row:2,col:2", 2, "4 places, but the job has 2 ranks; use --ranks 4"),
        ("row:2", 1, "2 places, but the job has 1 rank;"),
        ("row:3", 3, "row:3 does not divide the 16 cells of x; sizes that do: 1, 2, 4, 8, 16"),
        ("col:8", 8, "col:8 does not divide the 12 cells of y"),
    ],
)
def test_a_mesh_that_does_not_fit(tmp_path, shape, ranks, message):
    with pytest.raises(ConfigError) as caught:
        mesh_of(tmp_path, shape, ranks)
    assert "mesh.shape" in str(caught.value)
    assert message in str(caught.value)


def test_the_mesh_divides_the_force_mesh_as_well(tmp_path):
    """Slabs of three planes of particles would have four and a half of the force mesh."""
    finer = functools.partial(mesh_of, tmp_path, ranks=4, grid="12", mesh_factor=1.5)
    assert finer(None) == "row:2,col:2"
    with pytest.raises(ConfigError, match="mesh.shape = 'row:4': mesh_factor = 1.5: .*1.333"):
        finer("row:4")
    assert SimulationOptions.load(tmp_path / "run.toml").force_cells == [18, 18, 18]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 16])
def test_the_mesh_chosen_divides_the_grid(tmp_path, ranks):
    axes = parse_mesh(mesh_of(tmp_path, None, ranks, grid="[48, 96, 64]"))
    assert axes["row"] * axes["col"] == ranks
    assert 48 % axes["row"] == 96 % axes["col"] == 0


def test_few_ranks_get_slabs_and_many_get_pencils(tmp_path):
    assert mesh_of(tmp_path, None, 2, grid="128") == "row:2,col:1"
    assert mesh_of(tmp_path, None, 64, grid="128") == "row:8,col:8"


def test_no_mesh_divides_the_grid(tmp_path):
    with pytest.raises(ConfigError, match="no mesh of 5 ranks divides"):
        mesh_of(tmp_path, None, 5)


def test_a_correction_is_written_as_it_was_named(tmp_path, monkeypatch):
    """By its name or its whole path, wherever the file is read again; one without a file is not."""
    monkeypatch.chdir(tmp_path)
    load_correction("default").save("c.json")
    path = write(tmp_path, GOOD + '[evolution]\ncorrection = "c.json"\n')
    run = SimulationOptions.load(path)
    assert run.to_table()["evolution"]["correction"] == str(tmp_path / "c.json")
    evolution = dict(EvolutionOptions(correction=load_correction("c.json")))
    assert str(evolution["correction"]) == str(tmp_path / "c.json")
    assert EvolutionOptions(correction="default").to_table()["correction"] == "default"
    shown = repr(EvolutionOptions(correction="network"))
    assert len(shown) < 2000 and "theta" not in shown
    changed = load_correction("default").with_theta(np.zeros(472))
    assert changed.source is None
    with pytest.raises(ValueError, match="was made in Python: save it"):
        EvolutionOptions(correction=changed)

    class Own(DirectAdjoint):
        pass

    with pytest.raises(ValueError, match="adjoint is a Own: a run file needs .reversible. or "):
        EvolutionOptions(adjoint=Own())
    begun = completions(SimulationOptions, "evolution.correction=")
    assert [text.partition("=")[2] for text in begun] == ["", *SHIPPED]
