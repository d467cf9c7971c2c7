"""The command line's dispatching, and the launching of ranks with real processes, signals and deaths."""

import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import gradsync
from gradsync.errors import ConfigurationError, GradsyncError, MismatchError
from gradsync.tools.cli import main
from gradsync.tools.cli.launching import inside_a_launch, run_ranks_of, usable_cores
from gradsync.tools.launch import PASSED_ON
from tests.processes import eventually, is_running
from tests.zygote import Forked, fork

pytestmark = pytest.mark.timeout(120)

# -- dispatching ------------------------------------------------------------------------------------------------------


@contextmanager
def command_that_raises(error: BaseException) -> Iterator[None]:
    def command() -> None:
        raise error

    main.app.command("raising")(command)
    try:
        yield
    finally:
        main.app.registered_commands.pop()


def test_version(capsys: pytest.CaptureFixture[str], run_main: Callable[..., int]) -> None:
    assert run_main("--version") == 0
    output = capsys.readouterr().out
    assert output.startswith(f"gradsync {gradsync.__version__}, torch ")
    assert f"python {sys.version_info[0]}.{sys.version_info[1]}." in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(("error", "code"), [(GradsyncError, 1), (MismatchError, 1), (ConfigurationError, 2)])
def test_an_error_is_one_line_and_an_exit_code(
    error: type[Exception], code: int, capsys: pytest.CaptureFixture[str], run_main: Callable[..., int]
) -> None:
    with command_that_raises(error("expected a,\n    got b")):
        assert run_main("raising") == code
    captured = capsys.readouterr()
    assert captured.err == "gradsync: expected a, got b\n"
    assert captured.out == ""


@pytest.mark.parametrize("how", ["--debug", "GRADSYNC_DEBUG"])
def test_debugging_shows_the_traceback(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "GRADSYNC_DEBUG":
        monkeypatch.setenv(how, "1")
    monkeypatch.setattr(sys, "argv", ["gradsync", *([how] if how == "--debug" else []), "raising"])
    with command_that_raises(MismatchError("no")), pytest.raises(MismatchError):
        main.main()
    assert os.environ["GRADSYNC_DEBUG"] == "1"


def test_an_unknown_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gradsync", "raising"])
    with command_that_raises(ZeroDivisionError("a fault of ours")), pytest.raises(ZeroDivisionError):
        main.main()


def test_an_interruption_is_130(capsys: pytest.CaptureFixture[str], run_main: Callable[..., int]) -> None:
    with command_that_raises(KeyboardInterrupt()):
        assert run_main("raising") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_unknown_command_is_a_wrong_use(capsys: pytest.CaptureFixture[str], run_main: Callable[..., int]) -> None:
    assert run_main("no-such-command") == 2
    assert "no-such-command" in capsys.readouterr().err


def test_a_command_that_cannot_be_imported_says_so_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, run_main: Callable[..., int]
) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.setattr(gradsync.tools.cli, "__path__", [*gradsync.tools.cli.__path__, str(tmp_path)])
    main._register("broken")
    try:
        assert run_main("broken", "--some", "option") == 1
        assert "the command broken cannot be loaded: No module named 'a_package" in capsys.readouterr().err
        assert run_main("doctor", "--help") == 0
    finally:
        main.app.registered_commands.pop()


def test_without_arguments_it_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_main: Callable[..., int]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # 2 is typer's own answer to a command that is missing.
    assert run_main() in (0, 2)
    shown = "".join(capsys.readouterr())
    assert "Usage: gradsync" in shown
    assert "Traceback" not in shown
    lines = [" ".join(line.strip("│ ").split()) for line in shown.splitlines()]
    assert "doctor Check whether this machine is ready for data-parallel training." in lines
    assert "explain Show where the time of a step goes, and what to change." in lines


MISSING = "gradsync needs typer and rich for its command line: pip install 'gradsync[cli]'"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_packages_it_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "gradsync.tools.cli.main")
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module("gradsync.tools.cli.main")
    assert exit_info.value.code == MISSING


# -- launching --------------------------------------------------------------------------------------------------------

RANK = """\
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]

def note(what):
    with open(os.path.join(folder, f"{what}-{rank}"), "w") as file:
        file.write(str(os.getpid()))

"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that ranks can be of, and returns its name."""
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    def write(code: str) -> str:
        (tmp_path / "a_module_of_ranks.py").write_text(RANK + code)
        return "a_module_of_ranks"

    return write


def pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("started-*") if (text := path.read_text())]


def none_is_left(folder: Path, ranks: int = 2) -> bool:
    started = pids(folder)
    assert len(started) == ranks
    return eventually(lambda: not any(map(is_running, started)), seconds=10)


def test_ranks_run_as_under_torchrun(
    module: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = """
note("started")
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
line = " ".join([str(rank), *(os.environ[name] for name in names), __name__, *sys.argv[2:]])
os.write(1, (line + "\\n").encode())
"""
    handlers = [signal.getsignal(number) for number in PASSED_ON]
    assert run_ranks_of(module(code), [str(tmp_path), "a b", "$HOME", "$$", "--flag"], nproc=2) == 0
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == [
        f"{rank} 2 {rank} 2 127.0.0.1 1 __main__ a b $HOME $$ --flag" for rank in (0, 1)
    ]
    assert captured.err == ""
    assert none_is_left(tmp_path)
    assert [signal.getsignal(number) for number in PASSED_ON] == handlers


@pytest.mark.program
def test_ranks_meet_at_the_store_of_the_launcher(module: Callable[[str], str], tmp_path: Path) -> None:
    code = """
from datetime import timedelta
import torch, torch.distributed as dist
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.tensor(float(rank + 1))
dist.all_reduce(total)
note(f"total {total.item():g}")
dist.destroy_process_group()
"""
    assert run_ranks_of(module(code), [str(tmp_path)], nproc=2) == 0
    assert sorted(path.name for path in tmp_path.glob("total*")) == ["total 3-0", "total 3-1"]


def test_the_exit_code_is_that_of_the_rank_that_failed(
    module: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
note("started")
if rank == 1:
    while not os.path.exists(os.path.join(folder, "started-0")):
        time.sleep(0.01)
    sys.exit(3)
time.sleep(100)
"""
    assert run_ranks_of(module(code), [str(tmp_path)], nproc=2) == 3
    assert capfd.readouterr().err == "gradsync: rank 1 failed with exit code 3; its own message is above\n"
    assert none_is_left(tmp_path)


def test_a_rank_that_a_signal_ends_is_named(
    module: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The other one fails too, as by a broken connection, and has the lower number: it is not to blame.
    code = """
note("started")
if rank == 1:
    while not os.path.exists(os.path.join(folder, "started-0")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSEGV)
while True:
    time.sleep(0.005)
    try:
        with open(f"/proc/{open(os.path.join(folder, 'started-1')).read()}/stat") as stat:
            gone = stat.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        gone = True
    if gone:
        sys.exit(1)
""".replace("while True:", 'while not os.path.exists(os.path.join(folder, "started-1")):\n    pass\nwhile True:', 1)
    assert run_ranks_of(module(code), [str(tmp_path)], nproc=2) == 128 + signal.SIGSEGV
    error = capfd.readouterr().err
    assert error == "gradsync: rank 1 was ended by signal 11 (SIGSEGV); the others were stopped\n"
    assert none_is_left(tmp_path)


RESTARTED = """
note("started")
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
note(f"life {count} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
if rank == 1 and count in folder_says:
    while not os.path.exists(os.path.join(folder, f"life {count} of 2-0")):
        time.sleep(0.01)
    how = folder_says[count]
    os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else sys.exit(how)
if count in folder_says:
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("lives", "code", "lines"),
    [
        (
            {"0": "killed"},
            0,
            ["rank 1 was ended by signal 9", "all ranks are started again (restart 1 of 2)"],
        ),
        (
            {"0": 3, "1": 4, "2": 5},
            5,
            ["exit code 3", "restart 1", "exit code 4", "restart 2", "exit code 5"],
        ),
        ({"0": 2}, 2, ["exit code 2"]),
    ],
    ids=["once", "too often", "refused"],
)
def test_ranks_are_started_again_after_a_failure(
    module: Callable[[str], str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    lives: dict[str, int | str],
    code: int,
    lines: list[str],
) -> None:
    """Not after a refusal, and not more often than it was allowed."""
    program = module(f"folder_says = {lives!r}\n" + RESTARTED)
    assert run_ranks_of(program, [str(tmp_path)], nproc=2, max_restarts=2) == code
    told = capfd.readouterr().err.splitlines()
    assert len(told) == len(lines)
    assert all(piece in line for piece, line in zip(lines, told, strict=True))
    started = sorted(path.name for path in tmp_path.glob("life*"))
    # After a failure there is one life more, but for the last that was allowed, and a refusal.
    last = len(lives) if code == 0 else len(lives) - 1
    assert started == [f"life {number} of 2-{rank}" for number in range(last + 1) for rank in (0, 1)]
    assert none_is_left(tmp_path)


def launch_two(name: str, folder: str, grace: int) -> None:
    sys.exit(run_ranks_of(name, [folder], nproc=2, grace_seconds=grace))


@dataclass(frozen=True)
class Launched:
    """A process of its own that launches two ranks, forked from one that has imported torch."""

    process: Forked
    output: Path

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it and the ranks have written."""
        return self.process.wait(100), self.output.read_text()


Launch = Callable[..., AbstractContextManager[Launched]]


@pytest.fixture
def launch(module: Callable[[str], str], tmp_path: Path) -> Launch:
    @contextmanager
    def start(code: str, grace: int = 30) -> Iterator[Launched]:
        with (tmp_path / "output").open("wb") as output:
            process = fork(f"{__name__}:launch_two", module(code), str(tmp_path), grace, output=output)
        try:
            assert eventually(lambda: len(pids(tmp_path)) == 2, seconds=60), "the ranks did not start"
            yield Launched(process, tmp_path / "output")
        finally:
            for pid in filter(is_running, pids(tmp_path)):
                os.kill(pid, signal.SIGKILL)
            process.kill_all()

    return start


WAIT = 'note("started")\ntime.sleep(100)\n'
# A rank that needs a moment to finish its work, and says how it ended.
FINISH = """
def finish(number, frame):
    time.sleep(0.5 * (rank + 1))
    note(f"finished by {signal.Signals(number).name}")
    sys.exit(EXIT_CODE)
signal.signal(signal.SIGINT, finish)
signal.signal(signal.SIGTERM, finish)
"""


@pytest.mark.program
@pytest.mark.parametrize(
    ("number", "own_code", "expected"),
    [(signal.SIGINT, "128 + number", 130), (signal.SIGTERM, "0", 0), (signal.SIGTERM, "4 * rank", 4)],
)
def test_a_signal_reaches_the_ranks_which_finish_by_themselves(
    number: signal.Signals, own_code: str, expected: int, launch: Launch, tmp_path: Path
) -> None:
    said = "gradsync: rank 1 failed with exit code 4; its own message is above\n" if expected == 4 else ""
    with launch(FINISH.replace("EXIT_CODE", own_code) + WAIT) as launched:
        launched.process.send_signal(number)
        assert launched.ended() == (expected, said)
        finished = sorted(path.name for path in tmp_path.glob("finished*"))
        assert finished == [f"finished by {number.name}-{rank}" for rank in (0, 1)]
        assert none_is_left(tmp_path)


@pytest.mark.program
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_ranks_without_handlers_end_without_a_word(
    number: signal.Signals, code: int, launch: Launch, tmp_path: Path
) -> None:
    with launch(WAIT) as launched:
        launched.process.send_signal(number)
        assert launched.ended() == (code, "")
        assert none_is_left(tmp_path)


IGNORE = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@pytest.mark.program
def test_ranks_that_do_not_end_in_time_are_killed(launch: Launch, tmp_path: Path) -> None:
    with launch(IGNORE + WAIT, grace=1) as launched:
        launched.process.send_signal(signal.SIGINT)
        expected = "gradsync: rank 0 had not ended in time after SIGINT and was killed\n"
        assert launched.ended() == (128 + signal.SIGKILL, expected)
        assert none_is_left(tmp_path)


@pytest.mark.program
def test_a_second_signal_does_not_wait(launch: Launch, tmp_path: Path) -> None:
    with launch(IGNORE + WAIT, grace=100) as launched:
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert is_running(launched.process.pid)
        launched.process.send_signal(signal.SIGINT)
        expected = "gradsync: the ranks were killed by the second SIGINT, without time to finish\n"
        assert launched.ended() == (128 + signal.SIGKILL, expected)
        assert none_is_left(tmp_path)


@pytest.mark.program
def test_one_signal_is_enough_once_a_rank_has_failed(launch: Launch, tmp_path: Path) -> None:
    """The others are being stopped then; one that does not heed it need not be waited for."""
    code = 'note("started")\nif rank == 1:\n    time.sleep(0.5)\n    sys.exit(3)\ntime.sleep(100)\n'
    with launch(IGNORE + code, grace=100) as launched:
        first, second = (int((tmp_path / f"started-{rank}").read_text()) for rank in (0, 1))
        assert eventually(lambda: not is_running(second))
        time.sleep(0.5)
        assert is_running(first)
        launched.process.send_signal(signal.SIGINT)
        assert launched.ended() == (3, "gradsync: rank 1 failed with exit code 3; its own message is above\n")
        assert none_is_left(tmp_path)


@pytest.mark.program
def test_ranks_do_not_outlive_a_launcher_that_is_killed(launch: Launch, tmp_path: Path) -> None:
    with launch(IGNORE + WAIT) as launched:
        launched.process.send_signal(signal.SIGKILL)
        assert launched.ended() == (-signal.SIGKILL, "")
        assert none_is_left(tmp_path)


@pytest.mark.program
def test_more_ranks_than_cores_are_warned_of(
    module: Callable[[str], str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert usable_cores() == 1
    assert run_ranks_of(module(""), [str(tmp_path)], nproc=2) == 0
    assert capfd.readouterr().err.startswith("gradsync: warning: 2 ranks share 1 usable cores")
    assert run_ranks_of(module(""), [str(tmp_path)], nproc=1) == 0
    assert capfd.readouterr().err == ""


def test_a_rank_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not inside_a_launch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert inside_a_launch()
    with pytest.raises(ConfigurationError, match="a rank already"):
        run_ranks_of("a_module", [], nproc=2)


@pytest.mark.parametrize("nproc", [0, 10_001, 10**20])
def test_numbers_of_ranks_that_cannot_be_are_refused(nproc: int) -> None:
    with pytest.raises(ConfigurationError, match=f"--nproc must be at least 1 and at most 10,000, got {nproc}"):
        run_ranks_of("a_module", [], nproc=nproc)
    with pytest.raises(ConfigurationError, match="--max-restarts must be at least 0, got -1"):
        run_ranks_of("a_module", [], nproc=1, max_restarts=-1)


def test_more_ranks_than_there_may_be_open_files_are_refused() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = os.listdir("/proc/self/fd")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(opened) + 50, before[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"--nproc 1000 is more than .* \(ulimit -n\)"):
            run_ranks_of("a_module", [], nproc=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(os.listdir("/proc/self/fd")) == len(opened)
