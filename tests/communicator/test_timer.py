"""The alarm that wakes the thread of collectives: goes off when set, not when called off, leaves nothing open."""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradsync.communicator.background import Background
from gradsync.communicator.timer import KernelTimer, SleepingTimer, Timer

pytestmark = pytest.mark.timeout(30)

both = pytest.mark.parametrize("make", [KernelTimer, SleepingTimer])


def rings_within(alarm: Timer, seconds: float) -> bool:
    """Whether somebody who waits for the alarm hears it. Hears it late, at the end, in any case."""
    heard = threading.Event()
    waiting = threading.Thread(target=lambda: (alarm.wait(), heard.set()))
    waiting.start()
    rang = heard.wait(seconds)
    if not rang:
        alarm.set(0.0)
    waiting.join()
    return rang


@both
@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_it_goes_off(make: Callable[[], Timer], seconds: float) -> None:
    alarm = make()
    began = time.monotonic()
    alarm.set(seconds)
    assert rings_within(alarm, 10)
    assert time.monotonic() - began >= seconds


@both
def test_it_goes_off_again_and_again(make: Callable[[], Timer]) -> None:
    alarm = make()
    for _ in range(3):
        alarm.set(0.001)
        assert rings_within(alarm, 10)


def test_called_off_it_does_not() -> None:
    alarm = KernelTimer()
    alarm.set(0.05)
    alarm.cancel()
    assert not rings_within(alarm, 0.3)


def test_it_closes_what_it_opened() -> None:
    def count_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()
    before = count_open()
    for _ in range(3):
        background = Background("a test")
        background.start(lambda: None).wait()
        background.close()
        del background
    gc.collect()
    # Others in this process may have closed theirs meanwhile.
    assert count_open() <= before


def test_what_is_left_behind_a_wait_runs_by_itself() -> None:
    """Whoever waits calls the alarm off; what was started after it must not be forgotten."""
    background = Background("a test")
    ran = threading.Event()
    first = background.start(lambda: None)
    background.start(ran.set)
    first.wait()
    assert ran.wait(10)
    background.close()


def test_who_waits_does_not_call_off_the_end() -> None:
    background = Background("a test")
    handles = [background.start(lambda: None, lazy=True) for _ in range(200)]
    background._queue.close()
    for handle in handles:
        handle.wait()
    assert background._thread is not None
    background._thread.join(10)
    assert not background._thread.is_alive()


def test_the_thread_of_a_collective_records_no_gradients_and_keeps_the_setting() -> None:
    background = Background("a test")
    seen: list[tuple[int, bool]] = []

    def look() -> None:
        seen.append((threading.get_ident(), torch.is_grad_enabled()))

    done = threading.Event()
    background.start(lambda: (look(), done.set()))
    assert done.wait(10)
    background.start(look, lazy=True).wait()
    assert [recorded for _, recorded in seen] == [False, False]
    assert seen[0][0] != seen[1][0] == threading.get_ident()
    assert torch.is_grad_enabled()
    background.close()


def test_there_is_one_descriptor_and_programs_do_not_inherit_it() -> None:
    alarm = KernelTimer()
    assert not os.get_inheritable(alarm._descriptor)
