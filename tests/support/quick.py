"""Settings that make tests quicker: compilation without optimising, and cheaper building of graphs.

The job on one rank, and pytest outside of `make test`, use XLA as users do. Jobs of ranks use
TensorFlow's graph optimiser only in tests marked `grappler`. They test operations that it might
remove or merge, and some whole runs and trainings. Tests in one process and commands always use it.
"""

import gc
import sys

QUICK_XLA = "--xla_backend_optimization_level=0"


def collect_seldom() -> None:
    """Makes Python search for reference cycles less often.

    Graphs consist of many objects that nearly all stay, and the search takes an eighth of the
    processor time of building them.
    """
    gc.set_threshold(200_000, 50, 100)


def trace_once() -> None:
    """Gives all operations of graphs one traceback, if TensorFlow is imported.

    Otherwise TensorFlow looks up the line of every caller, pytest's too, for each new operation: a
    twentieth of the ranks' time. An error then does not show where its operation was made.
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
