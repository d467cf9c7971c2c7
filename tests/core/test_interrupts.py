"""An interrupt may come between any two lines of gradsync: no rank hangs, and no mean is mixed from two windows."""

import itertools
import linecache
import logging
import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import DistributedDataParallel, PeerFailedError
from gradsync.communicator.choose import choose_communicator
from gradsync.communicator.logs import log_errors
from gradsync.core.engine import backward_watch
from gradsync.core.engine.backward import BackwardEngine
from gradsync.core.engine.state import CollectiveSection, Phase
from gradsync.errors import CommunicatorLostError, GradsyncError
from tests.ranks import ThreadRanks, pool_of

SOURCE = os.path.dirname(gradsync.__file__)
INTERRUPTED = 3


class Interrupter:
    """Raises KeyboardInterrupt at the ``left``-th line that a thread runs in gradsync, as a signal handler would.

    Only where a signal handler can. That is not between a ``with`` block and its ``__exit__``; and around autograd's
    own call, or before synchronize() has entered its ``try``, it is as if backward() or synchronize() had not been
    called, or had returned.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self.place = ""
        self._last_lines: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        around = file == backward_watch.__file__ and backward_watch.current_task() == backward_watch.NO_TASK
        if not file.startswith(SOURCE) or around:
            return None
        return self._first if frame.f_code is BackwardEngine.synchronize.__code__ else self._line

    def _first(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and not self._leaves_a_with(frame):
            self.left -= 1
            if not self.left:
                self.place = f"{os.path.relpath(frame.f_code.co_filename, SOURCE)}:{frame.f_lineno}"
                self._last_lines.clear()
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line

    def _leaves_a_with(self, frame: FrameType) -> bool:
        """Its line is run a second time then, from further down."""
        last, self._last_lines[frame] = self._last_lines.get(frame, 0), frame.f_lineno
        is_with = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        return is_with and last > frame.f_lineno


class Training:
    """Windows of one rank, whose gradients are its number times that of the window. Rank 1 is interrupted in one."""

    def __init__(self, kind: str, interrupter: Interrupter) -> None:
        module = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3))).double()
        for layer in module:
            nn.init.eye_(layer.weight)
        self.model = DistributedDataParallel(module, bucket_cap_mb=2 * 2 * 8 / 2**20)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        self.rank = choose_communicator().rank
        self._kind, self._interrupter = kind, interrupter

    def _loss(self, number: int) -> torch.Tensor:
        return self.model(torch.ones(1, 2, dtype=torch.float64)).sum() * float((number + 1) * (self.rank + 1))

    def window(self, number: int) -> float:
        """Its mean, divided by its number."""
        self.optimizer.zero_grad()
        if self._kind != "plain":
            with self.model.no_sync():
                self._loss(number).backward()
        run = self.model.synchronizer.engine.synchronize if self._kind == "synchronize" else self._loss(number).backward
        if number == INTERRUPTED and self.rank == 1:
            sys.settrace(self._interrupter)
        try:
            run()
        finally:
            sys.settrace(None)
        self.optimizer.step()
        (mean, *others) = {float(element) for p in self.model.parameters() for element in p.grad.flatten()}
        assert not others
        return mean / (number + 1)


def interrupted(kind: str, line: int) -> tuple[list[str], bool]:
    """What became of the window with the interrupt and of two that followed, and whether there was such a line."""
    interrupter = Interrupter(line)
    training = Training(kind, interrupter)
    mean = [training.window(number) for number in range(INTERRUPTED)][-1]
    # A rank may be a step ahead of the other, which could not take its own any more when the communicator is aborted.
    choose_communicator().all_reduce(torch.zeros(1)).wait()
    outcomes = []
    for number in range(INTERRUPTED, INTERRUPTED + 3):
        try:
            right = training.window(number) == mean
            outcomes.append("right" if right else f"wrong after {interrupter.place}")
        except KeyboardInterrupt:
            outcomes.append("interrupted")
        except GradsyncError as error:
            outcomes.append(type(error).__name__)
    return outcomes, bool(interrupter.place)


def check(results: list[tuple[list[str], bool]]) -> str:
    """That nothing is wrong or half right; in a word, what was seen."""
    (first, _), (second, came) = results
    if not came:
        assert first == second == ["right"] * 3
        return "no such line"
    assert second[0] == "interrupted"
    assert first[0] in ("right", "PeerFailedError", "CommunicatorLostError")
    # Both go on, or both are told that they cannot.
    assert first[1:] == second[1:], (first, second)
    assert first[1:] in (["right"] * 2, ["CommunicatorLostError"] * 2)
    return first[1]


@pytest.mark.parametrize("every", [37, pytest.param(7, marks=pytest.mark.breadth)])
@pytest.mark.parametrize("kind", ["plain", "accumulate", "synchronize"])
def test_an_interrupt_at_any_line_leaves_ranks_that_go_on_or_are_told(kind: str, every: int) -> None:
    seen = Counter[str]()
    for line in itertools.count(1, every):
        outcome = check(ThreadRanks(2).run(interrupted, kind, line))
        seen[outcome] += 1
        if outcome == "no such line":
            break
    assert seen["right"] > 5
    assert seen["CommunicatorLostError"] > 5


@pytest.mark.program
@pytest.mark.parametrize("line", range(40, 1400, 97))
def test_an_interrupt_in_a_process(line: int) -> None:
    pool = pool_of(2)
    try:
        check(pool.run(interrupted, "plain", line))
    finally:
        # Its group may be lost.
        pool.close()


def begin_interrupted() -> tuple[str, str, Phase, float]:
    training = Training("synchronize", Interrupter(0))
    if training.rank == 1:

        def interrupt() -> None:
            del training.model.synchronizer.window.begin_synchronization
            raise KeyboardInterrupt

        training.model.synchronizer.window.begin_synchronization = interrupt  # type: ignore[method-assign]
    try:
        training.window(0)
        told = ""
    except (KeyboardInterrupt, GradsyncError) as error:
        told = type(error).__name__
    phase = training.model.synchronizer.engine.phase
    return told, phase.name, phase, training.window(1)


def test_an_interrupt_before_a_synchronization_has_begun_is_told() -> None:
    first, second = ThreadRanks(2).run(begin_interrupted)
    assert (first[0], second[0]) == ("PeerFailedError", "KeyboardInterrupt")
    assert first[1:] == second[1:]
    assert first[2] is Phase.BROKEN


def recover_everywhere() -> list[tuple[str, float]]:
    training = Training("plain", Interrupter(0))
    engine = training.model.synchronizer.engine
    seen = []
    for again in range(3):
        for _ in range(again):
            engine.recover()
        seen.append((engine.phase.name, training.window(0)))
    training.model.synchronizer.detach()
    engine.recover()
    assert engine.phase is Phase.DETACHED
    return seen


def test_recovering_is_possible_in_every_phase() -> None:
    for seen in ThreadRanks(2).run(recover_everywhere):
        assert [phase for phase, _ in seen] == ["IDLE", "BROKEN", "BROKEN"]
        assert len({mean for _, mean in seen}) == 1


def interrupted_alone(line: int) -> bool:
    interrupter = Interrupter(line)
    training = Training("plain", interrupter)
    training.rank = 1
    for number in range(INTERRUPTED):
        training.window(number)
    with pytest.raises(KeyboardInterrupt) if line else pytest.raises(GradsyncError):
        training.window(INTERRUPTED)
    return training.window(INTERRUPTED + 1) == training.window(INTERRUPTED + 2) == 2.0


def test_a_rank_without_peers_goes_on_after_any_interrupt() -> None:
    """As in a notebook, whose cell is stopped and run again."""
    for line in range(1, 900, 29):
        assert ThreadRanks(1).run(interrupted_alone, line) == [True]


def test_a_section_is_cut_short_by_interrupts_alone() -> None:
    section = CollectiveSection()
    with section, section:
        assert section.cut_short
    assert not section.cut_short
    with pytest.raises(ValueError, match="planted"), section:
        raise ValueError("planted")
    assert not section.cut_short
    with pytest.raises(KeyboardInterrupt), section, section:
        raise KeyboardInterrupt
    assert section.cut_short
    section.reset()
    assert not section.cut_short


def test_errors_on_a_failure_path_are_logged_and_bugs_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gradsync"):
        with log_errors("sending the rest failed"):
            raise CommunicatorLostError("rank 1 is gone")
        with log_errors("sending the rest failed"):
            raise TypeError("a bug")
    expected, bug = caplog.records
    assert (expected.levelno, expected.exc_info) == (logging.DEBUG, None)
    assert "rank 1 is gone" in expected.getMessage()
    assert bug.levelno == logging.ERROR
    assert bug.exc_info is not None
    assert isinstance(bug.exc_info[1], TypeError)
    with pytest.raises(KeyboardInterrupt), log_errors("it was interrupted"):
        raise KeyboardInterrupt


def fail_with_a_bug() -> str:
    training = Training("plain", Interrupter(0))
    training.window(0)
    pipeline = training.model.synchronizer.engine.pipeline
    receive = pipeline._wait

    def wait(*pending: Any) -> None:
        receive(*pending)
        raise TypeError("planted")

    def fail(_: torch.Tensor) -> None:
        pipeline._wait = wait  # type: ignore[method-assign]
        raise ZeroDivisionError

    if training.rank == 1:
        next(training.model.parameters()).register_hook(fail)
    with pytest.raises((ZeroDivisionError, PeerFailedError)) as caught:
        training.window(1)
    return type(caught.value).__name__


def test_a_bug_in_recovering_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    assert ThreadRanks(2).run(fail_with_a_bug) == ["PeerFailedError", "ZeroDivisionError"]
    assert any(record.exc_info and isinstance(record.exc_info[1], TypeError) for record in caplog.records)


def test_a_torch_without_the_entry_of_backward_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    backward_watch._say_unwatched.cache_clear()
    for _ in range(2):
        backward_watch.watch_failures()
    (record,) = caplog.records
    assert "_engine_run_backward" in record.getMessage()
