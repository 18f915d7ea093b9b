"""`python -m flowpm_dist.cli` is `flowpm-dist`."""

from flowpm_dist.cli.main import main

main()
