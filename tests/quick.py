"""What makes tests quicker: compiling without optimising, and building graphs with less beside it.

The job on one rank has XLA as users do, and so has pytest where `make test` does not run it. Jobs
of several ranks have TensorFlow's graph optimiser in tests marked `grappler` alone: those of what
it might leave out or merge, and some of whole runs and trainings.
"""

import gc
import sys

QUICK_XLA = "--xla_backend_optimization_level=0"


def collect_seldom() -> None:
    """Let Python look for cycles less often: graphs are many objects, and nearly all of them stay.

    Of the processor time of building graphs it is an eighth otherwise.
    """
    gc.set_threshold(200_000, 50, 100)


def trace_once() -> None:
    """Give all operations of graphs one traceback, once TensorFlow is imported.

    TensorFlow looks up the line of every caller, pytest's too, for each operation that is added:
    a twentieth of the time of ranks. What an operation's error says of where it was made is lost.
    """
    tf_stack = sys.modules.get("tensorflow.python.util.tf_stack")
    if tf_stack is not None and not hasattr(tf_stack, "traced_once"):
        tf_stack.traced_once = trace = tf_stack.extract_stack()  # type: ignore[attr-defined]
        tf_stack.extract_stack = lambda stacklevel=1: trace  # type: ignore[attr-defined]


def optimise_graphs(wanted: bool) -> None:
    """Turn Grappler on or off: a part of the time of building graphs on every rank."""
    import tensorflow as tf

    options = tf.config.optimizer.get_experimental_options()
    if options.get("disable_meta_optimizer", False) == wanted:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})
