"""An error of one rank outside of backward: the others hear of it when it is raised, not when its process ends."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.base.files import from_json
from gradsync.errors import PeerFailedError
from gradsync.health.watch import exit_causes, set_up
from gradsync.health.watch.detector import RaisedError, Suspect
from gradsync.health.watch.messages import error_text, raised_error, suspect_text
from tests.health.test_watch import MEMBERS, hear_all, judge_of, stands
from tests.health.test_watch_ranks import Heard, Training, run_processes
from tests.ranks import RankPool

pytestmark = pytest.mark.timeout(120)

LINGERS = 3.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


# -- what is thought of it --------------------------------------------------------------------------------------------


def raised(started: int) -> RaisedError:
    return RaisedError(words="raised ValueError: no luck in its forward", at=0.0, status=stands(started))


def test_an_error_is_told_once_and_only_if_somebody_waits() -> None:
    detector = judge_of(stands(12), stands(12), stands(12))
    assert not detector.has_unreported_errors
    detector.add_error(1, raised(12))
    assert detector.has_unreported_errors
    assert detector.errors_to_report(100.0) == []
    detector.update(2, stands(12, waits=12, seconds=9.0), 100.0)
    assert detector.errors_to_report(100.0) == [], "that one it has started"
    detector.update(2, stands(13, waits=13), 100.0)
    ((member, error, wait),) = detector.errors_to_report(100.0)
    assert (member, wait.place) == (1, 13)
    said = raised_error(MEMBERS, member, error, wait)
    assert said.startswith("rank 1 (process 101 on here) raised ValueError: no luck in its forward [at ")
    assert "and others wait for it in collective 13 (all_reduce)" in said
    assert detector.errors_to_report(100.0) == []
    assert not detector.has_unreported_errors


def test_an_error_is_forgotten_when_the_rank_goes_on() -> None:
    detector = judge_of(stands(12), stands(12), stands(12))
    detector.add_error(1, raised(12))
    hear_all(detector, 106.0, stands(13, waits=13, seconds=6.0), stands(12), stands(12))
    (suspect, _) = detector.suspects(106.0)
    assert suspect.raised == "raised ValueError: no luck in its forward"
    assert "It raised ValueError: no luck in its forward, and has not gone on since" in suspect_text(
        MEMBERS, suspect, is_here=False
    )
    assert from_json(Suspect, json.loads(json.dumps(dataclasses.asdict(suspect)))) == suspect
    hear_all(detector, 107.0, stands(14, waits=14, seconds=6.0), stands(13), stands(14))
    assert [each.raised for each in detector.suspects(107.0)] == [""]


def test_an_error_says_what_it_is_in_a_line() -> None:
    assert error_text(ValueError("no luck"), "its forward") == "raised ValueError: no luck in its forward"
    assert error_text(KeyboardInterrupt()) == "raised KeyboardInterrupt"
    assert len(error_text(ValueError("x" * 10_000))) <= 300


# -- over real ranks --------------------------------------------------------------------------------------------------


class Luck(torch.nn.Module):
    """Has none when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("no luck")
        return x


def catch_and_go_on(where: str) -> tuple[str, list[str], float]:
    """Rank 1 catches its own error, takes its time, and does the step again."""
    heard, training = Heard(), Training("group")
    luck = Luck()
    training.model.module.append(luck)
    seconds = 0.0
    for number in range(6):
        if number == 3 and dist.get_rank() == 1:
            luck.fails = where == "forward"
            with contextlib.suppress(ValueError), ExitStack() as stack:
                if where == "block":
                    stack.enter_context(training.model.accumulate(last=False))
                    raise ValueError("no luck")
                training.model(torch.randn(4, 64))
            luck.fails = False
            began = time.monotonic()
            while time.monotonic() - began < 1.5:
                time.sleep(0.05)
        began = time.monotonic()
        training.step()
        seconds = max(seconds, time.monotonic() - began)
    return training.digest(), heard.lines, seconds


@pytest.mark.parametrize(("where", "told"), [("forward", "its forward"), ("block", "a block of accumulate()")])
def test_a_rank_that_catches_its_error_and_goes_on_is_warned_about_at_once(
    pool: RankPool, where: str, told: str
) -> None:
    (digest, first, seconds), *others = pool.run(catch_and_go_on, where)
    assert [each[0] for each in others] == [digest] * 2
    assert 1.0 < seconds < 5.0, "the others wait, and it is no error"
    (line,) = first
    assert f"raised ValueError: no luck in {told} [at " in line
    assert "It is an error when that process ends, or after 60 s, the timeout of the group" in line
    assert [each[1] for each in others] == [[], []], "one line, on one rank"


def end_slowly(rank: int, size: int, port: int, folder: str, how: str) -> None:
    """Rank 1 raises what nobody catches, and its process takes its time to end."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    training = Training("group")
    mark = Path(folder) / "raised"
    try:
        for number in range(1000):
            training.step()
            if number == 5 and rank == 1:
                if how == "thread":
                    threading.Thread(target=time.sleep, args=(LINGERS,)).start()
                mark.write_text(str(time.monotonic()))
                if how == "optimizer":
                    training.optimizer.param_groups[0]["lr"] = "no number"
                    training.step()
                raise ValueError("no luck")
    except PeerFailedError as error:
        (Path(folder) / f"rank-{rank}").write_text(json.dumps([time.monotonic(), str(error)]))


@pytest.mark.parametrize("how", ["thread", "optimizer"])
def test_an_uncaught_error_is_heard_before_the_process_has_ended(tmp_path: Path, how: str) -> None:
    ranks = run_processes(end_slowly, 3, str(tmp_path), how)
    at = float((tmp_path / "raised").read_text())
    for number in (0, 2):
        heard, said = json.loads((tmp_path / f"rank-{number}").read_text())
        assert heard - at < 1.0, said
        assert f"rank 1 (process {ranks[1].pid} on " in said
        assert "raised ValueError: no luck" in said if how == "thread" else "raised TypeError" in said


# -- the hooks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was called, with hooks of the process as they would be in one that has none yet."""
    called: list[Any] = []
    monkeypatch.setattr(exit_causes, "_is_installed", False)
    monkeypatch.setattr(sys, "excepthook", lambda *args: called.append(("before", args[0])))
    monkeypatch.setattr(threading, "excepthook", lambda args: called.append(("before in thread", args.exc_type)))
    return called


def test_whoever_had_a_hook_is_called_as_before(hooks: list[Any]) -> None:
    def in_main(error: BaseException) -> None:
        hooks.append(("main", type(error)))
        raise RuntimeError("whatever goes wrong here")

    exit_causes.report_uncaught(in_main, lambda error, _: hooks.append(("thread", type(error))))
    exit_causes.report_uncaught(in_main, lambda error, _: hooks.append(("twice", type(error))))
    with contextlib.suppress(RuntimeError):
        sys.excepthook(ValueError, ValueError(), None)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert hooks == [
        ("main", ValueError),
        ("before", ValueError),
        ("thread", ZeroDivisionError),
        ("before in thread", ZeroDivisionError),
    ]


class _Model:
    def __init__(self, thread: int | None) -> None:
        self.thread = thread


class _Post:
    def __init__(self, thread: int | None) -> None:
        self.sampler = self
        self.models = [_Model(thread)]
        self.said: list[str] = []

    def leave(self, words: str) -> None:
        self.said.append(f"goodbye: {words}")

    def report_error(self, words: str) -> None:
        self.said.append(words)


def test_only_a_process_that_ends_says_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a prompt, or where another thread trains, the process goes on."""

    def told(trained_by: int | None, raise_in: Any) -> list[str]:
        agent = _Post(trained_by)
        monkeypatch.setattr(set_up, "agents", lambda: [agent])
        raise_in(ValueError("no luck"))
        return agent.said

    here = threading.get_ident()
    assert told(here, set_up._script_raised) == ["goodbye: raised ValueError: no luck"]
    assert told(None, set_up._script_raised) == ["goodbye: raised ValueError: no luck"]
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        assert told(other.ident, set_up._script_raised) == []
        assert told(other.ident, lambda error: set_up._thread_raised(error, other.ident or 0)) == [
            "raised ValueError: no luck"
        ]
        assert told(here, lambda error: set_up._thread_raised(error, other.ident or 0)) == []
    finally:
        ended.set()
        other.join()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert told(here, set_up._script_raised) == ["raised ValueError: no luck"]
