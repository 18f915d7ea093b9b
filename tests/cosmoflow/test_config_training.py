"""The run file of a training: each rule is told with what would be right."""

import functools
import json
import math
import re
import tomllib
from pathlib import Path

import pytest
from commands import python
from run_files import problems_of, write

from flowpm_dist.cosmoflow.planning.memory import (
    buffer_bytes,
    check_training_mesh,
    dataset_memory,
    statistics_memory,
)
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.dataset import _check_kept as check_kept
from flowpm_dist.cosmoflow.training.dataset import record as record_of_dataset
from flowpm_dist.cosmoflow.volumes.record_files import DATASET, DatasetHeader, finish_dataset
from flowpm_dist.evolution.corrections import file_of
from flowpm_dist.grid.decomposition import parse_mesh
from flowpm_dist.jobs.folder import OutputError
from flowpm_dist.jobs.run_file import ConfigError
from flowpm_dist.options.base import flat_variants
from flowpm_dist.simulation.cost import COMPILING, process_bytes

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"
GOOD = """
[box]
grid = 32
size = 256.0
[cosmology]
Omega_b = 0.04897
h = 0.6766
[priors]
Omega_m = [0.25, 0.35]
sigma8 = [0.78, 0.95]
n_s = [0.9, 1.0]
[evolution]
steps = 5
[network]
[training]
batch = 4
[data]
simulations = 400
"""
FILES = '[data]\nsource = "files"\nfolder = "set"'
DATA = "[data]\nsimulations = 400"

DEFAULTS = {
    "w0": -1.0,
    "wa": 0.0,
    "Omega_k": 0.0,
    "N_eff": 3.046,
    "m_nu": 0.0,
    "f_NL": 0.0,
    "transfer": "eisenstein-hu",
    "radiation": False,
}
"""What the section [cosmology] has unless given."""


def changed(*changes: tuple[str, str]) -> str:
    """The good file with each text replaced by another."""
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def read(folder: Path, *changes: tuple[str, str]) -> TrainingPlan:
    return TrainingPlan.load(write(folder, changed(*changes)))


problems = functools.partial(problems_of, TrainingPlan)


def dataset(folder: Path, **header: object) -> Path:
    """A folder that holds only what dataset.json says, and empty files."""
    ranges = {"Omega_m": (0.2, 0.4), "sigma8": (0.7, 0.9)}
    settings = {"grid": (32, 32, 32), "parameters": tuple(ranges), "priors": ranges, **header}
    path = folder / "set"
    path.mkdir()
    finish_dataset(path, DatasetHeader(**settings))  # type: ignore[arg-type]
    message = json.loads((path / DATASET).read_text())
    counts = {"train": 640, "validation": 64, "test": 128}
    message["splits"] = {split: {"samples": n, "files": 1} for split, n in counts.items()}
    (path / DATASET).write_text(json.dumps(message))
    for split in counts:
        (path / f"{split}-00000.tfrecord").touch()
    return path


def test_defaults(tmp_path):
    run = read(tmp_path)
    assert (run.network.name, run.network.loss, run.data.source) == (
        "sc18-periodic", "likelihood", "simulate",
    )  # fmt: skip
    assert (run.parameters, run.outputs) == (("Omega_m", "sigma8", "n_s"), 6)
    assert run.training.steps == 400 * 10 // 4
    assert (run.data.buffer, run.data.fill, run.training.warmup) == (400, 64, 100)
    assert run.training.larc is False and run.training.clip_norm == 1.0
    assert run.fixed_parameters == {"Omega_b": 0.04897, "h": 0.6766} | DEFAULTS


def test_the_least_file_has_the_numbers_of_the_defaults(tmp_path):
    run = read(tmp_path, ("batch = 4", ""), ("simulations = 400", ""))
    assert (run.data.simulations, run.training.batch, run.training.steps) == (2000, 4, 5000)


def test_parameters_have_the_order_of_the_file(tmp_path):
    swap = ("Omega_m = [0.25, 0.35]\nsigma8 = [0.78, 0.95]", "sigma8 = [0.7, 1]\nw0 = [-1.1, -0.9]")
    run = read(tmp_path, swap, ("[cosmology]", "[cosmology]\nOmega_m = 0.3"))
    assert run.priors.ranges == {"sigma8": (0.7, 1.0), "w0": (-1.1, -0.9), "n_s": (0.9, 1.0)}
    assert run.parameters == ("sigma8", "w0", "n_s")
    assert "w0" not in run.fixed_parameters
    again = TrainingPlan.load(write(tmp_path, run.resolved()))
    assert again.parameters == run.parameters
    assert again.resolved() == run.resolved()


@pytest.mark.parametrize(
    ("batch", "buffer", "fill"), [(4, 400, 64), (3, 399, 66), (20, 400, 80), (4, 16, 8)]
)
def test_the_buffer_is_first_filled_with_whole_batches(tmp_path, batch, buffer, fill):
    data = f"simulations = {400 // batch * batch}\nbuffer = {buffer}"
    run = read(tmp_path, ("batch = 4", f"batch = {batch}"), ("simulations = 400", data))
    assert run.data.fill == fill


def test_a_short_training_has_a_short_warm_up(tmp_path):
    assert read(tmp_path, ("batch = 4", "batch = 4\nsteps = 50")).training.warmup == 5
    assert read(tmp_path, ("batch = 4", "batch = 4\nwarmup = 0")).training.warmup == 0


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("grid = 32", "grid = [32, 32, 32]"), ("batch = 4", "batch = 5\nlarc = 0.002")],
        [("batch = 4", 'batch = 4\noptimiser = "sgd"\nmomentum = 0.5\nclip_norm = 1')],
        [("batch = 4", 'batch = 4\ndecay = "steps"\nmilestones = [[100, 0.5], [200, 0.25]]')],
        [("batch = 4", 'batch = 4\ndecay = "cosine"\nend_rate = 1e-5\nlarc = true')],
        [("sigma8 = [0.78, 0.95]", ""), ("h = 0.6766", "h = 0.6766\nA_s = 2.1e-9")],
        [
            (
                "steps = 5",
                'edges = [0, 0.5, 1]\nintegrator = "bullfrog"\n[mesh]\nshape = "replica:2"',
            )
        ],
        [("steps = 5", "steps = 5\ndrawn = [{steps = [3, 6]}, {mesh_factor = 2}, {}]")],
        [
            (
                "steps = 5",
                "steps = 5\ndrawn = [{integrator = 'bullfrog'}, {integrator = 'cola'}, {}]",
            )
        ],
        [(DATA, '[data]\nsource = "dummy"'), ("batch = 4", "steps = 20")],
        [(DATA, FILES), ("batch = 4", "epochs = 3"), ("n_s = [0.9, 1.0]", "")],
        [
            (DATA, FILES + '\nstaging = "fast"'),
            ("batch = 4", "steps = 3"),
            ("n_s = [0.9, 1.0]", ""),
        ],
    ],
)
def test_resolved_reads_back_the_same(tmp_path, changes):
    dataset(tmp_path, priors={"Omega_m": (0.25, 0.35), "sigma8": (0.78, 0.95)})
    run = read(tmp_path, *changes)
    again = TrainingPlan.load(write(tmp_path, run.resolved()))
    assert again == run and again.resolved() == run.resolved()


def test_the_example_has_every_section_and_nothing_but_defaults_to_add():
    run, table = TrainingPlan.load(EXAMPLE), tomllib.loads(EXAMPLE.read_text())
    assert set(table) == set(TrainingPlan.model_fields) - {"lightcone"}  # which goes with maps
    resolved = tomllib.loads(run.resolved())
    written = {f"{section}.{key}" for section, keys in table.items() for key in keys}
    follows = {"training.steps", "evolution.deconvolve"}  # from epochs; from two other keys
    assert {f"{s}.{k}" for s, keys in resolved.items() for k in keys} - written == follows


def test_runs_are_drawn(tmp_path):
    """A table has its own force if it says anything of it; else the section's."""
    section = 'mesh_factor = 2\nintegrator = "bullfrog"\na_start = 0.05\nsteps = 5'
    tables = '{steps = [4, 6]}, {correction = "network"}, {deconvolve = true}, {mesh_factor = 1}'
    run = read(tmp_path, ("steps = 5", f"{section}\ndrawn = [{tables}]"))
    choices = [
        [(p.evolution.steps, p.evolution.mesh_factor, p.evolution.deconvolve) for p in plans]
        for plans in run.run_plans
    ]
    steps = [(4, 2, False), (5, 2, False), (6, 2, False)]
    assert choices == [steps, [(5, 1, True)], [(5, 1, True)], [(5, 1, True)]]
    assert {p.evolution.first for plans in run.run_plans for p in plans} == {0.05}
    again = TrainingPlan.load(write(tmp_path, run.resolved()))
    assert again.resolved() == run.resolved()
    of_network = "evolution.drawn[1].correction"
    assert run.files == {of_network: file_of("network")} and list(run.checksums()) == [of_network]
    assert any(re.match(rf"{re.escape(of_network)}: .* not with 5", text) for text in run.warnings)
    assert run.warnings[-1].startswith(f"{of_network}: the force mesh's cell = 8")
    (same,) = read(tmp_path).run_plans
    assert [plan.evolution.steps for plan in same] == [5]
    few = read(tmp_path, ("steps = 5", 'drawn = [{correction = "network", steps = [9, 12]}]'))
    assert sum("not with 9" in text or "not with 12" in text for text in few.warnings) == 2


def test_integrators_of_users_are_drawn(tmp_path, monkeypatch):
    """With their own keys, in the section or in a table."""
    module = "from flowpm_dist.evolution.integrators import BullFrog\n"
    module += "class Mine(BullFrog):\n    strength: float = 1.0\n"
    for number in (1, 2):
        (tmp_path / f"mine{number}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    known = flat_variants(TrainingPlan.model_fields["evolution"].annotation)["integrator"].models
    for number in (1, 2):  # forgotten after the test
        monkeypatch.setitem(known, f"mine{number}:Mine", known["bullfrog"])
    first, second = (f"integrator = 'mine{number}:Mine'" for number in (1, 2))
    section = f"{first}\nstrength = 2.0\ndrawn = [{{steps = [3, 4]}}, {{integrator = 'fastpm'}}]"
    run = read(tmp_path, ("steps = 5", section))
    kinds = [type(plans[0].evolution.integrator).__name__ for plans in run.run_plans]
    assert kinds == ["Mine", "FastPM"] and run.run_plans[0][1].evolution.integrator.strength == 2
    assert TrainingPlan.load(write(tmp_path, run.resolved())) == run
    table = f"drawn = [{{{second}, strength = 3.0}}]"
    run = read(tmp_path, ("steps = 5", table))
    assert run.run_plans[0][0].evolution.integrator.strength == 3
    assert TrainingPlan.load(write(tmp_path, run.resolved())) == run


def test_the_memory_and_the_mesh_of_runs_that_are_drawn(tmp_path):
    """The largest of them counts, and ranks must divide the meshes of all."""
    tables = "{mesh_factor = 1.125}, {mesh_factor = 2}"
    several = f"steps = 5\ndrawn = [{{mesh_factor = 1}}, {tables}]"
    small, large, drawn = (
        read(tmp_path, ("grid = 32", "grid = 128"), ("steps = 5", text), ("batch = 4", "batch = 1"))
        for text in ("steps = 5", "steps = 5\nmesh_factor = 2", several)
    )
    sizes = [dataset_memory(plan, plan.box.grid, {"replica": 1}) for plan in (small, large, drawn)]
    assert sizes[0] < sizes[1] == sizes[2]
    same, finer = (
        dataset_memory(read(tmp_path, ("steps = 5", text)), (32,) * 3, {"replica": 1})
        for text in ("drawn = [{mesh_factor = 2}]", "mesh_factor = 2")
    )
    assert same == finer
    assert mesh_of(tmp_path, 2, "row:2", ("steps = 5", several)) == "row:2"
    with pytest.raises(ConfigError, match="36 x 36 x 36 cells.*row:8"):
        mesh_of(tmp_path, 8, "row:8", ("steps = 5", several))
    for drawn in (tables, "{mesh_factor = 2}, {mesh_factor = 1.125}"):
        change = ("steps = 5", f"steps = 5\ndrawn = [{drawn}]")
        assert mesh_of(tmp_path, 32, None, change) == "replica:4,row:4,col:2"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_messages_in_float16(tmp_path, precision):
    """They go with a simulation in float32, in which a network in bfloat16 learns, too."""
    text = changed(("steps = 5", HALF), ("[network]", f'[network]\nprecision = "{precision}"'))
    assert TrainingPlan.load(write(tmp_path, text)).evolution.exchange == "float16"


def test_balanced_batches_go_with_sobol(tmp_path):
    uniform = ("n_s =", 'sampling = "uniform"\nn_s =')
    (message,) = problems(tmp_path, changed(uniform, ("= 400", "= 400\nbalanced = false")))
    assert message == 'data.balanced = false: goes with priors.sampling = "sobol"'
    assert "balanced" not in read(tmp_path, uniform).to_table()["data"]
    assert read(tmp_path, ("= 400", "= 400\nbalanced = false")).data.balanced is False


OWN = '[network]\nname = "json:loads"'
HALF = 'steps = 5\nexchange = "float16"'
ONE = [
    # the box and the network
    ("grid = 32", "grid = [32, 32, 64]", "box.grid", r"\[32, 32, 64\]: a network's volumes are"),
    ("size = 256.0", "size = [1, 1, 2]", "box.size", "cubes: give one number, or three equal"),
    ("grid = 32", "grid = 31", "box.grid", "even whole number"),
    ("grid = 32", "grid = 4", "box.grid", r"4\]: sc18-periodic: .*; the next side that fits is"),
    ("[network]", '[network]\nname = "sc18"', "box.grid", r"32\]: sc18: .*; the next side that"),
    ("[network]", '[network]\nname = "sc18-per"', "network.name", 'mean sc18-periodic.*"mlperf"'),
    ("[network]", '[network]\nname = "nowhere.at:all"', "network.name", "no module 'nowhere.at'"),
    ("[network]", '[network]\nname = "a b:c"', "network.name", '"package.module:object"'),
    ("[network]", f"{OWN}\ndropout = 0.1", "network.dropout", "not with the Keras model json"),
    ("[network]", '[network]\nloss = "l3"', "network.loss", '"likelihood"'),
    ("[network]", '[network]\nprecision = "float16"', "network.precision", "'float16'.*bfloat16"),
    ("[network]", '[network]\ninput = "log"', "network.input", '"log1p"'),
    ("[network]", "[network]\ngather_below = 0", "network.gather_below", "at least 1"),
    ("[network]", "[network]\ndropout = 1.0", "network.dropout", "from 0 to below 1"),
    # parameters
    ("n_s = [0.9, 1.0]", "", "cosmology.n_s", r"is missing: fix it at a number.*\[priors\]"),
    ("h = 0.6766", "", "cosmology.h", r"is missing: fix it at .*\[priors\]"),
    ("h = 0.6766", "h = 0.6766\nn_s = 1", "priors.n_s", "and cosmology.n_s, too: fix it, or"),
    ("n_s = [0.9, 1.0]", "n_s = [1.0, 0.9]", "priors.n_s", "1 is not below 0.9; must be .low, hi"),
    ("n_s = [0.9, 1.0]", "n_s = 0.9", "priors.n_s", "0.9: must be .low, high"),
    ("n_s = [0.9, 1.0]", "n_s = [0.9, 3.5]", "priors.n_s", "each a number above 0, below 3"),
    ("n_s = [0.9, 1.0]", "ns = [0.9, 1.0]", "priors.ns", "did you mean n_s"),
    ("n_s = [0.9, 1.0]", "A_s = [1e-9, 2e-9]", "priors.A_s", r"belongs in \[cosmology\]"),
    ("[0.25, 0.35]", "[0.04, 0.35]", "cosmology.Omega_b", r"below Omega_m = \[0.04, 0.35\]"),
    ("n_s =", "wa = [0, 1]\nn_s =", "priors.wa", r"\[0.0, 1.0\]: w0 \+ wa must be at most -0.2"),
    ("n_s =", 'sampling = "grid"\nn_s =', "priors.sampling", '\'grid\'.*"sobol"'),
    ("sigma8 = [0.78, 0.95]", "", "cosmology.sigma8,", "A_s, priors.sigma8 none is given: give ex"),
    ("h = 0.6766", "h = 0.6766\nA_s = 2e-9", "cosmology.A_s,", "priors.sigma8 both are given"),
    # initial conditions and evolution, as of a simulation
    ("steps = 5\n[network]", f"{HALF}\n[network]\nprecision = 'float64'", "evolution.exchange",
     'goes with precision = "float32", not with "float64"'),
    ("[network]", "[initial]\nseed = 1\n[network]", "initial.seed", r"\[training\] or \[data\]"),
    ("[network]", "[initial]\nlpt_order = 4\n[network]", "initial.lpt_order", "1, 2 or 3"),
    ("steps = 5", "steps = 5\nedges = [0.1, 1]", "evolution.steps", "goes with equal steps"),
    ("steps = 5", "a_start = 0", "evolution.a_start", "starts at 0: only bullfrog can start"),
    ("steps = 5", "drawn = []", "evolution.drawn", r"= \[\]: must have at least one table"),
    ("steps = 5", "drawn = 3", "evolution.drawn", "= 3: must be a list of tables of keys"),
    ("steps = 5", "drawn = [{}, 3]", "evolution.drawn[1]", "= 3: must be a table of keys"),
    ("steps = 5", "drawn = [{steps = [6, 3]}]", "evolution.drawn[0].steps", "most 100, rising"),
    ("steps = 5", "drawn = [{steps = [1, 101]}]", "evolution.drawn[0].steps", "most 100, rising"),
    ("steps = 5", "drawn = [{steps = [true, 3]}]", "evolution.drawn[0].steps", "most 100, rising"),
    ("steps = 5", "drawn = [{stepps = 4}]", "evolution.drawn[0].stepps", "did you mean steps"),
    *(("steps = 5", f"drawn = [{{{key} = {value}}}]", f"evolution.drawn[0].{key}", "same in all")
      for key, value in (("a_start", 0.2), ("a_stop", 0.5), ("edges", "[0.1, 1]"), ("drawn", "[]"),
                         ("adjoint", "'direct'"), ("keep_fields", "true"), ("pyramid", "'1%'"))),
    ("steps = 5", "drawn = [{half_step = 'geometric'}, {}]\nintegrator = 'bullfrog'",
     "evolution.drawn[0].half_step", 'goes with integrator = "fastpm" or "cola"'),
    ("steps = 5", "drawn = [{}, {mesh_factor = 1.01}]", "evolution.drawn[1].mesh_factor", "1.0625"),
    ("steps = 5", "drawn = [{}, {integrator = 'cola'}]\n[initial]\nlpt_order = 1",
     "initial.lpt_order", r"COLA .* \(with evolution.drawn\[1\]\)"),
    ("steps = 5", "stepps = 5\ndrawn = [{steps = [3, 6]}]", "evolution.stepps", "did you mean ste"),
    ("steps = 5", "drawn = [{}]\n[observation]\nstructure = '2lpt'", "evolution.drawn",
     r'= \[{}\]: goes with observation.structure = "pm"'),
    ("steps = 5", "drawn = [{correction = 'default'}]\npyramid = '1%'", "evolution.pyramid",
     r"correction of the force.* \(with evolution.drawn\[0\]\)"),
    ("[network]", '[run]\nprecision = "float64"\n[network]', "run.precision", r"in \[network\]"),
    ("[network]", "[run]\nhalo = 0\n[network]", "run.halo", '"auto" or a whole number'),
    ("[network]", '[mesh]\nshape = "rows:2"\n[network]', "mesh.shape", "did you mean row.*replica"),
    # training
    ("batch = 4", "batch = 0", "training.batch", "at least 1"),
    ("batch = 4", "learning_rate = 0.0", "training.learning_rate", "above 0"),
    ("batch = 4", "learning_rat = 0.1", "training.learning_rat", "did you mean learning_rate"),
    ("batch = 4", 'optimiser = "adamw"', "training.optimiser", '"adam" or "sgd"'),
    ("batch = 4", "momentum = 0.5", "training.momentum", 'optimiser = "sgd", not with "adam"'),
    ("batch = 4", 'decay = "none"\npower = 2', "training.power", '"polynomial", not with "none"'),
    ("batch = 4", 'decay = "none"\nend_rate = 0', "training.end_rate", '"polynomial" or "cosine"'),
    ("batch = 4", "milestones = [[5, 0.1]]", "training.milestones", r'"steps" or "epochs", no'),
    ("batch = 4", 'decay = "steps"', "training.milestones", "is missing: must be .*factor"),
    ("batch = 4", 'decay = "steps"\nmilestones = [[5, 1], [5, 0]]', "training.milestones", "p 5"),
    ("batch = 4", "end_rate = 0.1", "training.end_rate", "most the rate before the decay, 0.0001"),
    ("batch = 4", 'rate_rule = "log"', "training.rate_rule", '"sqrt"'),
    ("batch = 4", "larc = 0", "training.larc", "true, false, or a trust coefficient"),
    ("batch = 4", 'larc = "yes"', "training.larc", "true, false, or a trust coefficient"),
    ("batch = 4", "clip_norm = -1", "training.clip_norm", "above 0, or 0 for none"),
    ("batch = 4", "weight_decay = -1", "training.weight_decay", "at least 0"),
    ("batch = 4", "warmup = 1000", "training.warmup", "1000: must be below the 1000 steps"),
    ("batch = 4", "warmup = 9\nsteps = 9", "training.warmup", "below the 9 steps"),
    ("batch = 4", "warmup = -1", "training.warmup", "-1: must be a whole number of at least 0"),
    ("batch = 4", "epochs = 2", "training.epochs", 'goes with data.source = "files" or "arr'),
    ("batch = 4", "keep = 0", "training.keep", "at least 1"),
    ("steps = 5", 'steps = 5\nadjoint = "direct"', "evolution.adjoint", "goes with reconstruct"),
    ("batch = 4", "patience = 0", "training.patience", "number of validations, at least 1"),
    ("batch = 4", "start_from = 1", "training.start_from", "the folder of a training"),
    # data
    ("batch = 4", "batch = 3", "data.simulations", "400: must be a multiple of .* = 3: 399 or 402"),
    ("= 400", "= 3", "data.simulations", "3: must be a multiple of training.batch = 4: 4$"),
    ("= 400", "= 400\nbuffer = 90", "data.buffer", "90: must be a multiple .* = 4: 88 or 92"),
    ("= 400", "= 400\nfill = 5", "data.fill", "5: must be a multiple of .* = 4: 4 or 8"),
    ("= 400", "= 400\nbuffer = 404", "data.buffer", "404: must be at most data.simulations = 400"),
    ("= 400", "= 400\nbuffer = 40\nfill = 80", "data.fill", "at most 20 with data.buffer = 40"),
    ("= 400", "= 400\nfill = 404", "data.fill", "404: must be at most data.simulations = 400"),
    ("= 400", "= 400\nvalidation = 3", "data.validation", "at least training.batch = 4"),
    ("= 400", "= 400\ntest = 0", "data.test", "0: must be a whole number of at least 1"),
    ("batch = 4", "batch = 200", "data.validation", "128, the default: must be at least .*= 200"),
    ("= 400", "= 400\nreuse = 0", "data.reuse", "at least 1"),
    ("= 400", '= 400\nfolder = "set"', "data.folder", 'goes with source = "files", not with'),
    ("= 400", "= 400\nsource = 3", "data.source", '"files", "arrays" or "dummy"'),
    ("= 400", "= 400\nagument = true", "data.agument", "did you mean augment"),
    # whole sections
    ("[network]", "[results]\n[network]", "results", "is not a section"),
    ("[box]", "batch = 3\n[box]", "batch", r"belongs in \[training\]"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "where", "message"), ONE)
def test_one_mistake(tmp_path, old, new, where, message):
    found = problems(tmp_path, changed((old, new)))
    assert any(p.split(" ")[0] == where and re.search(message, p) for p in found), found
    # Some mistakes also leave a parameter without a value.
    assert len(found) == 1 or where in ("priors.ns", "priors.A_s")


def test_a_keras_model_scales_its_features_and_is_not_split(tmp_path):
    (found,) = problems(tmp_path, changed(("[network]", OWN), ("batch = 4", "calibrate = 8")))
    assert re.match("training.calibrate = 8: must be 0 or left out: .* model json:loads", found)
    assert read(tmp_path, ("[network]", OWN)).training.calibrate == 0
    assert mesh_of(tmp_path, 2, None, ("[network]", OWN)) == "replica:2"
    with pytest.raises(ConfigError, match="json:loads is a Keras model.*, or the mesh replica:2"):
        mesh_of(tmp_path, 2, "row:2", ("[network]", OWN))


def test_no_priors(tmp_path):
    a, b = GOOD.index("Omega_m"), GOOD.index("[evolution]")
    found = problems(tmp_path, GOOD[:a] + GOOD[b:])
    assert "priors is empty: give [low, high] to at least one of Omega_m, Omega_b" in found[0]
    assert {p.split(" ")[0] for p in found[1:]} == {
        "cosmology.Omega_m", "cosmology.n_s", "cosmology.sigma8,",
    }  # fmt: skip


def test_a_section_that_is_none_causes_no_second_complaint(tmp_path):
    a, b = GOOD.index("[cosmology]"), GOOD.index("[priors]")
    assert problems(tmp_path, f"cosmology = 3\n{GOOD[:a]}{GOOD[b:]}") == [
        "cosmology = 3: must be a section [cosmology] with keys below it"
    ]


def test_the_side_that_is_said_to_fit_does(tmp_path):
    for name in ("sc18", "sc18-periodic", "mlperf"):
        network = "[network]", f'[network]\nname = "{name}"'
        (found,) = problems(tmp_path, changed(network, ("grid = 32", "grid = 6")))
        side = int(found.rpartition(" ")[2])
        assert read(tmp_path, network, ("grid = 32", f"grid = {side}")).width == side
        assert problems(tmp_path, changed(network, ("grid = 32", f"grid = {side - 2}")))


def test_files_need_neither_universes_nor_priors(tmp_path):
    folder = dataset(tmp_path)
    text = "[box]\ngrid = 32\nsize = 64.0\n[training]\nepochs = 3\nbatch = 10\n"
    run = TrainingPlan.load(write(tmp_path, text + FILES))
    assert run.data.folder == folder
    assert run.parameters == ("Omega_m", "sigma8")
    assert run.training.steps == 3 * 640 // 10
    assert run.fixed_parameters.keys() <= DEFAULTS.keys()
    assert set(tomllib.loads(run.resolved())) == {"box", "network", "training", "data", "run"}
    assert buffer_bytes(run, run.box.grid, {"replica": 2}) == 0


@pytest.mark.parametrize(
    ("training", "data", "message"),
    [
        ("epochs = 3\nsteps = 4", "", "training.steps, training.epochs both are given"),
        ("", "", "training.steps, training.epochs neither is given"),
        ("epochs = 3", "simulations = 4", 'data.simulations = 4: goes with .*"simulate", not'),
        ("epochs = 3\nbatch = 65", "", "its split 'validation' has 64 samples; .* = 65"),
        ("epochs = 3", 'parameters = ["sigma8"]', "data.parameters = .*: the parameters in"),
        ("epochs = 3", 'parameters = ["a", "a"]', "data.parameters .* 'a' is named twice"),
        ("epochs = 3", "[priors]\nn_s = [0.9, 1.0]", "priors are of n_s, .* Omega_m, sigma8"),
        ("epochs = 3", "[priors]\nOmega_m = [0.2, 0.4]\nsigma8 = [0.7, 1]",
         r"priors.sigma8 = \[0.7, 1.0\]: the volumes in .* were drawn from \[0.7, 0.9\]"),
        ("epochs = 3\n[box]\ngrid = 64", "", r"box.grid = .*: the volumes in .* \[32, 32, 32\]"),
    ],
)  # fmt: skip
def test_one_mistake_about_files(tmp_path, training, data, message):
    dataset(tmp_path)
    box = "" if "[box]" in training else "[box]\ngrid = 32\n"
    text = f"{box}[training]\n{training}\n{FILES}\n{data}"
    text = text.replace("[box]\n", "[box]\nsize = 64.0\n")
    (found,) = problems(tmp_path, text)
    assert re.search(message, found), found


def test_files_tell_the_box_that_is_left_out(tmp_path):
    dataset(tmp_path, box_size=128.0)
    text = "[training]\nepochs = 3\n" + FILES
    run = TrainingPlan.load(write(tmp_path, text))
    assert (run.box.grid, run.box.size) == ((32,) * 3, (128.0,) * 3)
    again = TrainingPlan.load(write(tmp_path, run.resolved()))
    assert again.to_table()["box"]["size"] == [128.0] * 3
    (found,) = problems(tmp_path, "[box]\nsize = 64.0\n" + text)
    message = (
        r"box.size = .64.0, .*: the volumes in .*set have sides of \[128.0, 128.0, 128.0\] Mpc/h"
    )
    assert re.match(message, found)


def test_files_of_an_unknown_box_need_its_size(tmp_path):
    dataset(tmp_path)
    (found,) = problems(tmp_path, "[training]\nepochs = 3\n" + FILES)
    assert found.startswith("box.size is missing")


def test_public_files_tell_neither_names_nor_numbers(tmp_path):
    (tmp_path / "set" / "train").mkdir(parents=True)
    text = "[box]\ngrid = 128\nsize = 64.0\n[training]\n{}\n" + FILES
    assert problems(tmp_path, text.format("epochs = 1"))[0].split(" ")[0] == "data.parameters"
    named = text + '\nparameters = ["a", "b", "c", "d"]'
    (problem,) = problems(tmp_path, named.format("steps = 7"))
    assert re.match("data.folder = .*set.: .* 'train' and 'validation'; .* none at all", problem)
    for split in ("train", "validation"):
        (tmp_path / "set" / split).mkdir(exist_ok=True)
        for number in range(12):
            (tmp_path / "set" / split / f"univ_{number}.tfrecord").write_bytes(record(100))
    run = TrainingPlan.load(write(tmp_path, named.format("steps = 7")))
    assert (run.parameters, run.outputs, run.training.steps) == (("a", "b", "c", "d"), 8, 7)
    assert (run.data.augment, run.network.input) == ("symmetries", "log1p-counts")
    assert (
        TrainingPlan.load(write(tmp_path, named.format("epochs = 5"))).training.steps == 5 * 12 // 4
    )
    (problem,) = problems(tmp_path, named.format("steps = 7") + "\naugment = true")
    assert re.match('data.augment = true: .* a seam: give "symmetries" or false', problem)
    (tmp_path / "set/train/univ_0.tfrecord").write_bytes(2 * record(100))
    (problem,) = problems(tmp_path, named.format("epochs = 5"))
    assert re.match("training.epochs is given, but files hold several samples", problem)
    (tmp_path / "set/train/univ_0.tfrecord").write_text("<!DOCTYPE html><title>Sign in</title>")
    (problem,) = problems(tmp_path, named.format("epochs = 5"))
    assert re.match("data.folder.*univ_0.tfrecord is no TFRecord file", problem)


def record(size: int) -> bytes:
    """What a record of a TFRecord file is to one who reads lengths alone."""
    return size.to_bytes(8, "little") + bytes(size + 8)


def test_priors_are_in_the_dataset_or_in_the_run_file(tmp_path):
    dataset(tmp_path, priors=None)
    text = "[box]\ngrid = 32\nsize = 64.0\n[training]\nepochs = 3\n" + FILES
    (found,) = problems(tmp_path, text)
    assert re.match(r"priors is empty, .* each of Omega_m, sigma8$", found)
    run = TrainingPlan.load(
        write(tmp_path, text + "\n[priors]\nsigma8 = [0.7, 1]\nOmega_m = [0.2, 0.4]")
    )
    assert run.parameters == ("Omega_m", "sigma8")


def test_a_dataset_that_is_not_there(tmp_path):
    files = ("batch = 4", "steps = 4"), (DATA, FILES)
    (found,) = problems(tmp_path, changed(*files))
    assert re.fullmatch("data.folder = .*set.: there is no such folder", found)
    (found,) = problems(tmp_path, changed(files[0], (DATA, '[data]\nsource = "files"')))
    assert found.startswith("data.folder is missing")
    dataset(tmp_path)
    (tmp_path / "set/validation-00000.tfrecord").unlink()
    lacks = "has 0 files of split 'validation', dataset.json lists 1: copy or write the missing"
    assert [lacks in found for found in problems(tmp_path, changed(*files))].count(True) == 1
    (tmp_path / "set" / DATASET).write_text("{}")
    (found,) = problems(tmp_path, changed(*files))
    assert "dataset.json is damaged" in found


@pytest.mark.parametrize("run", [None, 7, ["x"], "no run file", "a = 1e", "data = 3"])
def test_a_dataset_whose_run_file_cannot_be_read_has_other_settings(tmp_path, run):
    folder = dataset(tmp_path, attributes={"run": run})
    entry = record_of_dataset(folder)
    assert (entry.kind, entry.state, entry.settings) == ("dataset", "complete", {})
    header = DatasetHeader((32,) * 3, ("Omega_m", "sigma8"), attributes={"run": "[data]\nseed = 1"})
    with pytest.raises(OutputError, match="holds train, which differ in .*data.seed"):
        check_kept(folder, header, ["train"])


def test_dummy_data_need_a_number_of_steps(tmp_path):
    (found,) = problems(tmp_path, changed((DATA, '[data]\nsource = "dummy"')))
    assert found.startswith("training.steps is missing")
    (found,) = problems(
        tmp_path, changed((DATA, '[data]\nsource = "dummy"\ntest = 4'), ("batch = 4", "steps = 4"))
    )
    message = 'goes with source = "simulate" or "arrays", not with "dummy"'
    assert found == f"data.test = 4: {message}"


def mesh_of(folder: Path, ranks: int, shape: str | None, *changes: tuple[str, str]) -> str:
    return check_training_mesh(
        read(folder, *changes), ranks, source=folder / "run.toml", shape=shape
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("batch", [1, 4, 6])
def test_the_mesh_chosen_fits(tmp_path, ranks, batch):
    data = ("= 400", "= 408"), ("grid = 32", "grid = 96")
    shape = mesh_of(tmp_path, ranks, None, *data, ("batch = 4", f"batch = {batch}"))
    axes = parse_mesh(shape, batched=True)
    assert math.prod(axes.values()) == ranks
    assert batch % axes["replica"] == 0
    assert 96 % axes.get("row", 1) == 96 % axes.get("col", 1) == 0
    assert axes["replica"] == max(n for n in range(1, 9) if ranks % n == batch % n == 0)


def test_a_mesh_of_the_file_and_one_of_the_command_line(tmp_path):
    given = "[network]", '[mesh]\nshape = "replica:2,row:2"\n[network]'
    assert mesh_of(tmp_path, 4, None, given) == "replica:2,row:2"
    assert mesh_of(tmp_path, 4, "col:4", given) == "col:4"
    run = read(tmp_path, given).with_mesh("row:8")
    assert check_training_mesh(run, 8, source=tmp_path) == run.mesh.shape == "row:8"


SC18 = ("[network]", '[network]\nname = "sc18"'), ("grid = 32", "grid = 128")


@pytest.mark.parametrize(
    ("ranks", "shape", "changes", "message"),
    [
        (2, "replica:4", (), "--mesh = 'replica:4': 4 places, but the job has 2 ranks"),
        (3, "replica:3", (), "replica:3 does not divide the 4 volumes of the batch.*: 1, 2, 4"),
        (3, "row:3", (), "row:3 does not divide the 32 cells of x"),
        (3, "col:3", (), "col:3 does not divide the 32 cells of y"),
        (8, "row:2,col:2,replica:2", (), "replica must come first: replica:...,row:...,col:..."),
        (2, "col:two", (), "is not of the form axis:size"),
        (4, "replica:2,row:2", SC18, "sc18 has valid edges.*use sc18-periodic, .* replica:4"),
        (8, None, SC18, "batch = 4: .* 4 of 8 ranks, and sc18 has valid edges.*such as 8"),
        (3, None, (), "batch = 4: .* 1 of 3 ranks, and no mesh of 3 ranks .*such as 12"),
    ],
)
def test_a_mesh_that_does_not_fit(tmp_path, ranks, shape, changes, message):
    with pytest.raises(ConfigError, match=message):
        mesh_of(tmp_path, ranks, shape, *changes)


def test_the_buffer_is_spread_over_all_ranks(tmp_path):
    run = read(tmp_path, ("= 400", "= 400\nbuffer = 80"))
    whole = 80 * 32**3 * 4
    assert buffer_bytes(run, run.box.grid, {"replica": 1}) == whole
    assert buffer_bytes(run, run.box.grid, {"replica": 2, "row": 2, "col": 2}) * 8 == whole


def test_nothing_heavy_is_imported(tmp_path):
    path = write(tmp_path, GOOD)
    done = python(
        "import sys; from flowpm_dist.cosmoflow.planning.plan import *\n"
        "from flowpm_dist.cosmoflow.planning.memory import *\n"
        f"check_training_mesh(TrainingPlan.load({str(path)!r}), 2, source={str(path)!r})\n"
        "print(sorted({'tensorflow', 'horovod', 'mpi4py'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("grid", "structure", "peak"), [(96, "1lpt", 1015), (128, "1lpt", 1393), (96, "pm", 1016)]
)
def test_a_dataset_takes_the_memory_that_was_measured(tmp_path, grid, structure, peak):
    """Of batches of four on one rank, to 5 % [MiB]; see docs/measurements/memory.md."""
    requested = f'[observation]\nstructure = "{structure}"\n[network]'
    plan = TrainingPlan.load(write(tmp_path, changed(("[network]", requested))))
    message = dataset_memory(plan, (grid,) * 3, {"row": 1, "col": 1})
    assert message / 2**20 == pytest.approx(peak, rel=0.05)


def test_statistics_of_simulated_volumes_take_the_memory_of_a_batch(tmp_path):
    """Four universes of 128^3 in float32, 4 * 8 MiB, at 5 + 45 values a cell, over the ranks."""
    plan = read(tmp_path, ("grid = 32", "grid = 128"), ("size = 256.0", "size = 1024.0"))
    for mesh, share in (("row:1", 1), ("row:2", 2), ("replica:2,row:1", 2), ("replica:2,row:2", 4)):
        axes = parse_mesh(mesh, batched=True)
        message = statistics_memory(plan, (128, 128, 128), axes, ("power", "bispectrum"))
        assert message - process_bytes(axes, "train") - COMPILING == 50 * 4 * 8 * 2**20 // share
