"""The run file of a reconstruction: each mistake is named with what is allowed, and all at once."""

import functools
import re
import tomllib
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from commands import python
from pydantic import Field
from run_files import ROUND_NUMBERS, check_mistake, problems_of, write

from flowpm_dist.evolution.adjoints import ADJOINTS, DirectAdjoint, ReversibleAdjoint
from flowpm_dist.io.labelled import LabelledArray
from flowpm_dist.io.light_cone import write_light_cone
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.observables.light_cone.map_files import read_convergence
from flowpm_dist.observables.options import OBSERVATIONS, CellOptions
from flowpm_dist.reconstruction.options import ReconstructionOptions
from flowpm_dist.reconstruction.sampler_options import search_mesh

GOOD = f"""{ROUND_NUMBERS}
[box]
grid = 8
size = 64.0
[evolution]
steps = 2
[observation]
structure = "2lpt"
kind = "density"
sigma = 0.2
[data]
mock_seed = 1
[priors]
[search]
seed = 0
"""
COUNTS = GOOD.replace('"density"', '"counts"').replace("sigma = 0.2", "mean_count = 3.0")
FILE = GOOD.replace("mock_seed = 1", 'file = "data.npy"')
EXAMPLES = Path(__file__).parents[2] / "examples"


problems = functools.partial(problems_of, ReconstructionOptions)


def test_defaults(tmp_path):
    run = ReconstructionOptions.load(write(tmp_path, GOOD))
    assert run.is_mock and run.data.add_noise and run.data.noise_seed == 0
    assert (run.observation.redshift_space, run.observation.bias, run.priors.ranges) == (
        None,
        None,
        {},
    )
    search = run.search
    assert (search.evaluations, search.history) == (200, 10)
    assert (search.checkpoint_every, search.keep, search.stages) == (10, 2, None)
    assert (run.run.precision, run.run.halo, run.evolution.last, run.search.total) == (
        "float32", "auto", 1.0, 200,
    )  # fmt: skip


def test_the_last_scale_factor_is_that_of_the_data(tmp_path):
    listed = GOOD.replace("steps = 2", "edges = [0.1, 0.3, 0.6]")
    assert ReconstructionOptions.load(write(tmp_path, listed)).evolution.last == 0.6


def test_the_adjoint(tmp_path):
    plain = ReconstructionOptions.load(write(tmp_path, GOOD))
    assert plain.evolution.adjoint == ReversibleAdjoint()
    direct = GOOD.replace("steps = 2", 'steps = 2\nadjoint = "direct"')
    assert ReconstructionOptions.load(write(tmp_path, direct)).evolution.adjoint == DirectAdjoint()
    exact = GOOD.replace("steps = 2", "steps = 2\nmax_error_growth = 4")
    run = ReconstructionOptions.load(write(tmp_path, exact))
    assert run.solver.adjoint == ReversibleAdjoint(max_error_growth=4)
    table = run.to_table()["evolution"]
    assert (table["adjoint"], table["max_error_growth"]) == ("reversible", 4)
    (message,) = problems(tmp_path, direct.replace('direct"', 'direct"\nmax_error_growth = 4'))
    assert 'goes with adjoint = "reversible", not with "direct"' in message
    (message,) = problems(tmp_path, direct.replace('"direct"', '"none"'))
    assert re.match('evolution.adjoint .*must be "reversible" or "direct"', message)


def test_messages_in_float16(tmp_path):
    """They go with the default precision, and those of the default with float64."""
    half = GOOD.replace("steps = 2", 'steps = 2\nexchange = "float16"')
    force = ReconstructionOptions.load(write(tmp_path, half)).evolution
    assert force.exchange == "float16"
    exact = half.replace("float16", "exact") + '[run]\nprecision = "float64"\n'
    assert ReconstructionOptions.load(write(tmp_path, exact)).run.precision == "float64"


def test_galaxies_have_no_gradient(tmp_path):
    text = GOOD.replace('"density"', '"galaxies"').replace("sigma = 0.2", "halos = {minimum = 9}")
    (message,) = problems(tmp_path, text)
    assert 'observation.kind = "galaxies": halos have no gradient' in message


def test_every_adjoint_of_the_table_has_its_name_in_run_files(tmp_path, monkeypatch):
    for name in ADJOINTS:
        text = GOOD.replace("steps = 2", f'steps = 2\nadjoint = "{name}"')
        run = ReconstructionOptions.load(write(tmp_path, text))
        assert run.to_table()["evolution"]["adjoint"] == name
    own = GOOD.replace("steps = 2", 'steps = 2\nadjoint = "own"')
    assert problems(tmp_path, own)

    class Own(DirectAdjoint):
        pass

    monkeypatch.setitem(ADJOINTS, "own", Own)
    assert ReconstructionOptions.load(write(tmp_path, own)).evolution.adjoint == Own()


def test_the_examples():
    run = ReconstructionOptions.load(EXAMPLES / "reconstruct.toml")
    assert (run.box.grid, run.box.size) == ((64,) * 3, (128.0,) * 3)
    assert (run.observation.structure, run.evolution.step_count, run.data.add_noise) == (
        "pm", 5, False,
    )  # fmt: skip
    assert run.likelihood.error == 0.3
    for name, fitted in (("sample", ()), ("sigma8", ("sigma8",))):
        run = ReconstructionOptions.load(EXAMPLES / f"{name}.toml")
        assert run.sampler.draws > 0
        assert tuple(run.priors.ranges) == fitted


WITH_BIAS = GOOD.replace('"2lpt"', '"pm"\nredshift_space = "y"\nbias = {b1 = 0.5, bs2 = -0.1}')
SAMPLED = 'seed = 0\n[sampler]\ndraws = 8\nchains = 4\nstart = "found"'
STAGED = "stages = [[8, 4.0, 5], [0, 1, 20]]"
VARIANTS = [
    GOOD,
    COUNTS,
    GOOD.replace("mock_seed = 1", "mock_seed = 1\nadd_noise = false"),
    WITH_BIAS.replace("[priors]", "[priors]\nbs2 = [-1, 1]\nsigma8 = [0.6, 1.0]"),
    GOOD.replace("seed = 0", SAMPLED + '\n[mesh]\nshape = "replica:2,row:2"'),
    GOOD.replace("seed = 0", STAGED),
]


@pytest.mark.parametrize("text", VARIANTS)
def test_resolved_reads_back_the_same(tmp_path, text):
    run = ReconstructionOptions.load(write(tmp_path, text))
    again = ReconstructionOptions.load(write(tmp_path, run.resolved()))
    assert again == run


def test_resolved_holds_nothing_without_a_meaning(tmp_path):
    counts = tomllib.loads(ReconstructionOptions.load(write(tmp_path, COUNTS)).resolved())
    assert counts["observation"] == {"structure": "2lpt", "kind": "counts", "mean_count": 3.0}
    assert counts["data"] == {"mock_seed": 1, "noise_seed": 0} and "likelihood" not in counts
    np.save(tmp_path / "data.npy", np.ones((8, 8, 8)))
    files = tomllib.loads(ReconstructionOptions.load(write(tmp_path, FILE)).resolved())
    assert files["data"] == {"file": str(tmp_path / "data.npy")}
    staged = tomllib.loads(ReconstructionOptions.load(write(tmp_path, VARIANTS[-1])).resolved())
    assert "evaluations" not in staged["search"]


def test_nuisance_parameters_have_priors(tmp_path):
    ranges = {"amplitude": (0.9, 1.1), "noise_amplitude": (0.5, 2.0), "b": (1.0, 2.0)}
    given = "".join(f"{name} = {list(ends)}\n" for name, ends in ranges.items())
    text = GOOD.replace("sigma = 0.2", "sigma = 0.2\nbias = {b = 1.5}")
    text = text.replace("[priors]\n", f"[priors]\n{given}")
    assert ReconstructionOptions.load(write(tmp_path, text)).priors.ranges == ranges
    (message,) = problems(tmp_path, text.replace("b = 1.5", "b = 2.5"))
    assert message.startswith("priors.b = [1.0, 2.0]: must include the mock's own b = 2.5")
    counts = text.replace('"density"', '"counts"').replace("sigma = 0.2", "mean_count = 3.0")
    (message,) = problems(tmp_path, counts)
    assert message.startswith("priors.noise_amplitude is given, but observation has no sigma")


def test_stages_tell_the_evaluations(tmp_path):
    assert ReconstructionOptions.load(write(tmp_path, VARIANTS[-1])).search.total == 25


def test_priors_keep_their_ranges(tmp_path):
    text = GOOD.replace("[priors]", "[priors]\nsigma8 = [0.6, 1.0]\nOmega_m = [0.2, 0.4]")
    ranges = ReconstructionOptions.load(write(tmp_path, text)).priors.ranges
    assert ranges == {"Omega_m": (0.2, 0.4), "sigma8": (0.6, 1.0)}


OWN = 'likelihood.name = "os:path"\n'
LINEAR = 'observation.structure = "linear"\n'
ALONG_X = 'observation.redshift_space = "x"\n'
SAMPLER = "sampler.draws = 9\n"
ADJUSTED = SAMPLER + 'sampler.method = "adjusted-microcanonical"\n'


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('observation.structure = "3lpt"', "give one of linear, 1lpt, 2lpt, pm, or"),
        ('observation.redshift_space = "w"', "'w'.*line of sight"),
        (LINEAR + 'observation.redshift_space = "z"', "moves no particles"),
        (LINEAR + "observation.bias = {b1 = 1.0}", "moves no particles.*give b"),
        ("observation.bias = {b = 1.0, b1 = 1.0}", "either b alone"),
        (ALONG_X + "observation.bias = {b = 2.0}", "b1 = b - 1 = 1 for the same"),
        ("observation.bias = {bs = 1.0}", "no bias 'bs'; did you mean"),
        ("observation.bias = 1.5", "1.5: must be a table"),
        ("observation.redshifts = [1, 0]", "uses only the universe at the end of the simulation"),
        ("data.mock_seed = -1", "-1.*from 0 to"),
        ('observation.kind = "densities"', '"density", "counts", "galaxies" or'),
        ('observation.structure = "no_such:thing"', "no module 'no_such'"),
        ('observation.bias_scheme = "os:no"', "goes with bias"),
        ("priors.b3 = 1", r"must be \[low, high\]"),
        ("priors.amplitude = [0, 1]", "each a number above 0"),
        ("observation.sigma = 0.0", "0.0.*above 0"),
        ("observation.sigma = true", "True.*above 0"),
        ('observation.sigma = "s.npy"', "s.npy: there is no such file"),
        ('observation.mask = "m.npy"', "m.npy: there is no such file"),
        ("observation.mean_count = 2.0", 'goes with kind = "counts"'),
        ("data.add_noise = 0", "true or false"),
        ("data.add_noise = false\ndata.noise_seed = 3", "3: goes with add_noise = true, not with"),
        (OWN + "likelihood.error = 0.3", "0.3: goes with the likelihood of observation.kind, not"),
        ("priors.sigma8 = [1.0, 0.6]", "1 is not below 0.6"),
        ("priors.sigma8 = [0.9, 1.0]", "mock's own.*= 0.8"),
        ("priors.A_s = [1e-9, 2e-9]", "in the place of sigma8"),
        ("priors.b1 = [0, 1]", "observation.bias has no b1: give it there"),
        ("priors.sigma_8 = [0, 1]", "did you mean sigma8"),
        ("priors.transfer = [0, 1]", r"belongs in \[cosmology\]"),
        (OWN + "priors.loudness = [1, 30]\npriors.b1 = [0, 1]", "observation.bias has no b1"),
        (OWN + "priors.loudness = [30, 1]", "30 is not below 1"),
        ("search.evaluations = 0", "0.*at least 1"),
        ("search.stages = []", r"a list of \[radius"),
        ("search.stages = [[4, 0.5, 10]]", "inflation of at least 1"),
        ("search.stages = [[4, 1, 10]]", r"must be \[0, 1, 10\]"),
        ("search.stages = [[0, 1, 10]]\nsearch.evaluations = 5", "5: goes with default stages"),
        ('mesh.shape = "replica:2"', "only chains use a replica axis"),
        ("sampler.draws = -1", "-1.*at least 1"),
        (SAMPLER + 'sampler.method = "hmc"\nsampler.target = 1', "1.*between 0 and 1"),
        (SAMPLER + "sampler.target = 0.7", 'th method = "adjusted-microcanonical" or "hmc", not'),
        (SAMPLER + 'sampler.method = "hmc"\nsampler.length = 1', 'with method = "microcanonical"'),
        (ADJUSTED + "sampler.energy_error = 0.1", '0.1.*goes with method = "microcanonical"'),
        (SAMPLER + "sampler.energy_error = 0", "0.*between 0 and 1"),
        (SAMPLER + 'sampler.start = "far"', '"prior" or "found"'),
        ("search.sigma = 2", r"belongs in \[observation\]"),
    ],
)
def test_one_mistake(tmp_path, keys, message):
    check_mistake(ReconstructionOptions, tmp_path, GOOD, keys, message)


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        (COUNTS.replace("mean_count = 3.0", ""), "observation.mean_count", "is missing.*above 0"),
        (COUNTS.replace("3.0", "0.0"), "observation.mean_count", "0.0.*above 0"),
        (COUNTS.replace("3.0", "3.0\nsigma = 1.0"), "observation.sigma", 'not with "counts"'),
        (
            COUNTS.replace("= 1\n", "= 1\nadd_noise = false\n"),
            "data.add_noise",
            'not with "counts"',
        ),
        (COUNTS.replace("mock_seed = 1", ""), "data.mock_seed,", "neither is given"),
        (FILE.replace("file =", "mock_seed = 1\nfile ="), "data.mock_seed,", "both are given"),
        (GOOD.replace("sigma = 0.2", ""), "observation.sigma", 'with kind = "density".*above 0'),
        (GOOD + "[sampler]\nchains = 4", "sampler.draws", "must be the draws of each chain"),
        (FILE, "data.file", "data.npy: there is no such file"),
        (
            GOOD.replace("steps = 2", 'integrator = "cola"').replace("2lpt", "1lpt"),
            "evolution.integrator",
            "LPT of order 2",
        ),
        (
            GOOD.replace("0.8", '0.8\ntransfer = "camb"').replace(
                "[priors]", "[priors]\nh = [0.6, 0.8]"
            ),
            "priors.h",
            "no gradient with respect to h",
        ),
    ],
)
def test_mistakes_of_other_kinds(tmp_path, text, where, message):
    found = problems(tmp_path, text)
    assert any(p.split(" ")[0] == where and re.search(message, p) for p in found), found
    assert len(found) == 1, found


def test_a_file_need_not_have_the_values_within_the_priors(tmp_path):
    np.save(tmp_path / "data.npy", np.ones((8, 8, 8)))
    text = FILE.replace("[priors]", "[priors]\nsigma8 = [0.9, 1.0]")
    assert ReconstructionOptions.load(write(tmp_path, text)).priors.ranges == {"sigma8": (0.9, 1.0)}


def test_noise_is_a_mocks(tmp_path):
    np.save(tmp_path / "data.npy", np.ones((8, 8, 8)))
    (message,) = problems(tmp_path, FILE.replace("[priors]", "noise_seed = 1\n[priors]"))
    assert message == "data.noise_seed = 1: goes with mock_seed"


def test_files_of_another_shape_are_told_without_being_read(tmp_path):
    np.save(tmp_path / "data.npy", np.ones((8, 8, 4)))
    np.save(tmp_path / "mask.npy", np.ones((4, 4, 4)))
    found = problems(tmp_path, FILE.replace("sigma =", 'mask = "mask.npy"\nsigma ='))
    assert [p.split(" ")[0] for p in found] == ["observation.mask", "data.file"]
    assert "shape (8, 8, 4); must be box.grid = (8, 8, 8)" in found[1]


def test_all_problems_at_once(tmp_path):
    text = FILE.replace("grid = 8", "grid = 7").replace("sigma = 0.2", "sigma = -1")
    text = text.replace("[priors]", "[priors]\nb = [0, 1]").replace("seed = 0", "keep = 0")
    where = {p.split(" ")[0] for p in problems(tmp_path, text)}
    assert where == {"box.grid", "observation.sigma", "search.keep"}


def test_the_mesh(tmp_path):
    path = write(tmp_path, GOOD)
    run = ReconstructionOptions.load(path)
    assert run.mesh_for(2, source=path) == "row:2,col:1"
    assert run.with_mesh("row:2,col:1").mesh.shape == "row:2,col:1"
    for shape, message in (("row:3", "3 places"), ("replica:2", "this is one simulation")):
        with pytest.raises(ConfigError, match=message):
            run.mesh_for(2, source=path, shape=shape)


def test_the_mesh_of_chains(tmp_path):
    """The search uses all ranks for one universe."""
    path = write(tmp_path, GOOD.replace("seed = 0", SAMPLED))
    run = ReconstructionOptions.load(path)
    for shape, searched in (("replica:2,col:2", "row:2,col:2"), ("replica:4", "row:4")):
        assert run.mesh_for(4, source=path, shape=shape) == shape
        assert search_mesh(shape) == searched
    assert run.mesh_for(2, source=path) == "row:2,col:1"
    with pytest.raises(ConfigError, match="does not divide the 4 chains"):
        run.mesh_for(8, source=path, shape="replica:8")
    with pytest.raises(ConfigError, match="row:16 does not divide the 8 cells of x"):
        run.mesh_for(16, source=path, shape="replica:2,row:8")


class MomentumOptions(CellOptions):
    """A kind of observation of one's own: noise of its own, and the forward model it names."""

    kind: Literal["momentum"] = "momentum"
    sigma: float = Field(gt=0, description="a number above 0")

    def forward_model(self, simulation, light_cone=None):
        return f"momentum of {simulation}"


def test_a_kind_of_observation_is_one_model(tmp_path, monkeypatch):
    """With its line in the register it has a name, keys, rules and a forward model."""
    monkeypatch.setitem(OBSERVATIONS, "momentum", MomentumOptions)
    run = ReconstructionOptions.load(write(tmp_path, GOOD.replace('"density"', '"momentum"')))
    assert run.observation == MomentumOptions(structure="2lpt", sigma=0.2)
    assert run.observation.forward_model("all") == "momentum of all"
    assert ReconstructionOptions.load(write(tmp_path, run.resolved())) == run
    (message,) = problems(tmp_path, COUNTS.replace('"counts"', '"momentum"\nsigma = 0.1'))
    assert 'observation.mean_count = 3.0: goes with kind = "counts", not with "momentum"' in message


def test_a_bias_of_ones_own_may_have_no_parameters():
    seen = CellOptions(kind="density", bias_scheme="os:path", bias={})
    assert seen.to_table()["bias"] == {}
    with pytest.raises(ValueError, match="goes with bias"):
        CellOptions(kind="density", bias_scheme="os:path")


def test_nothing_heavy_is_imported():
    done = python(
        "import sys; import flowpm_dist.reconstruction.work\n"
        "print(sorted({'tensorflow', 'horovod', 'mpi4py'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


MAPS = f"""{ROUND_NUMBERS}
[box]
grid = 16
size = 256.0
[evolution]
a_start = 0.3
steps = 2
[observation]
kind = "convergence"
[lightcone]
field_of_view = 12.0
pixels = 4
z_max = 0.3
sources = [{{ redshift = 0.2 }}, {{ redshift = 0.3 }}]
shape_noise = {{ sigma_e = 0.26, n_eff = 10.0 }}
[data]
mock_seed = 1
[priors]
"""


CONE = MAPS[MAPS.index("[lightcone]") : MAPS.index("[data]")]


def test_maps_of_the_convergence(tmp_path):
    run = ReconstructionOptions.load(write(tmp_path, MAPS))
    assert run.lightcone.shape_noise.n_eff == 10 and run.warnings == ()
    again = ReconstructionOptions.load(write(tmp_path, run.resolved()))
    assert again == run
    fine = ReconstructionOptions.load(write(tmp_path, MAPS.replace("pixels = 4", "pixels = 64")))
    assert "would show as much" in fine.warnings[0]


SOURCES = "lightcone.sources = [{ redshift = 0.2 }, { redshift = 0.3 }]"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("lightcone.ray_tracing = true", "is not a key"),
        ('observation.mask = "m.npy"', "= "),
        ('observation.structure = "2lpt"', '= "2lpt"'),
        ("data.noise_seed = 3", "= 3: goes with"),
        ("evolution.a_stop = 0.8", "ends the run at a = 0.8"),
        ("lightcone.z_max = 0.25\n" + SOURCES, "1. reach to z = 0.3"),
        ("priors.amplitude = [0.5, 2.0]", "is given, but maps"),
        ("priors.b1 = [0.5, 2.0]", "is given, but maps of weak lensing"),
        ("priors.sigma_8 = [0.5, 2.0]", "not a parameter; did you mean sigma8?"),
        ("search.stages = [[8.0, 1.0, 2], [0.0, 1.0, 2]]", "has radius 8: maps are not smoothed"),
        ("priors.Omega_m = [0.1, 0.4]\nlightcone.field_of_view = 17.0", "= 17"),
    ],
)
def test_mistakes_about_maps(tmp_path, keys, message):
    check_mistake(ReconstructionOptions, tmp_path, MAPS, keys, message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (CONE, "", "lightcone is missing"),
        ("shape_noise", "# shape_noise", "lightcone.shape_noise is missing: must be a table"),
        ('"convergence"', '"counts"\nmean_count = 1.0', "lightcone is given, but observation.kind"),
    ],
)
def test_what_maps_need(tmp_path, old, new, message):
    assert any(message in problem for problem in problems(tmp_path, MAPS.replace(old, new)))


def test_maps_in_files_must_fit(tmp_path):
    text = MAPS.replace("mock_seed = 1", 'file = "maps.npy"')
    np.save(tmp_path / "maps.npy", np.zeros((2, 4, 5)))
    (message,) = problems(tmp_path, text)
    assert "maps.npy has maps of shape (2, 4, 5); must be (2, 4, 4)" in message
    np.save(tmp_path / "maps.npy", np.full((2, 4, 4), np.nan))
    assert "values that are not finite" in problems(tmp_path, text)[0]
    maps = np.arange(32.0).reshape(2, 4, 4)
    np.save(tmp_path / "maps.npy", maps)
    found = ReconstructionOptions.load(write(tmp_path, text)).checksums()
    np.savetxt(tmp_path / "nz.txt", [[0.1, 1.0], [0.15, 2.0], [0.2, 0.0]])
    listed = text.replace("{ redshift = 0.2 }", '{ file = "nz.txt" }')
    both = ReconstructionOptions.load(write(tmp_path, listed)).checksums()
    assert both.keys() == {"lightcone.sources[0].file", "data.file"}
    assert both["data.file"] == found["data.file"]
    np.savetxt(tmp_path / "nz.txt", [[0.1, 1.0], [0.15, 3.0], [0.2, 0.0]])
    np.save(tmp_path / "maps.npy", maps[:, ::-1])
    changed = ReconstructionOptions.load(write(tmp_path, listed)).checksums()
    assert all(changed[key] != both[key] for key in both)
    message = {"field_of_view": 11.0}
    array = LabelledArray(maps, ("source", "y", "x"), "1", "convergence")
    write_light_cone(tmp_path / "lightcone.zarr", {"kappa": array}, message, {})
    text = text.replace("maps.npy", "lightcone.zarr")
    assert (
        "a field of 11 degrees; must be lightcone.field_of_view = 12" in problems(tmp_path, text)[0]
    )
    cone = ReconstructionOptions.load(write(tmp_path, text.replace("12.0", "11.0"))).lightcone
    read = read_convergence(tmp_path / "lightcone.zarr", cone)
    np.testing.assert_array_equal(read, np.swapaxes(maps, 1, 2))
