"""What makes tests quicker: compiling without optimising, and collecting garbage less often.

The job on one rank has XLA as users do, and so has pytest where `make test` does not run it.
"""

import gc

QUICK_XLA = "--xla_backend_optimization_level=0"


def collect_seldom() -> None:
    """Let Python look for cycles less often: graphs are many objects, and nearly all of them stay.

    Of the processor time of building graphs it is a tenth otherwise.
    """
    gc.set_threshold(20_000, 20, 100)
