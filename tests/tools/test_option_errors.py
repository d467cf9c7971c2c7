"""What a command refuses, it refuses by the names that its help has: over all options of all commands."""

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from gradsync.errors import ConfigurationError
from gradsync.tools.cli import main
from gradsync.tools.cli.failure_message import OPTION, refusing

pytestmark = pytest.mark.timeout(120)

# Of whatever kind an option is: some of them are wrong, unless any text will do.
VALUES = ("0", "-1", "99999999999999999999", "nan", "inf", "-inf", "foo", "foo:3", "", "no/such/place")
# What a command needs to get as far as its options; and what stands behind them.
BEFORE = {
    "train": ["--data", "text.txt", "--nproc", "2"],
    "plan": ["--profile", "a100-200g", "--model", "resnet50", "--ranks", "2"],
    "bench": ["overlap"],
    "explain": ["recorded"],
    "launch": ["--on", "slurm", "--nproc", "2"],
}
BEHIND = {
    "run": ["script.py"],
    "launch": ["script.py"],
    "lab run": ["true"],
    "lab gpu": ["true"],
    "lab rate": ["1gbit"],
    "lab cut": ["0"],
    "lab heal": ["0"],
}
# What they would do if nothing was refused. A name that is not there any more fails the test.
WORK = (
    *(
        "gradsync.tools.cli.train:run_ranks_of",
        "gradsync.tools.cli.train:_run_rank",
        "gradsync.tools.cli.train:_run_elastic",
    ),
    *("gradsync.tools.cli.run:run_ranks_of", "gradsync.tools.cli.run:_run_here", "gradsync.tools.cli.run:run_rank"),
    *(
        "gradsync.tools.cli.bench:_run",
        "gradsync.tools.cli.launch:_write",
        "gradsync.tools.cli.doctor:examine",
        "gradsync.tools.calibration:run_calibration",
    ),
    *(
        "gradsync.tools.cli.plan:make_report",
        "gradsync.tools.cli.explain:_trace",
        "gradsync.tools.cli.explain:explain_dumps",
    ),
    *("gradsync.tools.cli.lab:SharedGpu", "gradsync.tools.cli.lab:take_down", "gradsync.tools.cli.lab:check_fit"),
)
# Options of a rank, which no help has.
HIDDEN = "--accounts"


class _Worked(BaseException):
    """The command has accepted what it was given."""


def _work(*args: object, **kwargs: object) -> NoReturn:
    raise _Worked


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield " ".join(path), command


COMMANDS = dict(_leaves(typer.main.get_command(main.app)))
OPTIONS = [
    (name, tuple(option.opts))
    for name, command in COMMANDS.items()
    for option in command.params
    if option.opts[0].startswith("-") and option.opts[0] != HIDDEN
]


@pytest.fixture
def _idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done beyond looking at what was given."""
    for place in WORK:
        module, name = place.split(":")
        importlib.import_module(module)
        monkeypatch.setattr(sys.modules[module], name, _work)
    monkeypatch.setattr(sys.modules["gradsync.tools.cli.lab"].Lab, "up", _work)
    monkeypatch.setattr(sys.modules["gradsync.tools.cli.lab"].Lab, "find", _work)
    # Names of the hub that nobody has: not to be looked for.
    monkeypatch.setattr("gradsync.tools.llm.tokens.TokenizerCodec", _refuse_tokenizer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Wide enough that no word of typer's is broken.
    monkeypatch.setenv("TERMINAL_WIDTH", "1000")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some words to learn " * 1000)
    Path("empty.txt").write_text("")
    Path("script.py").write_text("")
    Path("recorded").mkdir()
    # A recording of one model, of which nothing is read.
    monkeypatch.setattr(sys.modules["gradsync.tools.cli.explain"], "find_dumps", lambda folder: [])
    monkeypatch.setattr(sys.modules["gradsync.tools.cli.explain"], "find_recordings", Path.is_dir)
    monkeypatch.setattr("gradsync.observe.recording.files._models", lambda folder: {0: {}})
    monkeypatch.setattr("gradsync.observe.recording.files._whole", _work)


def _refuse_tokenizer(name: str) -> NoReturn:
    raise ConfigurationError(f"--tokenizer {name!r} cannot be loaded by transformers")


def _said(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What a command says against its arguments; None if it accepts them."""
    monkeypatch.setattr(sys, "argv", ["gradsync", *arguments])
    try:
        main.main()
    except _Worked:
        return None
    except SystemExit as end:
        code = end.code
    words = " ".join(capsys.readouterr().err.split())
    assert code in (0, 2), (arguments, code, words)
    return words if code else None


@pytest.mark.breadth
@pytest.mark.usefixtures("_idle")
@pytest.mark.parametrize(("command", "names"), OPTIONS, ids=[f"{name} {names[0]}" for name, names in OPTIONS])
def test_what_is_refused_is_named_as_it_was_typed(
    command: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (option,) = [each for each in COMMANDS[command].params if tuple(each.opts) == names]
    known = {name for each in COMMANDS[command].params for name in (*each.opts, *each.secondary_opts)} | {
        "-h",
        "--help",
    }
    for typed in names:
        for value in [None] if option.is_flag else VALUES:
            given = [typed] if value is None else [typed, value]
            words = _said(
                [*command.split(), *BEFORE.get(command, []), *given, *BEHIND.get(command, [])], monkeypatch, capsys
            )
            if words is None:
                continue
            assert typed in words, f"{given} is answered with: {words}"
            shown = re.sub(re.escape(repr(value)), "", words)
            foreign = [each for each in OPTION.findall(shown) if each not in known]
            assert not foreign, f"{given} is answered with {foreign}: {words}"
            # What typer says itself, of a value that is no number or out of range, names the option alone.
            if value is not None and f"Invalid value for '{names[0]}'" not in words:
                number = _number(value)
                assert value in words or (number and number in words), f"{given} is not in the answer: {words}"


def _number(value: str) -> str:
    """As Python writes it."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return ""


ARGUMENTS = [("explain", "nowhere"), ("plan", "nowhere"), ("bench", "foo"), ("run", "foo"), ("lab rate", "foo")]


@pytest.mark.usefixtures("_idle")
@pytest.mark.parametrize(("command", "value"), [*ARGUMENTS, ("lab cut", "x"), ("lab heal", "-2")])
def test_an_argument_that_is_refused_is_named(
    command: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _said([*command.split(), "--", value], monkeypatch, capsys)
    assert words is not None
    assert value in words or "Invalid value for 'HOST'" in words or "Invalid value for 'host'" in words


@pytest.mark.usefixtures("_idle")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["plan", "--profile", "foo"], "--profile is one of t4-10gbe,"),
        (["plan", "--profile", "a100-200g"], "--profile a100-200g needs --model, one of"),
        (["plan", "--model", "resnet50"], "--model resnet50 needs --profile, one of"),
        (["plan", "--batch", "3"], "--batch 3 needs --profile, one of"),
        (["plan", "run", "--profile", "a100-200g"], "(run), or --profile a100-200g, not both"),
        (["train", "--shard-optimizer", "--overlap", "backward"], "--shard-optimizer and --overlap backward exclude"),
        (
            ["train", "--data", "text.txt", "--batch", "9999", "--nproc", "1"],
            "--batch 9999 times --grad-accum 4 times --nproc 1, at --length 128: a window takes 39996",
        ),
        (["train", "--data", "text.txt", "--length", "99999"], "at --length 99999: a sample takes"),
        (["bench", "overlap", "--peers", "DDP"], "--peers DDP is for the scenario 'faults', got 'overlap'"),
        (["bench", "overlap", "--jobs", "2"], "--jobs 2 is for the scenario 'faults', got 'overlap'"),
        # Values that look like options.
        (
            ["plan", "--profile", "a100-200g", "--model", "resnet50", "--link", "-inf"],
            "--link: a link's rate is written like",
        ),
        (["train", "--model", "-foo", "--data", "text.txt"], "--model: there is no model '-foo'"),
        (["train", "--data", "--foo"], "--data: there is no text source '--foo'"),
        (["train", "--data", "empty.txt"], "--data: there is no text in empty.txt"),
        (["train", "--batch", "0"], "--batch must be a whole number of at least 1, got 0"),
        (["train", "--precision", "fp12"], "--precision must be one of fp32, bf16, fp16, fp64, got 'fp12'"),
        (["train", "--reduction", "local:0"], "--reduction local:STEPS needs a number of steps, got 'local:0'"),
        (["train", "--reduction", "diloco:8:int3"], "--reduction a reduction is one of mean"),
        (["train", "--reduction", "int3"], "--reduction local:STEPS, diloco:STEPS, or else"),
        (["train", "--overlap", "auto", "--reduction", "local:4"], "--overlap auto exclude each other"),
        (["train", "--nproc", "0"], "--nproc must be at least 1, got 0"),
        (["train", "--resume"], "--resume needs --run-folder"),
        (["train", "--steps", "5", "--epochs", "1"], "give --steps (5) or --epochs (1.0), not both"),
        (["doctor", "--timeout", "inf"], "Invalid value for '--timeout'"),
        (["bench", "faults", "--seeds", "0"], "--rounds (or --seeds) must be at least 1, got 0"),
    ],
)
def test_what_is_refused_together_is_named_together(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _said(arguments, monkeypatch, capsys)
    assert words is not None
    assert expected in words


def test_an_error_that_names_an_option_keeps_its_words() -> None:
    with pytest.raises(ConfigurationError, match=r"^--rate: 3 is no rate$"), refusing("--rate"):
        raise ConfigurationError("3 is no rate")
    with pytest.raises(ConfigurationError, match=r"^give --link, too$"), refusing("--rate"):
        raise ConfigurationError("give --link, too")
    # Nor is what was given as a value.
    for value in ("'--foo'", "-inf", "'-x'"):
        with pytest.raises(ConfigurationError, match=r"^--rate: "), refusing("--rate"):
            raise ConfigurationError(f"expected a rate, got {value}")
    # A path or a word with dashes in it is none.
    path = os.path.join("a", "b--c")
    with pytest.raises(ConfigurationError, match=r"^--rate: "), refusing("--rate"):
        raise ConfigurationError(f"{path} is no rate")
