"""`flowpm-dist emulate`: learns, goes on, refuses; its result is used by other jobs."""

import dataclasses
import json
import re
import shutil
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from commands import flowpm, flowpm_here, folder_with, plain

import flowpm_dist as fpm
from flowpm_dist.corrections.options import SPACING
from flowpm_dist.corrections.scores import verdict
from flowpm_dist.emulate.job import CONVERGED, EmulationJob
from flowpm_dist.emulate.options import EmulationOptions
from flowpm_dist.evolution.corrections import (
    CorrectionWarning,
    PotentialFilter,
    Range,
    ResidualNetwork,
    file_of,
    load_correction,
)
from flowpm_dist.jobs.job import Request, read_record
from flowpm_dist.jobs.results import read_rows
from flowpm_dist.observables import ForwardModel
from flowpm_dist.observables.lensing import SourcePlane
from flowpm_dist.observables.light_cone import FlatField, LightCone
from flowpm_dist.simulate.options import SimulationOptions
from flowpm_dist.simulation.speeds import kind_of, record_rate
from meshimpl.launch import user_cache

RUN = """[cosmology]
Omega_b = 0.049
h = 0.677
n_s = 0.965
sigma8 = 0.81
[priors]
Omega_m = [0.25, 0.35]
[box]
grid = 8
size = 16.0
[evolution]
integrator = "bullfrog"
steps = 2
[truth]
universes = 2
mesh_factor = 2
steps = 3
[emulate]
iterations = 5
validation = 1
validate_every = 3
checkpoint_every = 2
"""

here = folder_with(RUN)


@pytest.fixture
def truth_paints(monkeypatch):
    """Returns, for each state of the truth, how often its density was painted so far."""
    from flowpm_dist.emulate.truth import Truth

    pairs, density = Truth.pairs, fpm.State.density
    known, painted = [], []

    def recorded(self, *args):
        found = pairs(self, *args)
        known.extend(state.displacement.block for pair in found for state in pair.truth)
        return found

    def counted(self, *args, **more):
        painted.append(self.displacement.block)
        return density(self, *args, **more)

    monkeypatch.setattr(Truth, "pairs", recorded)
    monkeypatch.setattr(fpm.State, "density", counted)
    return lambda: [sum(block is each for block in painted) for each in known]


@pytest.mark.budget(60)
def test_a_correction_is_learned_goes_on_and_is_used(here, truth_paints):
    """Its file says for what; a simulation uses it, warns, and refuses another force.

    Each state of the truth is painted once, in five iterations and two validations.
    """
    assert flowpm_here("emulate", "run.toml", "--output", "whole").returncode == 0
    assert truth_paints() == [1, 1, 1]
    cut = ("emulate", "run.toml", "--output", "cut", "--set", "emulate.iterations=2")
    assert flowpm_here(*cut).returncode == 0
    other = flowpm_here("emulate", "run.toml", "--output", "cut", "--resume")
    assert "emulate.iterations = 5: the emulation in cut has 2" in plain(other.stderr)

    whole = load_correction("whole/correction.json")
    rows = read_rows(Path("whole/iterations.csv"))
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4, 5]
    losses = [float(row["held out"]) for row in rows if row["held out"]]
    assert len(losses) == 2 and whole.scores["loss"] == pytest.approx(min(losses))
    assert whole.trained.cosmology["Omega_m"][0] >= 0.25 and whole.trained.cell == (2.0, 2.0)
    assert whole.trained.times == (1.0, 1.0)
    for name in ("correction.png", "learning.png"):
        assert Path("whole", name).stat().st_size > 5000
        assert name in Path("whole/report.html").read_text()
    done = flowpm_here("emulate", "run.toml", "--output", "whole", "--resume")
    assert "whole is complete" in done.stdout
    check_estimates()

    run = RUN.partition("[priors]")[0] + "Omega_m = 0.31\n[initial]\nseed = 1\n"
    run += '[box]\ngrid = 8\nsize = 16.0\n[evolution]\nintegrator = "bullfrog"\nsteps = 2\n'
    run += 'correction = "whole/correction.json"\n[output]\nfigures = false\n'
    Path("simulate.toml").write_text(run)
    found = flowpm_here("simulate", "simulate.toml", "--output", "used")
    assert found.returncode == 0 and "warning" not in found.stderr
    resolved = tomllib.loads(Path("used/run.toml").read_text())
    assert resolved["evolution"]["correction"].endswith("whole/correction.json")
    used = fpm.State.from_snapshot("used").displacement.numpy()
    sim = fpm.Simulation(
        fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, sigma8=0.81),
        8, 16.0, fpm.scale_factor_steps(0.1, 1.0, 2), integrator="bullfrog", correction=whole,
    )  # fmt: skip
    np.testing.assert_array_equal(sim.run(seed=1).displacement.numpy(), used)
    plain_run = sim.with_correction(None).run(seed=1)
    assert np.abs(plain_run.displacement.numpy() - used).max() > 1e-4
    warned = flowpm("simulate", "simulate.toml", "--check", "--set", "box.size=8")
    assert "the force mesh's cell = 1, where it was trained with 2" in plain(warned.stdout)
    with pytest.warns(CorrectionWarning, match="trained with 2 steps, not with 3"):
        fpm.Simulation(
            sim.cosmology, 8, 16.0, [0.1, 0.4, 0.7, 1.0], integrator="bullfrog", correction=whole
        )
    other = flowpm_here("simulate", "simulate.toml", "--set", "evolution.deconvolve=false")
    assert "the correction was trained with deconvolve = true" in plain(other.stderr)
    with pytest.raises(ValueError, match="deconvolve = false: the correction was trained with"):
        fpm.Simulation(sim.cosmology, 8, 16.0, [0.1, 1.0], correction=whole, deconvolve=False)


def check_estimates():
    """Times of 2 s for an iteration and 10 s for a converged run make those of emulations."""
    rates = json.loads((user_cache() / "rates.json").read_text())
    for work, cells, seconds in (("emulate", 8**3 * 2, 2.0), (CONVERGED, 16**3 * 3, 10.0)):
        assert str(cells) in rates[kind_of(work, 1)]  # the runs have measured theirs
        record_rate(kind_of(work, 1), cells, seconds / cells)

    def seconds(folder, **more):
        request = Request(Path("run.toml"), 1, Path(folder), **more)
        return EmulationJob.plan(request).costs.estimate.seconds

    assert seconds("next") == pytest.approx(5 * 2 + 3 * 10)
    assert seconds("whole", resume=True) == 0
    shutil.rmtree("whole/truth/001-a_1.0000")
    assert seconds("whole", resume=True) == pytest.approx(10)


@pytest.mark.parametrize(
    ("corrected", "losses", "said"),
    [
        (
            [1.02, 1.03, 1.01],
            (2e-2, 1e-2),
            "P nearer (error 0.11 -> 0.02, by -0.09 +- 0.006), "
            "phases nearer (error 0.02 -> 0.01, by -0.01 +- 0); 3 universes held out, which also",
        ),
        ([1.20, 1.23, 1.21], (2e-2, 1e-2), "P farther from the truth (error 0.11 -> 0.21"),
        (
            [1.02, 1.03, 1.01],
            (1e-6, 2e-6),
            "P nearer (error 0.11 -> 0.02, by -0.09 +- 0.006), "
            "phases not decided (error 1e-06 -> 2e-06",
        ),  # too small to count
        (
            [1.02, 1.20, 1.01],
            (1e-2, 2e-2),
            "P not decided (error 0.11 -> 0.077, by -0.033 +- "
            "0.06), phases farther from the truth (error 0.01 -> 0.02",
        ),
        ([1.02], (2e-2, 1e-2), "P not decided (error 0.1 -> 0.02), phases not decided (error 0.02"),
    ],
)
def test_the_verdict_compares_each_universe_with_itself(corrected, losses, said):
    rows = [
        {
            "universe": f"seed {universe}", SPACING: 4.0, "a": a, "k [h/Mpc]": 0.1,
            "P plain": (1.10, 1.12, 1.11)[universe], "P corrected": ratio,
            "1 - r plain": losses[0], "1 - r corrected": losses[1],
        }
        for universe, ratio in enumerate(corrected)
        for a in (0.5, 1.0)
    ]  # fmt: skip
    assert verdict(rows).startswith(said)  # differences of -0.08, -0.09, -0.10 in the first


@pytest.fixture
def interrupted(monkeypatch):
    """The numbers of the iterations that are made; the third is interrupted at its first time."""
    from flowpm_dist.corrections.learner import Steps

    real, calls = Steps.step, []

    def step(self, gradient):
        real(self, gradient)
        calls.append(self.done)
        if self.done == 3 and len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Steps, "step", step)
    return calls


@pytest.mark.budget(40)
def test_a_killed_emulation_goes_on_to_the_same_bits(here, interrupted):
    """Of universes in boxes of two sizes, with its range, from a table of power."""
    table = np.array([[k, 2e4 * k / (1 + (k / 0.02) ** 2) ** 1.3] for k in np.geomspace(1e-3, 20)])
    np.savetxt("pk.txt", table)
    own = RUN.replace("Omega_m = [0.25, 0.35]", "").replace("sigma8 = 0.81", "Omega_m = 0.3")
    Path("run.toml").write_text(own.replace("n_s = 0.965", 'n_s = 0.965\npower = "pk.txt"'))
    run = ("emulate", "run.toml", "--set", "truth.sizes=[16.0, 32.0]", "--output")
    assert flowpm_here(*run, "killed").returncode != 0
    resume = (*run, "killed", "--resume")
    kept = Path("killed/checkpoint.npz").read_bytes()
    Path("killed/checkpoint.npz").write_bytes(kept[: len(kept) // 2])
    damaged = flowpm_here(*resume)
    assert "of 2 iterations is missing or damaged" in plain(damaged.stderr)
    Path("killed/checkpoint.npz").unlink()
    assert "of 2 iterations is missing or damaged" in plain(flowpm_here(*resume).stderr)
    Path("killed/checkpoint.npz").write_bytes(kept)
    np.savetxt("pk.txt", table * [1, 2])
    changed = plain(flowpm_here(*resume).stderr)
    assert "cosmology.power = " in changed and "it has other values than when" in changed
    np.savetxt("pk.txt", table)
    chunks = sorted(Path("killed/truth").glob("*/snapshot.zarr/velocity/c/*/*/*/*"))
    chunks[0].unlink()  # its converged run is made again
    assert flowpm_here(*resume).returncode == 0
    assert interrupted == [1, 2, 3, 3, 4, 5]  # the last checkpoint was of 2
    assert flowpm_here(*run, "whole").returncode == 0
    killed, whole = (load_correction(f"{name}/correction.json") for name in ("killed", "whole"))
    np.testing.assert_array_equal(killed.theta, whole.theta)
    assert whole.trained.cell == pytest.approx((2.0, 4.0))
    sizes = [
        fpm.State.from_snapshot(path).box.size[0] for path in sorted(Path("whole/truth").iterdir())
    ]
    assert sizes == [16.0, 32.0, 16.0]  # the last one is held out


def shares_of_cells(density):
    """In nine bins from 0.2 to 10; two share each cell, the outermost have what is beyond."""
    centres = np.log(0.2 * 50 ** ((np.arange(9) + 0.5) / 9))
    values = np.clip(np.log(np.maximum(density, 1e-9)), centres[0], centres[-1])
    width = centres[1] - centres[0]
    return [np.maximum(0, 1 - np.abs(values - c) / width).mean() for c in centres]


@pytest.mark.budget(40)
def test_a_network_on_2lpt_is_an_emulator(here, interrupted):
    """A killed training goes on to the same bits; its result corrects 2LPT alone."""
    words = ("emulate.kind=network", "emulate.structure=2lpt", "emulate.iterations=3")
    words += ("emulate.redshift_space=0.5",)
    more = [word for each in words for word in ("--set", each)]
    assert flowpm_here("emulate", "run.toml", "--output", "killed", *more).returncode != 0
    assert (
        flowpm_here("emulate", "run.toml", "--output", "killed", *more, "--resume").returncode == 0
    )
    assert interrupted == [1, 2, 3, 3]
    assert flowpm_here("emulate", "run.toml", "--output", "whole", *more).returncode == 0
    killed, whole = (load_correction(f"{name}/correction.json") for name in ("killed", "whole"))
    np.testing.assert_array_equal(killed.theta, whole.theta)
    assert np.abs(whole.theta - ResidualNetwork.begun(0).theta).max() > 1e-3
    assert (whole.trained.integrator, whole.trained.steps) == ("2lpt", 0)
    row = read_rows(Path("whole/iterations.csv"))[0]  # before anything is learned
    number = int(row["universe"].split()[-1])
    (path,) = Path("whole/truth").glob(f"{number:03d}-*")
    truth = fpm.State.from_snapshot(path)
    plain_sim = fpm.Simulation(truth.cosmology, 8, 16.0, [0.1, 1.0])
    apart = plain_sim.lpt(seed=number).displacement.numpy() - truth.displacement.numpy()
    distance = (apart**2).sum(-1).mean() / 2.0**2
    assert float(row["distance squared"]) == pytest.approx(distance, rel=1e-4)
    start, bins = plain_sim.lpt(seed=number), fpm.Bins(3, k_max=np.pi / 2.0)
    compared = [
        fpm.compare(*(each.density(2, redshift_space=axis) for each in (start, truth)), bins=bins)
        for axis in (None, "z")
    ]
    ratios = [(each.transfer**2, each.correlation) for each in compared]
    moving = [np.moveaxis(each.velocity.numpy(), -1, 0) for each in (start, truth)]
    along = [fpm.compare(*both, 16.0, bins=bins) for both in zip(*moving, strict=True)]
    ours, true, cross = (
        sum(getattr(each, name) for each in along) for name in ("power_a", "power_b", "cross")
    )
    ratios.append((ours / true, cross / np.sqrt(ours * true)))
    per_bin = compared[0].k ** -2.5
    (power, phases), *seen = (
        [np.average(x, weights=per_bin) for x in (np.log(ratio) ** 2, 1.0 - r**2)]
        for ratio, r in ratios
    )
    assert float(row["ln P squared"]) == pytest.approx(power, rel=1e-3)
    assert float(row["1 - r squared"]) == pytest.approx(phases, rel=1e-3)
    moved = sum(p + 0.2 * r for p, r in seen)
    assert float(row["of velocities"]) == pytest.approx(moved, rel=1e-3)
    ours, true = (np.array(shares_of_cells(each.density().numpy())) for each in (start, truth))
    histogram = np.mean(np.log((ours + 1e-3) / (true + 1e-3)) ** 2)
    assert float(row["ln histogram squared"]) == pytest.approx(histogram, rel=1e-3)
    loss = power + 0.2 * phases + 0.003 * distance + 0.2 * histogram + 0.5 * moved
    assert float(row["loss"]) == pytest.approx(loss, rel=1e-3)
    scores = read_rows(Path("whole/scores.csv"))
    assert {"redshift space P plain", "velocity 1 - r corrected"} <= set(scores[0])
    assert whole.scores["verdict"].startswith("P not decided (error ")  # of one universe
    assert read_record(Path("whole")).results["against no correction"] == whole.scores["verdict"]

    cosmology = fpm.Cosmology(Omega_m=0.31, Omega_b=0.049, h=0.677, n_s=0.965, sigma8=0.81)
    sim = fpm.Simulation(cosmology, 8, 16.0, [0.1, 1.0], correction=whole)
    state = sim.lpt(seed=1)
    before = sim.with_correction(None).lpt(seed=1)
    expected = before.corrected(whole).displacement.numpy()
    np.testing.assert_array_equal(state.displacement.numpy(), expected)
    assert np.abs(expected - before.displacement.numpy()).max() > 1e-4
    density = ForwardModel(sim, "2lpt")(before.white_noise.block, {})
    np.testing.assert_array_equal(density.numpy(), state.density().numpy())
    with pytest.raises(ValueError, match="structure 'pm': the correction was learned from 2lpt"):
        ForwardModel(sim, "pm")
    with pytest.raises(ValueError, match="learned from 2lpt: it corrects lpt, not runs"):
        sim.run(seed=1)
    run = tomllib.loads(RUN.partition("[truth]")[0]) | {"initial": {"seed": 1}}
    del run["priors"]
    run["cosmology"]["Omega_m"] = 0.31
    run["evolution"]["correction"] = "whole/correction.json"
    with pytest.raises(ValueError, match='was learned from 2lpt: the structure is "pm"'):
        SimulationOptions.check(run, Path("run.toml"))


def test_a_network_warns_of_states_at_times_that_it_was_not_trained_for(here):
    """Each time once, in Python and by run files; and a filter likewise."""
    times, known = (0.5, 1.0), dict(mesh_factor=1, deconvolve=True, a=(0.1, 1.0), cosmology={})
    known |= dict(integrator="bullfrog", steps=1, cell=(2.0, 2.0), times=times)
    trained = Range(**known, force_gradient="finite-difference")
    made = dataclasses.replace(ResidualNetwork.begun(1), trained=trained)
    network = load_correction(made.save("network.json"))
    assert network.trained == trained
    assert load_correction(file_of("network")).trained.times == (0.33, 1.0)
    cosmology = fpm.Cosmology.planck18()

    def simulation(correction):
        return fpm.Simulation(
            cosmology, 8, 16.0, [0.1, 1.0], integrator="bullfrog", correction=correction
        )

    def outside(a):
        text = rf"a state's a = {a:g}, where it was trained with 0\.5 to 1"
        return pytest.warns(CorrectionWarning, match=text)

    run = tomllib.loads(RUN.partition("[priors]")[0]) | {"initial": {"seed": 1}}
    run["cosmology"]["Omega_m"] = 0.31
    run["box"] = {"grid": 8, "size": 16.0}
    run["evolution"] = {"integrator": "bullfrog", "steps": 1, "correction": "network.json"}
    run["output"] = {"a": [0.3, 0.6]}
    options = SimulationOptions.check(run, Path("run.toml"))
    text = "evolution.correction: a state's a = 0.3, where it was trained with 0.5 to 1"
    assert options.warnings == (text,)
    cone = {"field_of_view": 2.0, "pixels": 8, "z_max": 1.5, "repeat": True}
    run["lightcone"] = cone | {"sources": [{"redshift": 1.0}]}
    options_of_cone = SimulationOptions.check(run, Path("run.toml"))
    assert options_of_cone.warnings[:2] == (text, text.replace("0.3", "0.4"))
    sky = LightCone(FlatField(field_of_view=2.0, pixels=8, z_max=1.5, repeat=True))
    with outside(0.4):
        sim = simulation(network).with_steps([0.1, 0.3, 1.0])
        sky.convergence(sim, [SourcePlane(1.0)], seed=1)

    sim, given = simulation(network), dict(seed=1, outputs=[0.3, 0.6])
    with outside(0.3):
        sim.run(**given)
    with warnings.catch_warnings(action="error", category=CorrectionWarning):
        sim.run(**given)
        options.simulation(cosmology, mesh="row:1").run(**given)
        simulation(network).run(seed=1)
    with outside(0.3):
        simulation(dataclasses.replace(PotentialFilter.begun(), trained=trained)).run(**given)
    with outside(0.3):
        simulation(network).run(**given, after_step=lambda _: None)
    lpt = dataclasses.replace(network, trained=dataclasses.replace(trained, integrator="2lpt"))
    with outside(0.2):
        simulation(lpt).lpt(seed=1, a=0.2)
    with pytest.warns(CorrectionWarning) as both:
        sim.with_steps([0.1, 0.4]).run(seed=1)
    assert ["a_stop = 0.4", "a state's a = 0.4"] == [
        str(each.message).removeprefix("correction: ").partition(",")[0] for each in both
    ]


def test_what_a_network_cannot_do_is_refused_by_name(here):
    """Other kinds, files of corrections in the wrong place."""
    network = ResidualNetwork.begun(1)
    made = dataclasses.replace(network, force=PotentialFilter.begun(2))
    read = load_correction(made.save("network.json"))
    np.testing.assert_array_equal(read.theta, made.theta)
    np.testing.assert_array_equal(read.force.theta, made.force.theta)
    assert (
        read.in_force is read.force and read.of_states is read and len(read.numbers()) == 400 + 472
    )
    cosmology = fpm.Cosmology.planck18()
    sim = fpm.Simulation(cosmology, 8, 16.0, [0.1, 1.0], correction="network.json")
    run = tomllib.loads(RUN.partition("[truth]")[0]) | {"initial": {"seed": 1}}
    del run["priors"]
    run["cosmology"]["Omega_m"] = 0.31
    run["evolution"]["correction"] = "network.json"
    SimulationOptions.check(run, Path("run.toml"))
    with pytest.raises(ValueError, match="structure '2lpt': the correction was learned from runs"):
        ForwardModel(sim, "2lpt")
    table = tomllib.loads(RUN)
    for changes, message in (
        (
            {"start_from": "network.json"},
            "network.json holds another kind, equivariant-network: kind = 'filter'",
        ),
        ({"structure": "2lpt"}, 'makes no steps; must be "pm" for a filter'),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            EmulationOptions.check({**table, "emulate": {**table["emulate"], **changes}}, Path("r"))
    table["evolution"]["correction"] = "network.json"
    for kind in ("filter", "network"):
        table["emulate"]["kind"] = kind
        with pytest.raises(ValueError, match="is what this job makes"):
            EmulationOptions.check(table, Path("run.toml"))
    about = json.loads(Path("network.json").read_text())
    for wrong, message in (
        ({"force": about}, "force must be a correction of the force"),
        ({"theta": about["theta"][:-4]}, "the equivariant-network has 400 numbers"),
        ({"theta": "!"}, "holds no correction"),
    ):
        Path("wrong.json").write_text(json.dumps({**about, **wrong}))
        with pytest.raises(ValueError, match=f"wrong.json.*{message}|{message}"):
            load_correction("wrong.json")


def test_runs_that_fail_lose_no_good_numbers(here):
    """A step so large that runs fail is taken back; after five failures in a row the job ends."""
    options = ("--set", "emulate.rate=1", "--set", "emulate.iterations=7")
    from flowpm_dist.corrections import learner

    real = learner.Steps.step

    def step(self, gradient):
        real(self, gradient)
        if self.done == 2:
            self._theta.assign(self._theta * np.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner.Steps, "step", step)
        done = flowpm_here("emulate", "run.toml", "--output", "failed", *options)
    assert done.returncode == 0 and "going back to the numbers before" in plain(done.stderr)
    rows = read_rows(Path("failed/iterations.csv"))
    assert [bool(row["loss"]) for row in rows] == [True, True, False, True, True, True, True]
    assert np.isfinite(load_correction("failed/correction.json").theta).all()

    def always(self, gradient):
        real(self, gradient)
        self._theta.assign(self._theta * np.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner.Steps, "step", always)
        patch.setattr(learner, "MOST_FAILURES", 1)
        ended = flowpm_here("emulate", "run.toml", "--output", "ended")
    assert "iterations in a row failed: use a lower rate" in plain(ended.stderr)
    with np.load("ended/checkpoint.npz") as kept:
        assert np.isfinite(kept["value_0"]).all()


@pytest.mark.budget(40)
def test_pairs_of_files(here):
    """Of one white noise they are learned from; of others they are refused by name."""
    cosmology = fpm.Cosmology(Omega_m=0.3, Omega_b=0.049, h=0.677, n_s=0.965, sigma8=0.81)
    for seed, size in ((1, 16.0), (2, 32.0), (3, 16.0)):
        sim = fpm.Simulation(cosmology, 8, size, [0.1, 0.4, 1.0])
        sim.lpt(seed=seed, a=0.1).save(f"start-{seed}")
        sim.run(seed=seed).save(f"end-{seed}", format="bigfile")
    run = "[box]" + RUN.partition("[box]")[2].partition("[truth]")[0]
    table = """[[truth.pairs]]
initial = "start-{}"
final = ["end-{}/snapshot.bigfile"]
cosmology = {{ Omega_m = 0.3, Omega_b = 0.049, h = 0.677, n_s = 0.965, sigma8 = 0.81 }}
"""
    end = "[emulate]\niterations = 1\nvalidation = 1\n"
    second = table.format(2, 2) + "size = 32.0\n"
    Path("pairs.toml").write_text(run + end + table.format(1, 1) + second)
    done = flowpm_here("emulate", "pairs.toml", "--output", "pairs")
    assert done.returncode == 0, done.stderr
    assert {row["spacing [Mpc/h]"] for row in read_rows(Path("pairs/scores.csv"))} == {"4"}
    assert flowpm_here("emulate", "pairs/run.toml", "--check").returncode == 0
    copied = shutil.copytree("end-1/snapshot.bigfile", "copied/snapshot.bigfile")
    same = table.format(1, 1).replace("end-1/snapshot.bigfile", str(copied))
    Path("same.toml").write_text(run + end + table.format(1, 1) + same)
    twice = flowpm_here("emulate", "same.toml", "--output", "same")
    assert "copied/snapshot.bigfile is held out, and has the same particles" in plain(twice.stderr)
    Path("sizes.toml").write_text(run + end + table.format(1, 1) + table.format(2, 2))
    small = flowpm_here("emulate", "sizes.toml", "--output", "sizes")
    assert "in (32.0, 32.0, 32.0) Mpc/h" in plain(small.stderr)
    assert "truth.pairs.size, (16.0, 16.0, 16.0)" in plain(small.stderr)
    assert (
        "is complete"
        in flowpm_here("emulate", "pairs.toml", "--output", "pairs", "--resume").stdout
    )
    refused = flowpm_here("emulate", "pairs.toml", "--set", "cosmology.h=0.7")
    assert "cosmology.h = 0.7: goes with runs made here, not with truth.pairs" in plain(
        refused.stderr
    )
    Path("mixed.toml").write_text(run + end + table.format(1, 3) + second)
    mixed = flowpm_here("emulate", "mixed.toml", "--output", "mixed")
    assert "end-3/snapshot.bigfile: the cheap run and the truth have r = " in plain(mixed.stderr)
    assert "they are not of one white noise" in plain(mixed.stderr)
    other = run + end + table.replace("sigma8 = 0.81", "sigma8 = 0.9").format(1, 1)
    Path("other.toml").write_text(other + second)
    wrong = flowpm_here("emulate", "other.toml", "--output", "other")
    assert "has sigma8 = 0.81: truth.pairs.cosmology has 0.9" in plain(wrong.stderr)
    beyond = run + "a_stop = 0.9\n" + end + table.format(1, 1) + second
    Path("beyond.toml").write_text(beyond)
    late = flowpm_here("emulate", "beyond.toml", "--output", "beyond")
    assert "is of a = 1: the steps go from 0.1 to 0.9" in plain(late.stderr)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"truth.a": [0.05]}, "truth.a has 0.05: must be above 0.1, at most 1"),
        ({"emulate.iterations": 0}, "emulate.iterations = 0: must be a whole number"),
        (
            {"truth.pairs": [{"initial": "none", "final": ["none"]}]},
            "pairs[0]: cosmology is missing",
        ),
        ({"truth.a": [0.5, 0.5001]}, "two times must differ by 0.001"),
        ({"truth.mesh_factor": 1.3}, "truth.mesh_factor = 1.3"),
        ({"truth.sizes": [16.0, 32.0, 64.0]}, "truth.sizes has more boxes than the 2"),
        (
            {"truth.sizes": [*range(16, 25)], "truth.universes": 9},
            "truth.sizes has boxes of 9 sizes: at most 8",
        ),
        ({"emulate.start_from": "run.toml"}, "emulate.start_from"),
        ({"evolution.correction": "run.toml"}, "holds no correction"),
        ({"priors.Omega_m": [0.4, 0.3]}, "priors.Omega_m"),
    ],
)
def test_run_files_that_are_refused(here, change, message):
    table = tomllib.loads(RUN)
    for key, value in change.items():
        section, _, name = key.partition(".")
        table[section][name] = value
    with pytest.raises(ValueError, match="") as caught:
        EmulationOptions.check(table, Path("run.toml"))
    assert message in str(caught.value)


def test_files_that_hold_no_correction(here):
    good = {
        "flowpm_dist correction": 1, "kind": "potential-filter", "trained": None,
        "scores": {}, "provenance": {}, "theta": [0.0],
    }  # fmt: skip
    for wrong in (
        "",
        "[]",
        json.dumps({**good, "theta": ["x"]}),
        json.dumps({**good, "kind": "y"}),
    ):
        Path("c.json").write_text(wrong)
        with pytest.raises(ValueError, match="c.json"):
            load_correction("c.json")
    Path("c.json").write_text(json.dumps(good))  # of one number
    with pytest.raises(ValueError, match="c.json"):
        load_correction("c.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_correction("missing.json")
