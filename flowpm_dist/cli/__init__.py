"""The command `flowpm-dist`, one file a command."""


def main() -> None:
    """Entry point of `flowpm-dist`."""
    from flowpm_dist.cli.main import main

    main()
