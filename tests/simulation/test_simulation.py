"""The simulation on one rank: against linear theory, its complaints, and what it imports."""

import gc
import importlib
import json
import pickle
import re
import resource
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

import flowpm_dist as fpm
from flowpm_dist.evolution.adjoints import ADJOINTS
from flowpm_dist.evolution.corrections import CorrectionWarning, load_correction
from flowpm_dist.io.white_noise import warn_of_other_noise
from flowpm_dist.options import A_SEED, constructed
from flowpm_dist.simulate.options import EvolutionOptions
from flowpm_dist.simulation.compiled_solver import CompiledSolver, compiled_solver
from flowpm_dist.simulation.options import SolverOptions
from meshimpl import ProcessMesh

PLANCK = fpm.Cosmology.planck18()
STEPS = fpm.scale_factor_steps(0.05, 0.1, 2)


LOOP = 0.25
"""What sets the side of a box apart that no other test here has lowered [Mpc/h]."""


def resident_bytes():
    """Returns the memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def deviation(spectrum, theory):
    """How far the mean of P / theory lies from 1, in standard deviations of a Gaussian field.

    Each bin's relative variance is 2 / modes; bins are weighted by their modes.
    """
    ratio = np.average(spectrum.power / theory, weights=spectrum.modes)
    return (ratio - 1) / np.sqrt(2 / spectrum.modes.sum())


@pytest.mark.parametrize("box_size", [100.0, (100.0, 150.0, 80.0)])
@pytest.mark.parametrize("amplitude", [{"A_s": 2.1e-9}, {"sigma8": 0.8}])
def test_linear_field_has_the_linear_power(box_size, amplitude):
    cosmology = PLANCK.replace(**amplitude)
    sim = fpm.Simulation(cosmology, (32, 48, 40), box_size, STEPS, precision="float64")
    state = sim.run(seed=11)
    spectrum = fpm.power_spectrum(state.linear_delta)
    assert abs(deviation(spectrum, fpm.LinearPower(cosmology)(spectrum.k).numpy())) < 4


def test_modes_of_fixed_amplitude_have_the_linear_power():
    """Each of them, so that no tilt is lost in an average."""
    grid, size = (12, 16, 8), np.array([100.0, 150.0, 80.0])
    sim = fpm.Simulation(PLANCK, grid, size, STEPS, fixed_amplitude=True, precision="float64")
    modes = np.fft.fftn(sim.run(seed=11).linear_delta.numpy())
    k = np.meshgrid(
        *(2 * np.pi * np.fft.fftfreq(n, s / n) for n, s in zip(grid, size, strict=True)),
        indexing="ij",
    )
    k = np.sqrt(sum(component**2 for component in k))
    power = np.abs(modes) ** 2 * size.prod() / modes.size**2
    np.testing.assert_allclose(power, fpm.LinearPower(PLANCK)(k).numpy(), rtol=1e-9, atol=1e-20)


def test_early_density_has_the_grown_linear_power():
    """At a = 0.1 on scales of many cells: linear growth, the CIC window divided out."""
    sim = fpm.Simulation(PLANCK, 64, 640.0, STEPS, force_gradient="spectral", precision="float64")
    spectrum = fpm.power_spectrum(sim.run(seed=12).density(), window="cic")
    large = slice(0, 10)
    theory = fpm.LinearPower(PLANCK)(spectrum.k, 0.1).numpy()
    cut = fpm.PowerSpectrum(spectrum.k[large], spectrum.power[large], spectrum.modes[large])
    assert abs(deviation(cut, theory[large])) < 4


def test_one_seed_is_one_universe_in_both_precisions():
    states = [
        fpm.Simulation(PLANCK, 16, 32.0, STEPS, precision=precision).run(seed=5)
        for precision in ("float32", "float64")
    ]
    single, double = (s.white_noise.numpy() for s in states)
    np.testing.assert_array_equal(single, double.astype(np.float32))
    single, double = (s.density().numpy() for s in states)
    np.testing.assert_allclose(single, double, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"grid": 15}, "grid = .*an even whole number from 4 to 2\\^20, or three"),
        ({"grid": (16, 16)}, "grid = .*or three of them"),
        ({"grid": 16.5}, "grid = 16.5: must be an even whole number"),
        ({"box_size": -1.0}, "size = -1.0: must be a length from 0.01"),
        ({"steps": [1.0, 0.5]}, "increasing"),
        ({"steps": [0.0, 0.5]}, "edges starts at 0: .*fastpm must start later"),
        ({"lpt_order": 4}, "lpt_order = 4: must be 1, 2 or 3"),
        ({"lpt_order": 1, "integrator": "cola"}, "lpt_order = 1: COLA follows LPT of order 2"),
        ({"integrator": "euler"}, 'integrator = \'euler\'.*"fastpm", "bullfrog" or "cola"'),
        ({"mesh_factor": 0}, "mesh_factor = 0: must be a number from 1 to 4"),
        ({"mesh_factor": 4.5}, "mesh_factor = 4.5: must be a number from 1 to 4"),
        ({"mesh_factor": 1.3}, "mesh_factor = 1.3: .*20.8 x .*nearest .* are 1.25 and 1.375"),
        ({"noise": "white"}, 'noise = \'white\': must be "cells" or "nested"'),
        ({"integrator": fpm.FastPM(), "half_step": "geometric"}, "is an option of the integrator"),
        ({"adjoint": "none"}, '"reversible" or "direct"'),
        ({"integrator": "bullfrog", "half_step": "geometric"}, "half_step = .*goes with int"),
        ({"force_gradient": "exact"}, '"finite-difference" or "spectral"'),
        ({"precision": "float16"}, '"float32" or "float64"'),
        ({"precision": "float64", "exchange": "float16"}, 'goes with precision = "float32", not'),
        ({"pyramid": "2%"}, '"off", "1%" or "0.1%"'),
        ({"pyramid": "1%", "grid": 20}, "20 x 20 x 20 cells, must be multiples of 8, 8, 8"),
        ({"pyramid": "1%", "box_size": (32.0, 32.0, 64.0)}, "a cell .* is 2 x 2 x 4 Mpc/h"),
        ({"pyramid": "1%", "force_gradient": "spectral"}, "pyramid.*goes with force_gradient"),
        ({"pyramid": "0.1%"}, 'pyramid.*needs deconvolve = false, unless it is "1%"'),
        ({"pyramid": "1%", "correction": "default"}, "pyramid.*cannot have a correction"),
        ({"halo": 0}, "whole number of cells, at least 1"),
        ({"mesh": "row:2,col:1"}, "2 places, but this job has 1 rank"),
        ({"mesh": "row:1,row:1"}, "named twice"),
    ],
)
def test_complaints(change, message):
    arguments = {"grid": 16, "box_size": 32.0, "steps": STEPS} | change
    with pytest.raises(ValueError, match=message):
        fpm.Simulation(PLANCK, **arguments)


@pytest.mark.parametrize(
    "grid", [8, 8.0, np.int64(8), np.array([8.0, 8, 8]), [8, 8.0, np.int32(8)]]
)
def test_whole_numbers_of_any_kind_are_a_grid(grid):
    box = fpm.Simulation(PLANCK, grid, np.float32([32, 32, 64]), STEPS).box
    assert (box.grid, box.size) == ((8, 8, 8), (32.0, 32.0, 64.0))
    assert {type(n) for n in box.grid} == {int}


def test_white_noise_that_does_not_fit():
    sim = fpm.Simulation(PLANCK, 16, 32.0, STEPS)
    with pytest.raises(ValueError, match="either a seed, white_noise or particles: exactly one"):
        sim.run()
    with pytest.raises(ValueError, match="exactly one"):
        sim.run(1, white_noise=np.zeros((16, 16, 16)))
    with pytest.raises(ValueError, match="paired goes with a seed"):
        sim.run(white_noise=np.zeros((16, 16, 16)), paired=True)
    with pytest.raises(ValueError, match=r"shape \(8, 16, 16\)"):
        sim.run(white_noise=np.zeros((8, 16, 16)))
    with pytest.raises(ValueError, match="real floating"):
        sim.run(white_noise=np.zeros((16, 16, 16), complex))
    for seed in (-1, 2**63, [1, -1], 1.5):
        with pytest.raises(ValueError, match=re.escape(f"seed = {seed!r}: must be {A_SEED}")):
            sim.run(seed)
    noise = np.random.default_rng(0).standard_normal((16, 16, 16)).astype(">f4")
    with pytest.warns(UserWarning, match="a mean of 1e\\+03, .* has 0 \\+- 0.02"):
        shifted = sim.lpt(white_noise=noise + 1000)
    with pytest.warns(UserWarning, match="a standard deviation of 2.99, .* has 1 \\+- 0.01"):
        sim.lpt(white_noise=3 * noise)
    huge = 1e200 * noise.astype(float)
    with pytest.raises(FloatingPointError), pytest.warns(UserWarning, match="has a mean of"):
        sim.lpt(white_noise=huge)
    with pytest.warns(UserWarning, match="a standard deviation of inf"):
        warn_of_other_noise(0.0, np.inf, 4096)
    with warnings.catch_warnings(action="error"):
        displacement = sim.lpt(white_noise=noise).displacement.numpy()
    np.testing.assert_allclose(shifted.displacement.numpy(), displacement, rtol=0, atol=1e-2)


def test_particles_that_cannot_be_a_start():
    rest = np.zeros((2, 8, 8, 8, 3), np.float32)
    with pytest.raises(ValueError, match="give a seed or white_noise, not particles"):
        fpm.Simulation(PLANCK, 8, 32.0, STEPS, integrator="cola").run(particles=rest)
    with pytest.raises(ValueError, match="later than a = 0"):
        fpm.Simulation(PLANCK, 8, 32.0, [0, 1], integrator="bullfrog").run(particles=rest)
    small, large = (fpm.Simulation(PLANCK, 8, size, STEPS) for size in (32.0, 64.0))
    fields = [fpm.Field(tf.constant(x), small.box) for x in rest]
    with pytest.raises(ValueError, match=r"displacement has a box of \(32.*a box of \(64"):
        large.run(particles=fields)
    with pytest.raises(ValueError, match=r"\(8, 8, 8\).*one universe.*as grid \(16, 16, 16\)"):
        fpm.Simulation(PLANCK, 16, 32.0, STEPS).run(particles=fields)


def test_a_pair_of_fixed_universes():
    """Opposite noise, and every mode of the linear field with its expected amplitude."""
    cosmology = PLANCK.replace(sigma8=0.8)
    sim = fpm.Simulation(cosmology, 16, 64.0, STEPS, fixed_amplitude=True, precision="float64")
    state = sim.run(seed=6)
    pair = sim.run(seed=6, paired=True)
    np.testing.assert_array_equal(pair.white_noise.numpy(), -state.white_noise.numpy())
    noise = fpm.power_spectrum(state.white_noise)
    np.testing.assert_allclose(noise.power, sim.box.volume / sim.box.cells, rtol=1e-12)


@pytest.mark.parametrize(
    "name", ["simulation", "evolution", "grid", "initial", "particle_mesh", "statistics"]
)
def test_a_room_has_the_names_it_tells(name):
    """Twice: a name that is also a module's would be the module once that is imported."""
    room = importlib.import_module(f"flowpm_dist.{name}")
    assert room.__all__
    for _ in range(2):
        assert not [n for n in room.__all__ if isinstance(getattr(room, n), ModuleType)]


def test_a_correction_brings_its_force(tmp_path):
    """Where none is given; one that is given must be the correction's."""
    shipped = load_correction("default-2")
    sharp = replace(shipped, trained=replace(shipped.trained, deconvolve=True))
    own = load_correction(sharp.save(tmp_path / "own.json"))
    steps = {"a_start": 0.1, "steps": 10, "integrator": "bullfrog"}
    for options, expected in (
        (constructed(SolverOptions, {"correction": "default-2"}), (2, False)),
        (constructed(SolverOptions, {"correction": own}), (2, True)),
        (
            constructed(
                EvolutionOptions, {"correction": "own.json", **steps}, {"folder": tmp_path}
            ),
            (2, True),
        ),
    ):
        assert (options.mesh_factor, options.deconvolve) == expected
    with pytest.raises(ValueError, match="mesh_factor = 1: .* trained with mesh_factor = 2"):
        constructed(SolverOptions, {"correction": "default-2", "mesh_factor": 1})
    warnings.simplefilter("ignore", CorrectionWarning)
    plain = fpm.Simulation(PLANCK, 8, 16.0, [0.1, 1.0], mesh="row:1", mesh_factor=2)
    assert not plain.options.deconvolve
    filtered = plain.with_correction(own)
    assert filtered.options.deconvolve and filtered.options.force_correction is not None
    assert filtered.with_correction(None).options.deconvolve


@pytest.mark.parametrize(("change", "outside"), [(1.0, 0), (1.008, 0), (1.012, 1)])
def test_a_parameter_near_the_range_of_a_correction_is_inside_it(change, outside):
    trained = load_correction("default-2").trained
    name, (_, high) = next(iter(trained.cosmology.items()))
    cell = trained.cell[0]
    run = (trained.integrator, trained.steps_near(cell)[1], trained.a, cell)
    assert len(list(trained.outside(*run, {name: [high * change]}))) == outside


def test_a_correction_has_the_steps_of_the_nearest_cells(tmp_path):
    trained = load_correction("network").trained
    several = replace(trained, steps=((1.0, 20), (4.0, 10)), cell=(1.0, 4.0))
    path = replace(load_correction("network"), trained=several).save(tmp_path / "several.json")
    trained = load_correction(path).trained
    assert trained == several
    for cell, steps, outside in ((1.9, 20, 0), (1.9, 10, 1), (2.1, 10, 0), (2.1, 20, 1)):
        found = list(trained.outside(trained.integrator, steps, trained.a, cell, {}))
        assert len(found) == outside
        near = 1 if cell < 2 else 4
        assert not outside or f"steps in cells of {near} Mpc/h, not with {steps}" in found[0]


def test_simulations_of_a_box_share_their_force():
    """Whatever they begin with and follow; not with another force or halo."""
    mesh = ProcessMesh("row:1")

    def force(halo=2, **options):
        sim = fpm.Simulation(PLANCK, 8, 32.0, STEPS, mesh=mesh, **options)
        return compiled_solver(sim.box, sim.options).nbody(halo)

    first = force()
    assert force(integrator="cola", noise="nested") is first
    others = [force(halo=3), force(mesh_factor=2), force(deconvolve=False)]
    others += [force(precision="float64"), force(exchange="float16")]
    assert len({first, *others}) == 6


def test_a_loop_over_cosmologies_lowers_nothing_and_holds_nothing(monkeypatch):
    """A new simulation each time, on a mesh of its own, dropped: forward, backward, a spectrum."""
    steps = [0.1, 0.5, 1.0]

    def universe(number):
        parameters = {"Omega_m": 0.25 + 0.001 * number, "n_s": 0.93 + 0.001 * number}
        sim = fpm.Simulation(PLANCK.replace(**parameters), 8, 32.0 + LOOP, steps, mesh="row:1")
        state = sim.run(seed=number)
        return float(fpm.power_spectrum(state.density()).power[0])

    def gradient():
        sim = fpm.Simulation(PLANCK, 8, 32.0 + LOOP, steps, mesh="row:1")
        matter = tf.constant(0.3, tf.float64)
        with tf.GradientTape() as tape:
            tape.watch(matter)
            state = sim.run(seed=1, cosmology=PLANCK.replace(Omega_m=matter))
            loss = tf.reduce_sum(state.displacement.block**2)
        return float(tape.gradient(loss, matter))

    first, slope = universe(0), gradient()
    for number in range(1, 4):
        universe(number)
    graphs, held = [], []
    made = FuncGraph.__init__

    def counted(graph, *args, **kwargs):
        graphs.append(graph)
        made(graph, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(FuncGraph, "__init__", counted)
        for number in range(4, 24):
            assert np.isfinite(universe(number))
            held.append(resident_bytes())
        assert (universe(0), gradient()) == (first, slope)
    assert not graphs
    gc.collect()
    # One that is lowered again leaves 2.5 MB behind; a process has 600 MB.
    assert resident_bytes() - held[0] < 0.02 * held[0]


def test_an_adjoint_is_named():
    for name, kind in ADJOINTS.items():
        assert type(constructed(SolverOptions, {"adjoint": name}).adjoint) is kind


def test_a_snapshot_and_a_pickle_keep_how_a_universe_was_made(tmp_path):
    """Read, pickled and saved again: the seed, the halo and the options go along."""
    options = {"noise": "nested", "halo": 3, "mesh_factor": 2, "lpt_order": 1}
    state = fpm.Simulation(PLANCK, 8, 32.0, STEPS, **options).lpt(seed=7, paired=True)
    read = fpm.State.from_snapshot(state.save(tmp_path / "first"))
    again = pickle.loads(pickle.dumps(read))
    again.save(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")  # the pickle has its own copy
    last = fpm.State.from_snapshot(tmp_path / "second")
    for copy in (read, again, pickle.loads(pickle.dumps(again)), last):
        assert copy.header() == state.header()
        assert copy.halo == 3
    for name in ("white_noise", "linear_delta"):
        expected = getattr(state, name).block
        for copy in (again, last):
            np.testing.assert_array_equal(getattr(copy, name).block, expected)
    about = state.header()
    assert (about["seed"], about["paired"], about["options"]["noise"]) == (7, True, "nested")


def test_a_rank_can_pickle_alone(monkeypatch):
    """The linear field takes a transform over all ranks: it is left to who asks for it."""
    state = fpm.Simulation(PLANCK, 8, 32.0, STEPS).lpt(white_noise=np.ones((8, 8, 8)))
    with monkeypatch.context() as patch:
        patch.setattr(CompiledSolver, "linear_delta", lambda *_: pytest.fail("a collective"))
        copy = pickle.loads(pickle.dumps(state))
    np.testing.assert_array_equal(copy.white_noise.block, state.white_noise.block)
    np.testing.assert_array_equal(copy.linear_delta.block, state.linear_delta.block)


def test_numbers_of_numpy_are_options():
    sim = fpm.Simulation(PLANCK, 8, 32.0, STEPS, halo=np.int64(3), mesh_factor=np.int32(2))
    assert type(sim.halo) is int and sim.options.mesh_factor == 2
    sim.halo = np.int64(4)  # between runs
    state = sim.run(seed=1)
    assert state.halo == json.loads(json.dumps(state.header()))["halo"] == 4
    assert "halo" not in state.timings
    for wrong in (np.float64(3.0), np.int64(0), True):
        with pytest.raises(ValueError, match='halo = .*: must be "auto" or a whole number'):
            fpm.Simulation(PLANCK, 8, 32.0, STEPS, halo=wrong)
    with pytest.raises(ValueError, match="halo = 'wide': must be"):
        sim.halo = "wide"


ALONE = """
import sys
import flowpm_dist as fpm
sim = fpm.Simulation(fpm.Cosmology.planck18(), 8, 32.0, fpm.scale_factor_steps(0.1, 1.0, 2))
k, power = fpm.power_spectrum(sim.run(seed=1).density())
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"horovod", "mpi4py"}, loaded & {"horovod", "mpi4py"}
"""


def test_one_rank_simulates_without_horovod_and_mpi():
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", ALONE], cwd=root, check=True, timeout=120)
