"""The program `flowpm-dist`, with one module for each command."""


def main() -> None:
    """Entry point of `flowpm-dist`."""
    from flowpm_dist.cli.program import main

    main()
