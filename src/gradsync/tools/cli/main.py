"""The console entry point: finds the commands, and turns errors into one line and an exit code."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

try:
    import rich  # noqa: F401 (typer's help is plain without it, and the commands need it)
    import typer
except ModuleNotFoundError:
    sys.exit("gradsync needs typer and rich for its command line: pip install 'gradsync[cli]'")

from gradsync.base.errors import GradsyncError
from gradsync.tools.cli.failure_message import DEBUG, INTERRUPTED, exit_code_of, one_line
from gradsync.tools.doctor.checks import versions

__all__ = ["app", "main"]

# Each is a function, or a typer application, of its own name in a module of its own name, in the order of the help.
COMMANDS = ("train", "run", "launch", "bench", "lab", "doctor", "explain", "plan")


def main() -> None:
    """The command ``gradsync``. Exits with 0, with 1 after an error, with 2 if what was asked for cannot be."""
    try:
        app(prog_name="gradsync")
    except (GradsyncError, OSError) as error:
        # A file or folder that cannot be read or written says enough by its name.
        is_plain = isinstance(error, GradsyncError) or error.filename is not None
        if not is_plain or os.environ.get(DEBUG, "") not in ("", "0"):
            raise
        print(f"gradsync: {one_line(error)}", file=sys.stderr)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        # Outside of typer, which does the same inside.
        sys.exit(INTERRUPTED)


app = typer.Typer(
    help="Exact and fast data-parallel training with PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_versions(wanted: bool) -> None:
    if wanted:
        print(", ".join(f"{name} {version}" for name, version in versions().items()))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks, like {DEBUG}=1.")] = False,
) -> None:
    if debug:
        # In the environment, so that the ranks show theirs too.
        os.environ[DEBUG] = "1"


def _register(name: str) -> None:
    try:
        module = importlib.import_module(f"gradsync.tools.cli.{name}")
        command = getattr(module, name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings=getattr(module, "SETTINGS", None))(command)
    except ImportError as error:
        # The other commands work, and this one says why it does not.
        extra = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command(name, help="Not available: a required package is missing.", context_settings=extra)(
            _unavailable(name, error)
        )


def _unavailable(name: str, error: ImportError) -> Callable[[], Any]:
    def command() -> None:
        raise GradsyncError(
            f"the command {name} cannot be loaded: {one_line(error)}. Install what is missing, for instance with "
            "pip install 'gradsync[cli]'"
        ) from error

    return command


for _name in COMMANDS:
    _register(_name)

if __name__ == "__main__":
    main()
