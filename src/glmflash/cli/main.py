"""The `glmflash` command. Knows the commands' names; each lives in a file of its own.

No heavy import at module level: `glmflash --help` answers before torch could load.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from glmflash._version import __version__
from glmflash.cli.checkpoint import checkpoint
from glmflash.cli.common import print_error
from glmflash.cli.compare import compare
from glmflash.cli.generate import generate
from glmflash.cli.info import info
from glmflash.cli.inspect import inspect
from glmflash.errors import GlmflashError

app = typer.Typer(
    name="glmflash",
    help="GLM-5.3-Flash on whatever you own: inspect it, run it, prove that it is right.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate)
app.command("inspect")(inspect)
app.command("compare")(compare)
app.add_typer(checkpoint, name="checkpoint")
app.command("info")(info)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"glmflash {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """GLM-5.3-Flash on whatever you own: inspect it, run it, prove that it is right."""


def main() -> None:
    """Run the command line; a GlmflashError is one line on stderr and its exit code."""
    try:
        app()
    except GlmflashError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
