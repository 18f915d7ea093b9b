"""One picture of each kind, by name, and the numbers that it is of."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
from matplotlib.collections import LineCollection

from flowpm_dist.catalogues import figures as catalogues
from flowpm_dist.catalogues.abundance import mass_function
from flowpm_dist.catalogues.catalogue import Catalogue
from flowpm_dist.catalogues.clustering import TracerPower
from flowpm_dist.corrections.options import SPACING
from flowpm_dist.cosmoflow.scores import figures as scores
from flowpm_dist.cosmoflow.scores.judging import LearningCurve, Predictions
from flowpm_dist.cosmology import Theory
from flowpm_dist.cosmology.options import UniformPriors
from flowpm_dist.emulate import figures as emulation
from flowpm_dist.io import figures
from flowpm_dist.io.particles import Header
from flowpm_dist.observables.light_cone import pictures as sky
from flowpm_dist.posteriors import figures as posteriors
from flowpm_dist.posteriors.calibration import Answers, calibration_of
from flowpm_dist.reconstruction import figures as reconstruction
from flowpm_dist.reconstruction.folder import outcome_of
from flowpm_dist.studies import figures as studies
from flowpm_dist.studies.measures import ENERGY, PHASE, POWER, STEP, THROUGHPUT, VALIDATED
from flowpm_dist.studies.summary import Run, groups_of
from flowpm_dist.studies.tuning import figures as tuning
from flowpm_dist.studies.tuning.options import Range
from flowpm_dist.studies.tuning.records import TrialRecord
from meshimpl.process_mesh import ProcessMesh

RNG = np.random.default_rng(5)
NAMES = ("Omega_m", "sigma8", "n_s")
TRUTH = RNG.uniform(0.1, 0.5, (300, 3))
SIGMA = np.broadcast_to([0.02, 0.03, 0.04], TRUTH.shape)
NETWORK = Predictions(NAMES, TRUTH, TRUTH + SIGMA * RNG.standard_normal(TRUTH.shape), SIGMA)
RIDGE = Predictions(NAMES, TRUTH, TRUTH + 2 * SIGMA * RNG.standard_normal(TRUTH.shape))
MEANS = np.full(3, 0.3)
SLAB = np.exp(RNG.standard_normal((16, 12)))
K = np.linspace(0.05, 3, 30)
MODES = np.round(200 * K**2 / 2) * 2 + 6
MEASURED = 1e4 * K**-1.5 * np.geomspace(0.02, 90, 30)
DENSITIES = {
    "truth": SLAB,
    "data": SLAB + RNG.standard_normal(SLAB.shape),
    "reconstruction": SLAB**0.9,
}
DENSITIES["residual"] = DENSITIES["data"] - DENSITIES["reconstruction"]
KAPPA = 0.02 * RNG.standard_normal((3, 24, 24))
TRACES = {"loss": RNG.standard_normal((90, 3)), "sigma8": RNG.normal(0.8, 0.02, (90, 3))}
METRICS = [
    {
        "step": f"{n}",
        "loss": f"{2 + RNG.standard_normal():.4f}",
        "rate": f"{1e-4 * (150 - n)}",
        "validation_loss": f"{2 - n / 100}" if n % 50 == 0 else "",
    }
    for n in range(150)
]
ELL, FINE = np.geomspace(50, 3000, 8), np.geomspace(40, 4000, 30)
CL = SimpleNamespace(
    pairs=[(0, 0), (0, 1), (1, 1)],
    ell=ELL,
    modes=10 * ELL,
    power=np.array([[3.2], [1.0], [1.1]]) / ELL**2,
    noise=np.array([[1e-8], [1e-8], [2e-8]]) * np.ones_like(ELL),
    halofit=np.ones((3, 1)) / ELL**2,
    fine=FINE,
    curves=np.array([[[0.8], [0.7]], [[1.0], [1.2]]]) / FINE**2,
)


def search_rows():
    return [
        {
            "stage": f"{stage}",
            "evaluations": f"{10 * stage + n + 1}",
            "radius": f"{8 / 2**stage}",
            "inflation": f"{4.0**-stage}",
            "data": f"{100 * (1 + stage + n)}",
            "prior": f"{50 * (1 + n)}",
        }
        for stage, n in itertools.product(range(3), range(10))
    ]


def emulation_rows():
    return [
        {
            "a": a,
            SPACING: 1.0,
            "universe": u,
            "k [h/Mpc]": k,
            "P plain": 1 - 0.4 * k,
            "P corrected": 1 + 0.2 * k + 0.1 * u,
            "1 - r plain": 0.01 * k,
            "1 - r corrected": 0.001 * k * (1 + u),
        }
        for a, u, k in itertools.product((0.5, 1.0), range(3), (0.1, 0.5, 2.0))
    ]


@functools.cache
def groups():
    runs = []
    for batch, ranks, repeat in itertools.product((4, 8), (1, 2, 4), range(3)):
        seconds = batch * (1 + 0.1 * repeat) / ranks**0.8
        measured = {STEP: seconds, THROUGHPUT: 1 / seconds, PHASE + "read": 0.3 * seconds}
        measured |= {PHASE + "network": 0.7 * seconds, VALIDATED[0]: batch / 10 + repeat / 100}
        measured |= {ENERGY: 10.0 * ranks + repeat, POWER: 5.0 * ranks}
        keys = {"training.batch": batch}
        runs.append(Run(len(runs), keys, ranks, repeat, "complete", 1.0, "", measured))
    return groups_of(runs)


SPACE = {"training.rate": Range(low=1e-5, high=1e-1, log=True), "network.name": ["a", "b", "c"]}
TRIALS = [
    TrialRecord(
        state,
        value,
        number=n,
        values={"training.rate": 10.0 ** -(1 + n % 5), "network.name": "abc"[n % 3]},
    )
    for n, (state, value) in enumerate(
        [("complete", v) for v in (0.9, 0.5, 0.7, 0.4, 0.6, 0.8, 0.3, 40.0, 0.45, 0.55, 0.65)]
        + [("pruned", 0.2), ("failed", None)]
    )
]
PRIORS = UniformPriors({"Omega_m": (0.1, 0.5), "sigma8": (0.6, 1.0)})


@functools.cache
def calibrated():
    """Posteriors that equal the prior, for two data sets in each of 60 groups."""
    rng = np.random.default_rng(1)
    truth, samples = rng.uniform(0, 1, (120, 2)), rng.uniform(0, 1, (120, 50, 2))
    width = PRIORS.high - PRIORS.low
    answers = Answers(
        PRIORS, PRIORS.low + width * truth, PRIORS.low + width * samples, np.zeros(120)
    )
    return calibration_of(answers, np.arange(120) // 2)


def one_parameter(found):
    sigma = None if found.sigma is None else found.sigma[:, :1]
    return Predictions(NAMES[:1], found.truth[:, :1], found.mean[:, :1], sigma)


NOISE = 40.0


def power_figure():
    return figures.power_spectrum_figure(
        K, MEASURED, MODES, lambda k: 1e4 * k**-1.5, nyquist=3.2, a=0.5, noise=NOISE
    )


LONG = "a ridge on log P(k) and on the histogram"
SOURCES = "a survey with a long name, bin 3 of 10, of the galaxies of the file catalogue.fits"


@functools.cache
def catalogue():
    """Halos in a slab of 12.5 Mpc/h."""
    number = np.array([20, 25, 30, 40, 60, 100, 300, 5000])
    position = RNG.uniform(0, 1, (8, 3)) * [100, 75, 12.5]
    cosmology = {"Omega_m": 0.3, "Omega_b": 0.05, "h": 0.7, "n_s": 0.96, "sigma8": 0.8}
    about = {"a": 0.5, "grid": [8] * 3, "box_size": [100.0, 75.0, 50.0], "minimum": 20}
    columns = {"id": np.arange(8), "number": number, "position": position}
    about["cosmology"] = cosmology
    columns["mass"] = number * Header.of(about).mass * 1e10
    return Catalogue("halos", columns, about, ProcessMesh(""), 8, True)


def abundance():
    return mass_function(catalogue())


@functools.cache
def tracers():
    power = MEASURED * 2 - 500
    return TracerPower(K, MODES, power, 1.5 * MEASURED, MEASURED, 1.5 + K, 0.1 * K, 500.0)


DRAWN = {
    "halos": lambda: catalogues.halos_figure(SLAB, 12.5, catalogue()),
    "abundance": lambda: catalogues.abundance_figure(
        abundance(), Theory(catalogue().cosmology), catalogue()
    ),
    "power of halos": lambda: catalogues.tracer_figure(tracers(), 0.5),
    "density": lambda: figures.density_figure(SLAB, (100, 75, 50), 12.5, 1.0),
    "low density": lambda: figures.density_figure(SLAB, (800, 100, 50), 12.5, 1.0),
    "high density": lambda: figures.density_figure(SLAB, (100, 800, 50), 12.5, 1.0),
    "power": lambda: power_figure(),
    "predictions": lambda: scores.predicted_figure({"network": NETWORK, LONG: RIDGE}, MEANS),
    "predictions of one": lambda: scores.predicted_figure(
        {"network": one_parameter(NETWORK), LONG: one_parameter(RIDGE)}, MEANS[:1]
    ),
    "error bars": lambda: scores.calibration_figure(NETWORK),
    "error bars of one": lambda: scores.calibration_figure(one_parameter(NETWORK)),
    "learning curve": lambda: scores.learning_curve_figure(
        {LONG: LearningCurve(np.array([50, 800]), {"sigma8": np.array([0.9, 0.1])})}
    ),
    "training": lambda: scores.training_figure(METRICS),
    "phases": lambda: scores.phases_figure({"read": 3.0, "exchange of halos": 1.0}),
    "correction": lambda: emulation.correction_figure(emulation_rows()),
    "slabs": lambda: reconstruction.slabs_figure(DENSITIES, (100, 100), 12.5, 1.0),
    "low slabs": lambda: reconstruction.slabs_figure(DENSITIES, (800, 100), 12.5, 1.0),
    "high slabs": lambda: reconstruction.slabs_figure(DENSITIES, (100, 800), 12.5, 1.0),
    "maps": lambda: reconstruction.maps_figure(
        dict(zip(("truth", "data", "kappa"), KAPPA, strict=True)), 5.0, SOURCES
    ),
    "chains": lambda: reconstruction.chains_figure(TRACES, {"sigma8": 0.9}, 30),
    **{
        f"a search that ended with {why}": lambda why=why: reconstruction.loss_figure(
            search_rows(), 100, 400, outcome_of(why, 12.3)
        )
        for why in ("converged", "evaluations", "stalled", None)
    },
    "field": lambda: sky.field_figure(KAPPA, 5.0, SOURCES),
    "sky": lambda: sky.sky_figure(np.arange(192.0), SOURCES),
    "power of maps": lambda: sky.power_figure(CL, ["near", "far"]),
    "ranks": lambda: posteriors.rank_figure({"network + a very long name": calibrated()}),
    "TARP": lambda: posteriors.tarp_figure({LONG + ", a flow": calibrated()}),
    "scaling": lambda: studies.scaling_figure(groups()),
    "phases of a study": lambda: studies.phases_figure(groups()),
    "keys": lambda: studies.keys_figure(groups(), ["training.batch"]),
    "energy": lambda: studies.energy_figure(groups()),
    "history": lambda: tuning.history_figure(TRIALS, "validation_loss"),
    "importances": lambda: tuning.importances_figure({"training.rate": 0.7, "b": 0.3}, "loss"),
    "parallel": lambda: tuning.parallel_figure(TRIALS, SPACE, "validation_loss"),
}


def half_lengths(axes):
    """Half the lengths of all error bars of axes, [bar]."""
    bars = [b.get_segments() for b in axes.collections if isinstance(b, LineCollection)]
    return np.concatenate([np.ptp(np.array(each)[:, :, 1], axis=1) / 2 for each in bars])


def curve(axes, label):
    """The points of the curve with a label [point, 2]; None for errors' containers."""
    return next(x for x in axes.lines if x.get_label() == label).get_xydata()


def limits(image):
    return image.norm.vmin, image.norm.vmax


def bars_of(container):
    """The ends of a container's error bars, [point, 2]."""
    (bars,) = container.lines[2]
    return np.array(bars.get_segments())[:, :, 1]
