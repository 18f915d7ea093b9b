"""What makes tests quicker: compiling without optimising, and building graphs with less beside it.

The job on one rank has XLA as users do, and so has pytest where `make test` does not run it. Jobs
on four and eight ranks have TensorFlow's graph optimiser in tests marked `grappler` alone: those of
what it might leave out or merge.
"""

import gc

QUICK_XLA = "--xla_backend_optimization_level=0"


def collect_seldom() -> None:
    """Let Python look for cycles less often: graphs are many objects, and nearly all of them stay.

    Of the processor time of building graphs it is a tenth otherwise.
    """
    gc.set_threshold(20_000, 20, 100)


def optimise_graphs(wanted: bool) -> None:
    """Turn Grappler on or off: a part of the time of building graphs on every rank."""
    import tensorflow as tf

    options = tf.config.optimizer.get_experimental_options()
    if options.get("disable_meta_optimizer", False) == wanted:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})
