"""The command line as Markdown: for each command what ``--help`` says, read from the same objects."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from typer.main import get_command

from gradsync.tools.cli.main import app

PROGRAM = "gradsync"


def describe() -> str:
    """The program with its options, then each of its commands."""
    return "\n".join(part(get_command(app), PROGRAM, level=2))


def subcommands(command: Any) -> dict[str, Any]:
    """The commands of a group by name, none of a plain command."""
    return dict(getattr(command, "commands", {}))


def part(command: Any, line: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{line}`"
    yield ""
    yield (command.help or "").strip()
    yield ""
    yield f"```text\n{usage(command, line)}\n```"
    yield ""
    headings = groupby(
        (parameter for parameter in command.params if not is_help(parameter)),
        key=lambda parameter: getattr(parameter, "rich_help_panel", None),
    )
    for heading, parameters in headings:
        yield f"| {heading or 'option'} | default | meaning |"
        yield "|---|---|---|"
        for parameter in parameters:
            names = ", ".join(f"`{name}`" for name in names_of(parameter))
            yield f"| {names} | {default(parameter)} | {cell(getattr(parameter, 'help', None) or '')} |"
        yield ""
    # Commands of the program stand beside it in the page, those of a group below it.
    for name, child in subcommands(command).items():
        yield from part(child, f"{line} {name}", level if line == PROGRAM else level + 1)


def usage(command: Any, line: str) -> str:
    arguments = [parameter.name.upper() for parameter in command.params if not is_option(parameter)]
    more = ["COMMAND", "…"] if subcommands(command) else arguments
    return " ".join([line, "[OPTIONS]", *more])


def names_of(parameter: Any) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts] if is_option(parameter) else [parameter.name.upper()]


def default(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False) or parameter.default is None or parameter.required:
        return ""
    return f"`{cell(parameter.default)}`" if isinstance(parameter.default, (str, int, float)) else ""


def is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def is_help(parameter: Any) -> bool:
    return "--help" in parameter.opts


def cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
