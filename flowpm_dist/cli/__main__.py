"""Run `flowpm-dist` as `python -m flowpm_dist.cli`."""

from flowpm_dist.cli import start

start()
