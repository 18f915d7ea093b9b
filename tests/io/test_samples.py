"""Draws given to GetDist, ArviZ and tables: they read what was drawn."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flowpm_dist.cosmoflow.evaluation.posteriors import Question, VolumePosterior
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.io.errors import UserError
from flowpm_dist.io.files import UnreadableError, save_arrays
from flowpm_dist.io.samples import Samples
from flowpm_dist.reconstruction.diagnostics import convergence, mode_names
from flowpm_dist.reconstruction.sampling_session import COLUMNS

RNG = np.random.default_rng(3)
RANGES = {"sigma8": (0.6, 1.0), "b1": (0.5, 4.0)}
MOVES, WARM_UP, CHAINS = 30, 10, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `flowpm-dist reconstruct` leaves of its chains, and the values that are in it."""
    path = tmp_path_factory.mktemp("found")
    columns = (*COLUMNS, *RANGES, *mode_names())
    table = np.round(RNG.normal(1.0, 0.1, (MOVES, CHAINS, len(columns))), 6)
    lines = [",".join(columns)]
    for move in range(MOVES):
        for chain in range(CHAINS):
            row = dict(zip(columns, table[move, chain].tolist(), strict=True))
            row |= {"move": move + 1, "chain": chain + 1, "drawn": max(0, move + 1 - WARM_UP)}
            lines.append(",".join(map(str, row.values())))
    half = lines[-1].replace(f"{MOVES},", f"{MOVES + 1},", 1)[:-3]  # a row that is being written
    later = lines[-3].replace(f"{MOVES},1,", f"{MOVES + 1},1,", 1)  # a chain that is ahead
    (path / "draws.csv").write_text("\n".join([*lines, later, half]))
    facts = {name: {"value": 1.0, "prior": list(ends)} for name, ends in RANGES.items()}
    (path / "result.json").write_text(json.dumps({"loss": 1.0, "parameters": facts}))
    drawn = table[WARM_UP:].swapaxes(0, 1)  # [chain, draw, column]
    return path, {name: drawn[..., i] for i, name in enumerate(columns)}


def test_getdist_has_what_was_drawn(folder):
    path, drawn = folder
    samples = Samples.load(path)
    assert samples.names == ("sigma8", "b1") and samples.values.shape == (3, 20, 2)
    theirs = samples.to_getdist(label="chains")
    assert theirs.getParamNames().list() == ["sigma8", "b1"]
    for name in RANGES:
        np.testing.assert_array_equal(theirs[name], drawn[name].ravel())
        assert theirs.ranges.getLower(name) == RANGES[name][0]
        assert theirs.ranges.getUpper(name) == RANGES[name][1]
    np.testing.assert_array_equal(theirs.loglikes, (drawn["data"] + drawn["prior"]).ravel())
    np.testing.assert_array_equal(theirs.chain_offsets, [0, 20, 40, 60])
    assert theirs.getParamNames().parWithName("sigma8").label == r"\sigma_8"
    assert theirs.getLabel() == "chains" and theirs.sampler == "mcmc"
    means = [drawn[name].mean() for name in RANGES]
    np.testing.assert_allclose(theirs.getMeans(), means, 1e-12)


def test_modes_of_the_field_follow_the_parameters(folder):
    path, drawn = folder
    samples = Samples.load(path, modes=True)
    assert samples.names == ("sigma8", "b1", *mode_names())
    name = mode_names()[3]
    np.testing.assert_array_equal(samples.values[..., 5], drawn[name])
    theirs = samples.to_getdist()
    plain = theirs.getParamNames().list()[5]
    assert plain == name.replace("(", "_").replace(" ", "_").replace(")", "")
    np.testing.assert_array_equal(theirs[plain], drawn[name].ravel())


def test_arviz_has_what_was_drawn(folder):
    pytest.importorskip("arviz_base")
    path, drawn = folder
    tree = Samples.load(path).to_arviz()
    for name in RANGES:
        there = tree["posterior"][name]
        assert there.dims == ("chain", "draw") and there.attrs["prior"] == list(RANGES[name])
        np.testing.assert_array_equal(there, drawn[name])
    np.testing.assert_array_equal(tree["sample_stats"]["lp"], -drawn["data"] - drawn["prior"])
    assert tree["posterior"]["sigma8"].attrs["long_name"] == r"$\sigma_8$"
    stats = pytest.importorskip("arviz_stats")
    if not hasattr(stats, "rhat"):
        pytest.skip("arviz-stats[xarray] is not installed")
    ours = convergence(np.stack([drawn[name].T for name in RANGES], -1))
    found = stats.rhat(tree)
    rhat = [float(found[name]) for name in RANGES]
    np.testing.assert_allclose(rhat, ours.rhat, 1e-10)


def test_tables_of_draws(folder, tmp_path):
    path, drawn = folder
    samples = Samples.load(path)
    table = samples.to_table()
    assert table.colnames == ["chain", "draw", "sigma8", "b1", "loss"]
    np.testing.assert_array_equal(table["b1"], drawn["b1"].ravel())
    np.testing.assert_array_equal(table["chain"], np.repeat(np.arange(3), 20))
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    samples.to_pandas().to_parquet(tmp_path / "draws.parquet")
    import pandas

    read = pandas.read_parquet(tmp_path / "draws.parquet")
    np.testing.assert_array_equal(read["sigma8"], drawn["sigma8"].ravel())
    assert read.index.names == ["chain", "draw"]


def test_draws_of_a_volume(tmp_path):
    """As `flowpm-dist predict` writes them, with the edges of the priors."""
    priors = UniformPriors({"Omega_m": (0.1, 0.5), "sigma8": (0.6, 1.0)})
    values = RNG.uniform(priors.low, priors.high, (500, 2))
    posterior = VolumePosterior("flow", priors, values, Question("/a.npy", "/run"), 8)
    posterior.write(tmp_path)
    for path in (tmp_path, tmp_path / "samples.npz"):
        samples = Samples.load(path)
        np.testing.assert_array_equal(samples.values, values[np.newaxis])
        assert samples.ranges == priors.ranges and samples.loss is None
    theirs = samples.to_getdist()
    np.testing.assert_array_equal(theirs["sigma8"], values[:, 1])
    assert theirs.sampler == "uncorrelated" and theirs.ranges.getUpper("Omega_m") == 0.5
    assert theirs.loglikes is None


def test_what_holds_no_draws_is_named(tmp_path, folder):
    whole, _ = folder
    with pytest.raises(UserError, match=r"holds neither draws.csv .* nor samples.npz"):
        Samples.load(tmp_path)
    (tmp_path / "draws.csv").write_text(
        "\n".join((whole / "draws.csv").read_text().split("\n")[:9]) + "\n"
    )
    (tmp_path / "result.json").write_text(json.dumps({"parameters": {}}))
    with pytest.raises(UserError, match="no chain has a draw yet"):
        Samples.load(tmp_path)
    (tmp_path / "draws.csv").write_bytes((whole / "draws.csv").read_bytes())
    with pytest.raises(UserError, match="no parameters .*modes=True"):
        Samples.load(tmp_path)
    assert Samples.load(tmp_path, modes=True).names == mode_names()
    (tmp_path / "result.json").write_text(json.dumps({"parameters": {"n_s": {"prior": [0, 1]}}}))
    with pytest.raises(UnreadableError, match="draws.csv cannot be read: 'n_s'"):
        Samples.load(tmp_path)
    for ends in ([1.0, 0.6], [0.6, None], [float("nan"), 1.0]):
        facts = {"parameters": {"sigma8": {"prior": ends}}}
        (tmp_path / "result.json").write_text(json.dumps(facts))
        with pytest.raises(UnreadableError, match=r"result.json: .*sigma8.prior"):
            Samples.load(tmp_path)
    for held, message in (
        ({"samples": np.zeros((3, 2))}, "names"),
        ({"samples": np.zeros((3, 2)), "names": np.array(["a"])}, "must be .chain, draw"),
        ({"samples": np.array([[np.nan]]), "names": np.array(["a"])}, "is not finite"),
        ({"samples": np.array([["x"]]), "names": np.array(["a"])}, "floating-point numbers"),
        (
            {
                "samples": np.zeros((3, 1)),
                "names": np.array(["a"]),
                "ranges": np.array([[0.0, 1.0]] * 2),
            },
            "2 ranges of 1 names",
        ),
        (
            {"samples": np.zeros((3, 1)), "names": np.array(["a"]), "ranges": np.ones((1, 2))},
            "must be two finite numbers",
        ),
    ):
        save_arrays(tmp_path / "samples.npz", held)
        with pytest.raises(UnreadableError, match=message):
            Samples.load(tmp_path / "samples.npz")


def test_other_arrays_of_a_posterior_are_not_read(tmp_path):
    save_arrays(
        tmp_path / "samples.npz",
        {"samples": np.zeros((3, 1)), "names": np.array(["a"]), "large": np.zeros(1000)},
    )
    read = []
    archive = np.lib.npyio.NpzFile
    with pytest.MonkeyPatch.context() as patched:
        of = archive.__getitem__
        patched.setattr(
            archive, "__getitem__", lambda self, key: (read.append(key), of(self, key))[1]
        )
        Samples.load(tmp_path)
    assert sorted(read) == ["names", "samples"]


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"must be \[chain, draw, parameter\] of 1 parameters, h"):
        Samples(np.zeros((3, 1)), ["h"])
    with pytest.raises(ValueError, match=r"loss of shape \(3,\): must be \(1, 3\)"):
        Samples(np.zeros((1, 3, 1)), ["h"], loss=np.zeros(3))
    for ends in ((0.7, 0.7), (0.0, np.inf)):
        with pytest.raises(ValueError, match="the range of h must be two finite numbers"):
            Samples(np.zeros((1, 3, 1)), ["h"], {"h": ends})
