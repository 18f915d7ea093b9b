"""The program `flowpm-dist`, whose commands are imported when they are used.

TensorFlow, Horovod and MPI are imported only after everything that can be checked without them. A
mistake is reported within a second, and by one rank alone.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flowpm_dist.cli.common import MESSAGE_SECONDS, leave
from flowpm_dist.jobs.progress import Verbosity
from flowpm_dist.jobs.register import JOBS, job_class
from meshimpl import launch

COMMANDS = (
    *JOBS, "dataset", "evaluate", "predict", "export", "convert", "runs", "submit", "build",
    "doctor",
)  # fmt: skip
"""Jobs, and names of modules of this package that have a function `add_to`."""


class Commands(TyperGroup):
    """A group of commands that imports the module of a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of a name, or None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        one = typer.Typer(add_completion=False, rich_markup_mode="rich")
        if cmd_name in JOBS:
            from flowpm_dist.cli.jobs import command as command_of

            kind = job_class(cmd_name)
            example = f"Example: [bold]{kind.example}[/bold]" if kind.example else None
            one.command(kind.name, epilog=example)(command_of(kind))
        else:
            importlib.import_module(f"flowpm_dist.cli.{cmd_name}").add_to(one)
        command = typer.main.get_group(one).commands[cmd_name]
        command.params += _common_options()
        return command


def _choose(level: Verbosity) -> Callable[[bool], None]:
    return lambda given: level.choose() if given else None


VERBOSE = typer.Option(
    "-v",
    "--verbose",
    help="Print more: every step, and the traceback of an error.",
    expose_value=False,
    callback=_choose(Verbosity.VERBOSE),
)
QUIET = typer.Option(
    "-q",
    "--quiet",
    help="Say nothing but results, warnings and errors.",
    expose_value=False,
    callback=_choose(Verbosity.QUIET),
)


def _common_options() -> list[Any]:
    """Returns the options that every command has."""
    one = typer.Typer(add_completion=False)

    @one.command(add_help_option=False)
    def common(
        verbose: Annotated[bool, VERBOSE] = False, quiet: Annotated[bool, QUIET] = False
    ) -> None:
        """Has the options."""

    return typer.main.get_command(one).params


app = typer.Typer(
    name="flowpm-dist",
    cls=Commands,
    help="Particle-mesh universes on many ranks, and networks that learn from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(asked: bool) -> None:
    if asked:
        from flowpm_dist.jobs.results import versions

        print(f"flowpm-dist {versions().get('flowpm-dist', '(not installed, run from source)')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and leave."),
    ] = False,
) -> None:
    """Particle-mesh universes on many ranks, and networks that learn from them."""


def main() -> None:
    """Entry point of `flowpm-dist` and of `python -m flowpm_dist.cli`."""
    if launch.detect().rank == 0:
        app()
        return
    # Every rank finds wrong usage, and rank 0 reports it.
    try:
        app(standalone_mode=False)
    except Exception as error:
        status = getattr(error, "exit_code", None)
        if status is None:
            raise
        time.sleep(MESSAGE_SECONDS)
        leave(status)


if __name__ == "__main__":
    main()
