"""Differentiable, distributed cosmological simulation on TensorFlow.

::

    import flowpm_dist as fpm

    sim = fpm.Simulation(fpm.Cosmology.planck18(), grid=128, box_size=256.0,
                         steps=fpm.scale_factor_steps(0.1, 1.0, 10))
    state = sim.run(seed=42)
    k, pk = fpm.power_spectrum(state.density())
"""

from typing import TYPE_CHECKING

from meshimpl.imports import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see
    from flowpm_dist.catalogues.catalogue import Catalogue as Catalogue
    from flowpm_dist.catalogues.finder import halos as halos
    from flowpm_dist.catalogues.particles import ParticleSnapshot as ParticleSnapshot
    from flowpm_dist.catalogues.particles import read_particles as read_particles
    from flowpm_dist.catalogues.survey_power import survey_multipoles as survey_multipoles
    from flowpm_dist.catalogues.surveys import SurveyCatalogue as SurveyCatalogue
    from flowpm_dist.catalogues.surveys import read_galaxies as read_galaxies
    from flowpm_dist.cli.from_python import run as run
    from flowpm_dist.cosmology.growth import Growth as Growth
    from flowpm_dist.cosmology.parameters import Cosmology as Cosmology
    from flowpm_dist.cosmology.power import LinearPower as LinearPower
    from flowpm_dist.cosmology.steps import growth_steps as growth_steps
    from flowpm_dist.cosmology.steps import logarithmic_steps as logarithmic_steps
    from flowpm_dist.cosmology.steps import scale_factor_steps as scale_factor_steps
    from flowpm_dist.cosmology.theory import Theory as Theory
    from flowpm_dist.evolution.integrators import COLA as COLA
    from flowpm_dist.evolution.integrators import BullFrog as BullFrog
    from flowpm_dist.evolution.integrators import FastPM as FastPM
    from flowpm_dist.grid.box import Box as Box
    from flowpm_dist.grid.field import Field as Field
    from flowpm_dist.jobs.progress import Progress as Progress
    from flowpm_dist.particle_mesh.cloud_in_cell import HaloError as HaloError
    from flowpm_dist.particle_mesh.scattered import paint as paint
    from flowpm_dist.reconstruction.log_density import log_density as log_density
    from flowpm_dist.simulation.simulation import Simulation as Simulation
    from flowpm_dist.simulation.state import State as State
    from flowpm_dist.statistics import Bins as Bins
    from flowpm_dist.statistics import PowerSpectrum as PowerSpectrum
    from flowpm_dist.statistics import compare as compare
    from flowpm_dist.statistics import correlation_coefficient as correlation_coefficient
    from flowpm_dist.statistics import correlation_function as correlation_function
    from flowpm_dist.statistics import cross_power as cross_power
    from flowpm_dist.statistics import density_histogram as density_histogram
    from flowpm_dist.statistics import jacobian as jacobian
    from flowpm_dist.statistics import multipoles as multipoles
    from flowpm_dist.statistics import power_spectrum as power_spectrum
    from flowpm_dist.statistics import power_wedges as power_wedges
    from flowpm_dist.statistics import transfer_function as transfer_function

__version__ = "0.1.0"

_HOMES = {
    "Bins": "statistics",
    "BullFrog": "evolution.integrators",
    "COLA": "evolution.integrators",
    "Catalogue": "catalogues.catalogue",
    "Cosmology": "cosmology",
    "Growth": "cosmology",
    "LinearPower": "cosmology",
    "Box": "grid.box",
    "FastPM": "evolution.integrators",
    "Field": "grid.field",
    "HaloError": "particle_mesh.cloud_in_cell",
    "ParticleSnapshot": "catalogues.particles",
    "PowerSpectrum": "statistics",
    "Progress": "jobs.progress",
    "Simulation": "simulation.simulation",
    "State": "simulation.state",
    "Theory": "cosmology",
    "compare": "statistics",
    "correlation_coefficient": "statistics",
    "correlation_function": "statistics",
    "cross_power": "statistics",
    "density_histogram": "statistics",
    "growth_steps": "cosmology.steps",
    "halos": "catalogues.finder",
    "jacobian": "statistics",
    "log_density": "reconstruction.log_density",
    "logarithmic_steps": "cosmology.steps",
    "multipoles": "statistics",
    "paint": "particle_mesh.scattered",
    "power_spectrum": "statistics",
    "power_wedges": "statistics",
    "read_particles": "catalogues.particles",
    "read_galaxies": "catalogues.surveys",
    "run": "cli.from_python",
    "scale_factor_steps": "cosmology.steps",
    "SurveyCatalogue": "catalogues.surveys",
    "survey_multipoles": "catalogues.survey_power",
    "transfer_function": "statistics",
}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # where it would accept any name
    __getattr__, __dir__ = lazy_names(__name__, _HOMES, without_tensorflow=["Progress", "run"])
