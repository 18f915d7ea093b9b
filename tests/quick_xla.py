"""XLA compiles without optimising: what tests compile is soon computed, and of many kinds.

The job on one rank has it as users do, and so has pytest where `make test` does not run it.
"""

QUICK_XLA = "--xla_backend_optimization_level=0"
