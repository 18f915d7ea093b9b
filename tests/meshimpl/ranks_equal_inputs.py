"""Inputs that must be the same on all ranks: they are compared, and what differs is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks import RANK, SHAPES, SIZE, process_mesh

import flowpm_dist as fpm
from flowpm_dist import reconstruction as rec
from flowpm_dist.cosmoflow.planning.folder import TrainingFolder
from flowpm_dist.cosmoflow.planning.plan import TrainingPlan
from flowpm_dist.cosmoflow.training.session import TrainingSession
from flowpm_dist.grid.box import Box
from flowpm_dist.jobs.run_file import parse_settings
from flowpm_dist.observables import ForwardModel
from meshimpl import CollectiveError
from meshimpl.facts import facts

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.timeout(120, method="thread")]

STEPS = [0.1, 0.5, 1.0]
OTHER = RANK == SIZE - 1
"""Whether this rank is given something else than the others."""


@functools.cache
def simulation(**options: Any) -> fpm.Simulation:
    """A small one on all ranks, of Planck's cosmology."""
    steps = options.pop("steps", STEPS)
    return fpm.Simulation(
        fpm.Cosmology.planck18(),
        options.pop("grid", 8),
        32.0,
        list(steps),
        mesh=process_mesh(SHAPES[SIZE][-1]),
        **options,
    )


@functools.cache
def state() -> fpm.State:
    """Its universe."""
    return simulation().lpt(1)


def cosmologies(value: Any) -> list[fpm.Cosmology]:
    """Two, the second with a parameter of this value."""
    return [fpm.Cosmology.planck18(), fpm.Cosmology.planck18().replace(Omega_m=value)]


def matter() -> float:
    """A parameter that differs between ranks."""
    return 0.3 + 0.01 * OTHER


DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "seed": (lambda: simulation().run(7 + OTHER), "seed .* has 8"),
    "seeds": (lambda: simulation().run([3, 4 + OTHER]), r"seed\[1\] .* has 5"),
    "number of seeds": (lambda: simulation().run([3, 4, 5][: 2 + OTHER]), "batch .* has 3"),
    "paired": (lambda: simulation().run(1, paired=OTHER), "paired .* has True"),
    "cosmology": (
        lambda: simulation().run(1, cosmology=cosmologies(matter())[1]),
        r"cosmology.Omega_m .* has 0.31",
    ),
    "variable": (
        lambda: simulation().run(1, cosmology=cosmologies(tf.Variable(matter(), dtype="float64"))),
        r"cosmology\[1\].Omega_m .* has 0.31",
    ),
    "grid": (lambda: simulation(grid=8 + 8 * OTHER).lpt(1), r"grid\[0\] .* has 16"),
    "steps": (lambda: simulation(steps=(0.1, 0.5 + 0.1 * OTHER, 1.0)).run(1), r"steps\[1\] .* 0.6"),
    "option": (lambda: simulation(lpt_order=1 + OTHER).lpt(1), "lpt_order .* has 2"),
    "integrator": (
        lambda: simulation(integrator=("fastpm", "bullfrog")[OTHER]).run(1),
        "integrator .* has .*BullFrog",
    ),
    "outputs": (
        lambda: simulation().run(1, outputs=[0.5 + 0.1 * OTHER, 1.0]),
        r"observe\[0\].outputs\[0\] .* has 0.6",
    ),
    "scale factor": (lambda: simulation().lpt(1, a=0.5 + 0.1 * OTHER), "a differs .* has 0.6"),
    "mesh factor": (lambda: state().density(1 + OTHER), "mesh_factor .* has 2"),
    "bins": (
        lambda: fpm.power_spectrum(field(), bins=2 + OTHER),
        r"bins.bins .* has 3",
    ),
    "box of a field": (
        lambda: field().on(Box((8, 8, 8), (32.0, 32.0, 32.0 + OTHER), columns())),
        r"box_size\[2\] .* has 33.0",
    ),
    "seed of a search": (lambda: search(OTHER).run(), "seed .* has 1"),
    "training": (lambda: session(OTHER), "training.seed .* has 1"),
}


@functools.cache
def field() -> fpm.Field:
    return state().density()


def columns() -> Any:
    """A mesh of the same ranks with another layout."""
    return process_mesh(f"col:{SIZE}")


@functools.cache
def search(seed: bool) -> rec.Search:
    model = ForwardModel(simulation(), "linear")
    posterior = rec.Posterior(model, rec.Gaussian(model.box, field().delta().block, 0.5))
    return rec.Search(posterior, rec.LBFGS(), seed=int(seed))


def session(seed: bool) -> TrainingSession:
    run_file = Path(__file__).parents[2] / "examples" / "train.toml"
    plan = TrainingPlan.load(run_file, parse_settings([f"training.seed={int(seed)}"]))
    mesh = process_mesh(SHAPES[SIZE][-1])
    return TrainingSession(plan, mesh, TrainingFolder(Path("nowhere")), lambda *_: None)  # type: ignore


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_named_on_every_rank(name: str) -> None:
    """Before anything is computed with it."""
    work, expected = DIFFERENT[name]
    with pytest.raises(CollectiveError, match=expected) as caught:
        work()
    assert "differs between ranks: rank" in str(caught.value)
    assert "must be given the same" in str(caught.value)


def test_equal_inputs_pass() -> None:
    """Also numbers that differ by rounding, as results of other processors may."""
    mesh = process_mesh(f"row:{SIZE}")
    numbers = {"a": 0.3 + 2e-16 * RANK, "b": tf.constant(1e-9 * (1 + 1e-12 * OTHER), tf.float64)}
    edges = np.geomspace(0.1, 1.0, 20) * (1 + 2e-16 * RANK)
    settings = dict([("x", 1), ("y", 2)][:: 1 - 2 * OTHER])  # in another order
    for _ in range(2):
        mesh.check_equal("a test", names=["x", None], edges=edges, settings=settings, **numbers)
    # Of a function of the caller's own the name is compared, and not what a rank has bound to it.
    scaled = functools.partial(lambda by, state: by * state.a, 1 + RANK)
    found = simulation().run(1, outputs=[0.5, 1.0], on_output=scaled)
    np.testing.assert_allclose(found, [0.5 * (1 + RANK), 1 + RANK])
    with pytest.raises(CollectiveError, match="b differs between ranks: .* has 1.0000100"):
        mesh.check_equal("a test", a=0.3 + 2e-16 * RANK, b=1e-9 * (1 + 1e-5 * OTHER))
    with pytest.raises(CollectiveError, match="seed differs"):
        mesh.check_equal("a test", seed=10**12 + OTHER)


def test_facts_do_not_depend_on_the_process() -> None:
    """Of objects that are not known only the types are compared: a text may hold an address."""

    class Own:
        pass

    found = dict(facts({"own": Own(), "sizes": {"b", "a"}, "call": np.sum, "f": np.float32(0.5)}))
    assert found["own"].endswith("Own") and found["call"] == "numpy.sum"
    assert (found["sizes[0]"], found["sizes[1]"], found["f"]) == ("'a'", "'b'", "0.5")
    sizes = ((1100, 0), (1100, 0), (1100, 1), (1101, 0))
    large = [dict(facts(np.arange(n) + m))[""] for n, m in sizes]
    assert large[0] == large[1] and len(set(large)) == 3
