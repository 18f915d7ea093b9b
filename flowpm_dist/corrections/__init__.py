"""Learning of corrections: cheap runs are brought close to true states, without any folder.

::

    from flowpm_dist.corrections import Learner, Pair
    from flowpm_dist.evolution.corrections import PotentialFilter

    pairs = [Pair(cheap, seed, [accurate.run(seed=seed)]) for seed in range(5)]
    correction = Learner(PotentialFilter.begun(), pairs[:4], pairs[4:], iterations=100).run()
"""

from meshimpl.imports import lazy_names

_HOMES = {
    "Iteration": "learner",
    "Learner": "learner",
    "LearningError": "learner",
    "LearningOptions": "options",
    "Pair": "loss",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
