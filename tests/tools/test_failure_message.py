"""One root cause: the launcher shows the error of the rank that failed first, and a line for each other one."""

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradsync.errors import CommunicatorLostError
from gradsync.tools.cli.failure_message import (
    ExitStatement,
    ExitStatements,
    FailureReport,
    exit_statement_of,
    has_launcher,
    write_exit_statement,
)
from gradsync.tools.cli.launching import run_ranks_of
from gradsync.tools.launch import Failure, RankPlace

pytestmark = pytest.mark.timeout(120)

PLACES = [RankPlace(local=(rank, 3), master=("127.0.0.1", 1)) for rank in range(3)]


def failure(rank: int, code: int = 1, at: float = 0.0) -> Failure:
    return Failure(place=PLACES[rank], code=code, at=at)


def words(at: float, message: str = "no luck", *, kind: str = "ValueError", consequence: bool = False) -> ExitStatement:
    return ExitStatement(
        at=at, kind=kind, message=message, trace="" if consequence else "a\nb", is_consequence=consequence
    )


def test_the_first_to_raise_an_error_of_its_own_is_the_cause() -> None:
    lost = words(1.0, "rank 1 is gone", kind="CommunicatorLostError", consequence=True)
    failures = [failure(0, at=1.5), failure(1, at=2.5), failure(2, at=2.0)]
    report = FailureReport(early=failures[:1], failures=failures, records={0: lost, 1: words(2.0), 2: words(2.3)})
    assert report.first.place.rank == 1
    assert report.lines(PLACES) == [
        "rank 1 failed first:\na\nb",
        "rank 0 then raised CommunicatorLostError: rank 1 is gone",
        "rank 2 failed in the same way, 0.3 s later",
    ]


def test_an_error_is_shown_once_however_many_ranks_repeat_it() -> None:
    long = "ranks started different collectives: rank 0: all_gather of 4, rank 1: reduce_scatter of 4. Call step()"
    lost = words(2.0, f"rank 0 (process 3) raised MismatchError: {long} [at 12:00]", kind="CommunicatorLostError")
    failures = [failure(rank, at=1.5 + rank) for rank in range(2)]
    own = words(1.0, long, kind="MismatchError")
    report = FailureReport(
        early=failures[:1], failures=failures, records={0: own, 1: replace(lost, is_consequence=True)}
    )
    assert report.lines(PLACES[:2]) == [
        "rank 0 failed first:\na\nb",
        "rank 1 then raised CommunicatorLostError: rank 0 (process 3) raised MismatchError, as above",
    ]


def test_a_rank_that_was_killed_is_the_cause_of_what_others_say_of_it() -> None:
    lost = words(2.0, "rank 1 is gone", kind="CommunicatorLostError", consequence=True)
    failures = [failure(0, at=2.1), failure(1, -9, at=1.0), failure(2, -9, at=7.0)]
    report = FailureReport(early=failures[:2], failures=failures, records={0: lost})
    assert report.first.place.rank == 1
    assert report.lines(PLACES) == [
        "rank 0 then raised CommunicatorLostError: rank 1 is gone",
        "rank 2 was ended with the others",
    ]


def test_a_refusal_is_said_once() -> None:
    same = {
        rank: words(float(3 - rank), "no such file", kind="ConfigurationError", consequence=True) for rank in (0, 2)
    }
    failures = [failure(rank, 2) for rank in (0, 2)]
    assert FailureReport(early=failures, failures=failures, records=same).lines(PLACES) == ["no such file"]


def test_who_obeys_a_signal_is_blamed_last() -> None:
    failures = [failure(0, 130), failure(1, -9), failure(2, 130)]
    report = FailureReport(early=[], failures=failures, records={}, signals=[signal.SIGINT])
    assert report.first.place.rank == 1
    assert report.lines(PLACES) == []


def exits(code: int, at: float, *, consequence: bool = False) -> ExitStatement:
    message = f"called sys.exit({code}) in line 7 of train.py"
    return ExitStatement(at=at, kind="SystemExit", message=message, code=code, is_consequence=consequence)


def test_a_rank_that_is_ended_on_its_way_out_keeps_its_code() -> None:
    lost = words(1.1, "rank 1 called sys.exit(3)", kind="CommunicatorLostError", consequence=True)
    failures = [failure(0, at=1.5), failure(1, -15, at=2.0), failure(2, -15, at=2.0)]
    report = FailureReport(early=failures[:1], failures=failures, records={0: lost, 1: exits(3, 1.0)}, stopped_at=1.8)
    assert (report.first.place.rank, report.first.exit_code) == (1, 3)
    assert report.lines(PLACES) == [
        "rank 1 failed first: it called sys.exit(3) in line 7 of train.py",
        "rank 0 then raised CommunicatorLostError: rank 1 called sys.exit(3)",
        "rank 2 was ended with the others",
    ]


def test_a_rank_that_had_ended_with_0_has_not_failed_by_being_ended() -> None:
    failures = [failure(0, at=1.5), failure(1, -15, at=2.0)]
    report = FailureReport(
        early=failures[:1], failures=failures, records={0: words(1.0), 1: exits(0, 0.5)}, stopped_at=1.8
    )
    assert [each.place.rank for each in report.failed] == [0]
    assert report.lines(PLACES[:2])[-1] == "rank 1 had ended, without an error"
    # Ended by somebody else, before the launcher asked for it, it has.
    assert len(FailureReport(early=failures, failures=failures, records=report.records, stopped_at=1.8).failed) == 2


def test_who_finds_another_one_gone_has_not_failed_before_it() -> None:
    """Whenever the launcher has seen that one end, and whatever the error looks like."""
    after = replace(words(1.0), gone=(2,))
    failures = [failure(0, at=1.2), failure(2, -11, at=1.3)]
    assert FailureReport(early=failures, failures=failures, records={0: after}).first.place.rank == 2
    assert FailureReport(early=failures, failures=failures, records={0: words(1.0)}).first.place.rank == 0
    # One that the launcher has ended is gone, too.
    assert FailureReport(early=failures[:1], failures=failures, records={0: after}).first.place.rank == 0


def test_what_is_said_after_the_launcher_has_asked_ranks_to_end_is_no_cause() -> None:
    lost = words(1.0, "rank 2 has ended", kind="CommunicatorLostError", consequence=True)
    failures = [failure(0, at=1.2), failure(1, 7, at=2.1)]
    told = {0: lost, 1: exits(7, 2.0)}
    assert FailureReport(early=failures[:1], failures=failures, records=told, stopped_at=1.9).first.place.rank == 0
    assert FailureReport(early=failures[:1], failures=failures, records=told, stopped_at=2.1).first.place.rank == 1


def test_an_exit_with_2_is_no_refusal() -> None:
    failures = [failure(0, at=1.2), failure(1, 2, at=1.1)]
    told = {0: words(1.0), 1: exits(2, 1.1)}
    report = FailureReport(early=failures, failures=failures, records=told)
    assert report.first.place.rank == 0
    assert report.lines(PLACES[:2])[-1] == "rank 1 then called sys.exit(2) in line 7 of train.py"


def test_ranks_that_are_seen_to_end_at_once() -> None:
    """A lost rank makes others abort or exit, and kills nobody."""
    for killed, other in ((-9, 1), (-11, -6), (3, -6)):
        failures = [failure(0, other, at=1.0), failure(1, killed, at=1.0)]
        assert FailureReport(early=failures, failures=failures, records={}).first.place.rank == 1


def test_an_error_in_whose_handling_another_is_raised_is_its_cause() -> None:
    def raised_in(first: Exception, then: BaseException) -> ExitStatement:
        try:
            try:
                raise first
            finally:
                raise then
        except BaseException as error:
            return exit_statement_of(error, at=0.0)

    assert raised_in(CommunicatorLostError("rank 1 is gone"), SystemExit(5)).is_consequence
    assert raised_in(RuntimeError("[gloo] Connection closed by peer [::1]:80"), KeyError("x")).is_consequence
    assert not raised_in(KeyError("x"), ValueError("y")).is_consequence
    assert exit_statement_of(None, at=0.0).code == 0


def test_a_rank_says_who_was_gone_and_its_children_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStatements(3) as records:
        monkeypatch.setenv(*next(iter(records.variables(1).items())))
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        records.publish({0: os.getppid(), 1: os.getpid(), 2: child})
        assert records.read() == {}
        grandchild = os.fork()
        if not grandchild:
            os._exit(int(write_exit_statement(words(1.0))))
        assert os.waitpid(grandchild, 0)[1] == 0
        assert write_exit_statement(words(2.0))
        assert not write_exit_statement(words(3.0)), "it has spoken"
        assert records.read() == {1: replace(words(2.0), gone=(2,))}
        os.waitpid(child, 0)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"at": "soon"}', b'{"at": 1, "kind": "a"'])
def test_words_that_were_cut_off_are_none(data: bytes) -> None:
    assert ExitStatement.read(data) is None


def test_nobody_listens_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_launcher()
    with ExitStatements(1) as records:
        (name, number), *_ = records.variables(0).items()
        monkeypatch.setenv(name, number)
        assert has_launcher()
    # Under the number there may be anything, in a process that a rank has started.
    with open(os.devnull) as other:
        monkeypatch.setenv(name, str(other.fileno()))
        assert not has_launcher()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    def write(code: str) -> str:
        (tmp_path / "a_program.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
        return "a_program"

    return write


RAISE = """
    import os, pathlib, sys, time
    from gradsync.tools.cli.failure_message import report_exit
    from gradsync.errors import CommunicatorLostError

    rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])

    def mark(what):
        (folder / f"{what}-{rank}").touch()

    def wait_for(what, *ranks):
        while not all((folder / f"{what}-{each}").exists() for each in ranks):
            time.sleep(0.01)

    mark("began")
    try:
        if rank == 1:
            wait_for("began", 0, 2)
            raise ValueError("no luck on this one")
        wait_for("failed", 1)
        raise CommunicatorLostError(f"rank 1 is gone, says rank {rank}")
    except Exception as error:
        at = time.time()
        if rank == 1:
            # The others, which fail because of it, are seen to do so before.
            mark("failed")
            wait_for("told", 0, 2)
        report_exit(error, at=at, then=lambda error: mark("told"))
    """


@pytest.mark.program
def test_one_traceback_and_one_line_for_each_other_rank(
    module: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks_of(module(RAISE), [str(tmp_path)], nproc=3) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "usable cores" not in line]
    assert said[:2] == ["gradsync: rank 1 failed first:", "Traceback (most recent call last):"]
    assert said[-3:] == [
        "ValueError: no luck on this one",
        "gradsync: rank 0 then raised CommunicatorLostError: rank 1 is gone, says rank 0",
        "gradsync: rank 2 then raised CommunicatorLostError: rank 1 is gone, says rank 2",
    ]
    assert sum("Traceback" in line for line in said) == 1


@pytest.mark.program
def test_a_stopped_rank_is_woken_to_be_ended(module: Callable[[str], str], tmp_path: Path) -> None:
    """Or the launcher would wait for it to the end of its patience."""
    code = f"""
        import os, pathlib, signal, sys, time
        def finish(number, frame):
            pathlib.Path({str(tmp_path)!r}, "finished").touch()
            sys.exit(130)
        signal.signal(signal.SIGINT, finish)
        if os.environ["RANK"] == "0":
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(100)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
        """
    assert run_ranks_of(module(code), [], nproc=2) == 130
    assert (tmp_path / "finished").exists()
