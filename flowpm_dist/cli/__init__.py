"""The program `flowpm-dist`, with one module for each command."""


def main() -> None:
    """Entry point of `flowpm-dist`."""
    from meshimpl import launch

    launch.use_huge_pages()
    from flowpm_dist.cli.program import main

    main()
