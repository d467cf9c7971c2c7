"""One root cause: the launcher shows the error of the rank that failed first, and a line for each other one."""

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsync.cli.last_words import Inquest, LastWords, Statements, is_heard
from gradsync.cli.launching import run_ranks_of
from gradsync.launch import Failure, RankPlace

pytestmark = pytest.mark.timeout(120)

PLACES = [RankPlace(local=(rank, 3), master=("127.0.0.1", 1)) for rank in range(3)]


def failure(rank: int, code: int = 1, at: float = 0.0) -> Failure:
    return Failure(place=PLACES[rank], code=code, at=at)


def words(at: float, message: str = "no luck", *, kind: str = "ValueError", consequence: bool = False) -> LastWords:
    return LastWords(at=at, kind=kind, message=message, trace="" if consequence else "a\nb", is_consequence=consequence)


def test_the_first_to_raise_an_error_of_its_own_is_the_cause() -> None:
    lost = words(1.0, "rank 1 is gone", kind="WireLostError", consequence=True)
    failures = [failure(0, at=1.5), failure(1, at=2.5), failure(2, at=2.0)]
    inquest = Inquest(early=failures[:1], failures=failures, words={0: lost, 1: words(2.0), 2: words(2.3)})
    assert inquest.first.place.rank == 1
    assert inquest.lines(PLACES) == [
        "rank 1 failed first:\na\nb",
        "rank 0 then raised WireLostError: rank 1 is gone",
        "rank 2 failed in the same way, 0.3 s later",
    ]


def test_a_rank_that_was_killed_is_the_cause_of_what_others_say_of_it() -> None:
    lost = words(2.0, "rank 1 is gone", kind="WireLostError", consequence=True)
    failures = [failure(0, at=2.1), failure(1, -9, at=1.0), failure(2, -9, at=7.0)]
    inquest = Inquest(early=failures[:2], failures=failures, words={0: lost})
    assert inquest.first.place.rank == 1
    assert inquest.lines(PLACES) == [
        "rank 0 then raised WireLostError: rank 1 is gone",
        "rank 2 was ended with the others",
    ]


def test_a_refusal_is_said_once() -> None:
    same = {
        rank: words(float(3 - rank), "no such file", kind="ConfigurationError", consequence=True) for rank in (0, 2)
    }
    failures = [failure(rank, 2) for rank in (0, 2)]
    assert Inquest(early=failures, failures=failures, words=same).lines(PLACES) == ["no such file"]


def test_who_obeys_a_signal_is_blamed_last() -> None:
    failures = [failure(0, 130), failure(1, -9), failure(2, 130)]
    inquest = Inquest(early=[], failures=failures, words={}, signals=[signal.SIGINT])
    assert inquest.first.place.rank == 1
    assert inquest.lines(PLACES) == []


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"at": "soon"}', b'{"at": 1, "kind": "a"'])
def test_words_that_were_cut_off_are_none(data: bytes) -> None:
    assert LastWords.read(data) is None


def test_nobody_listens_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_heard()
    with Statements(1) as statements:
        (name, number), *_ = statements.variables(0).items()
        monkeypatch.setenv(name, number)
        assert is_heard()
    # Under the number there may be anything, in a process that a rank has started.
    with open(os.devnull) as other:
        monkeypatch.setenv(name, str(other.fileno()))
        assert not is_heard()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    def write(code: str) -> str:
        (tmp_path / "a_program.py").write_text(textwrap.dedent(code))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
        return "a_program"

    return write


RAISE = """
    import os, pathlib, sys, time
    from gradsync.cli.last_words import leave_last_words
    from gradsync.errors import WireLostError

    rank, failed = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
    try:
        if rank == 1:
            failed.touch()
            raise ValueError("no luck on this one")
        while not failed.exists():
            time.sleep(0.01)
        raise WireLostError(f"rank 1 is gone, says rank {rank}")
    except Exception as error:
        at = time.time()
        # The others, which fail because of it, may be seen to do so before.
        time.sleep(0.2 if rank == 1 else 0.0)
        leave_last_words(error, at=at)
    """


@pytest.mark.program
def test_one_traceback_and_one_line_for_each_other_rank(
    module: Callable[[str], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks_of(module(RAISE), [str(tmp_path / "failed")], nproc=3) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "usable cores" not in line]
    assert said[:2] == ["gradsync: rank 1 failed first:", "Traceback (most recent call last):"]
    assert said[-3:] == [
        "ValueError: no luck on this one",
        "gradsync: rank 0 then raised WireLostError: rank 1 is gone, says rank 0",
        "gradsync: rank 2 then raised WireLostError: rank 1 is gone, says rank 2",
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
