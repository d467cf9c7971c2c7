"""Every command that README and docs name can be typed: its program, options, values, files and extras are there.

They are read as a shell would read them, and given to the parsers of the programs; what they would do is not done here.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from tests.pages import PAGES, ROOT, blocks

pytest.importorskip("typer", reason="the command line needs the extra gradsync[cli]")

from typer.main import get_command

from gradsync.base import __version__
from gradsync.tools.bench.scenarios import SCENARIOS
from gradsync.tools.cli.main import app

INLINE = re.compile(r"(?<!`)`((?:gradsync|make|mpirun|pip|python|srun|torchrun)\s[^`]+)`(?!`)")
# Programs of others that start ranks: what they are given themselves, they read; what follows is a command again.
LAUNCHERS = {"mpirun", "srun"}
# Whose options are not checked here.
OF_OTHERS = {"kill", "kubectl", "sbatch", "torchft_lighthouse"}
# Files that a reader has, and not we.
OF_THE_READER = {"train.py"}
# What stands after `gradsync bench`, or nothing.
SCENARIO_NAMES = {None, "all", "report", *(scenario.name for scenario in SCENARIOS)}

SCRIPTS = {block.script for block in blocks("python", "py") if block.script is not None}
EXTRAS = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().partition("[project.optional-dep")[2], re.M)


class UnknownCommandError(Exception):
    """A command that nobody could type."""


def commands() -> Iterator[tuple[str, str]]:
    """Where it stands, and a command: the lines of shell blocks, and commands inside of sentences."""
    for block in blocks("bash", "sh"):
        for line in block.code.splitlines():
            yield block.where, line
    for page in PAGES:
        # Fences would be taken for the marks of code in a sentence.
        for found in INLINE.finditer(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)):
            yield page.name, " ".join(found[1].split())


def check(line: str) -> None:
    """Raise if the command cannot be typed."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        known = words.pop(0).partition("=")[0]
        if f"`{known}`" not in (ROOT / "docs/reference/environment.md").read_text():
            raise UnknownCommandError(f"{known} is no variable of ours")
    if words:
        _check_words(words)


def _check_words(words: list[str]) -> None:
    program, *rest = words
    if program == "gradsync":
        _check_ours(rest)
    elif program == "torchrun":
        given = get_args_parser().parse_args(rest)
        start = ["python", "-m"] if given.module else ["python"]
        _check_words([*start, given.training_script, *given.training_script_args])
    elif program in LAUNCHERS:
        places = [place for place, word in enumerate(rest) if word in ("gradsync", "python")]
        if not places:
            raise UnknownCommandError(f"{program} starts nothing that is known here")
        _check_words(rest[places[0] :])
    elif program == "python":
        _check_python(rest)
    elif program == "pip":
        _check_pip(rest)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        missing = [target for target in rest if "=" not in target and not re.search(rf"^{target}:", makefile, re.M)]
        if missing:
            raise UnknownCommandError(f"make has no {missing[0]}")
    elif program not in OF_OTHERS:
        raise UnknownCommandError(f"nobody knows how to check {program}")


def _check_ours(words: list[str]) -> None:
    """By the parser of the program itself."""
    command: Any = get_command(app)
    line = "gradsync"
    while hasattr(command, "commands") and words:
        name, *words = words
        if name.startswith("-"):
            if not any(name in parameter.opts for parameter in command.params):
                raise UnknownCommandError(f"{line} has no option {name}")
            continue
        if name not in command.commands:
            raise UnknownCommandError(f"{line} has no command {name}")
        command, line = command.commands[name], f"{line} {name}"
    if hasattr(command, "commands"):
        return
    try:
        context = command.make_context(line, list(words))
    except Exception as error:
        raise UnknownCommandError(f"{line}: {error}") from error
    if line == "gradsync bench" and context.params["scenario"] not in SCENARIO_NAMES:
        raise UnknownCommandError(f"there is no scenario {context.params['scenario']}")
    if line == "gradsync run":
        script, *_ = context.params["command"]
        if not script.isupper():
            _check_python(["-m", script] if context.params["module"] else [script])
    if line == "gradsync lab run":
        inner = words[words.index("--") + 1 :]
        if inner[0] == "gradsync":
            _check_ours(inner[1:])


def _check_python(words: list[str]) -> None:
    if words[0] == "-m":
        name, rest = words[1], words[2:]
        if importlib.util.find_spec(name) is None:
            raise UnknownCommandError(f"there is no module {name}")
        if name == "gradsync":
            _check_ours(rest)
        return
    name = words[0]
    if name not in SCRIPTS | OF_THE_READER and not (ROOT / name).is_file():
        raise UnknownCommandError(f"there is no file {name}")


def _check_pip(words: list[str]) -> None:
    if words[0] != "install":
        raise UnknownCommandError(f"pip {words[0]} is not what a page would ask for")
    for word in words[1:]:
        # On no index yet: by its name pip would find nothing, or what somebody else has put there.
        wheel = rf"dist/gradsync-{re.escape(__version__)}-py3-none-any\.whl"
        found = re.fullmatch(rf"(?:{wheel}|\.)(?:\[(?P<extras>[\w,]+)\])?", word)
        if found is None:
            raise UnknownCommandError(f"{word} is neither a clone nor a wheel of ours")
        for extra in filter(None, (found["extras"] or "").split(",")):
            if extra not in EXTRAS:
                raise UnknownCommandError(f"there is no extra {extra}")


def test_every_command_can_be_typed() -> None:
    found = list(commands())
    assert len(found) > 60
    wrong = []
    for where, line in found:
        try:
            check(line)
        except (UnknownCommandError, SystemExit) as error:
            wrong.append(f"{where}: {line}: {error}")
    assert not wrong, "\n".join(wrong)


def test_no_text_tells_anybody_to_install_from_an_index() -> None:
    """Errors of an installed gradsync name its extras, and those pip finds in what is installed."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in [*PAGES, *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    }
    assert [path.name for path, text in texts.items() if re.search(r"pip install ['\"]?gradsync", text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "gradsync fly",
        "gradsync train --wings 2",
        "gradsync train --steps many",
        "gradsync --wings",
        "gradsync bench flight",
        "gradsync lab run -- gradsync fly",
        "gradsync run nowhere.py",
        "gradsync run --wings train.py",
        "gradsync lab up --wings 2",
        "torchrun --wings 2 train.py",
        "torchrun --nproc-per-node 2 nowhere.py",
        "torchrun --nproc-per-node 2 -m gradsync fly",
        "mpirun -n 2 gradsync fly",
        "mpirun -n 2 hostname",
        "python benchmarks/nowhere.py",
        "python -m nowhere",
        "pip install gradsync",
        "pip install 'gradsync[train]'",
        "pip install '.[wings]'",
        "pip install dist/gradsync-9.9.9-py3-none-any.whl",
        "pip uninstall gradsync",
        "make nothing",
        "fly",
        "GRADSYNC_WINGS=2 gradsync doctor",
    ],
)
def test_a_command_that_cannot_be_typed_is_seen(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((UnknownCommandError, SystemExit)):
        check(line)
