"""The program `flowpm-dist`, with one module for each command."""


def main() -> None:
    """Runs the program within a process that may have done more, such as a user's own script."""
    from flowpm_dist.cli.program import main

    main()


def start() -> None:
    """Runs the program in a process of its own: the entry point of `flowpm-dist`."""
    from meshimpl import launch

    launch.use_huge_pages()
    main()
