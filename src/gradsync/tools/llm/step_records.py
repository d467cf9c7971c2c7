"""What a training step was: its loss and tokens over all ranks, and where its time went on this one."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.observe.recording import Recorder, Step

__all__ = ["PHASES", "Heartbeat", "Pulse", "StepRecord", "StepRecords"]

# By the names of recorded spans. What remains is the loop's own code.
PHASE_OF = {
    **{"data": "data", "forward": "forward", "gather": "forward", "backward": "backward"},
    **{"synchronization": "synchronization", "optimizer": "update", "other": "update"},
}
PHASES = tuple(dict.fromkeys(PHASE_OF.values()))
# On a GPU the device must be waited for to read times and losses, so several steps are read at once.
GPU_STEPS_A_RECORD = 10


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step, or several that are read together, over all ranks."""

    step: int
    time: float
    loss: float
    tokens: int
    tokens_per_second: float
    gradient_norm: float
    learning_rate: float
    seconds: dict[str, float]


def seconds_by_phase(steps: Iterable[Step]) -> dict[str, float]:
    """What recorded steps have spent on each phase of the loop.

    What is ``other`` is part of the update, as clipping is, but for what precedes the first forward: a validation.
    """
    seconds = dict.fromkeys(PHASES, 0.0)
    for step in steps:
        computes = False
        for span in step.spans:
            computes = computes or span.name == "forward"
            phase = PHASE_OF.get(span.name)
            if phase is not None and (computes or span.name != "other"):
                seconds[phase] += span.seconds
    return seconds


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """A step, over all ranks. ``signal`` is the number of the signal that asks to stop, or 0."""

    loss: float
    tokens: int
    signal: int


class Heartbeat:
    """What ranks exchange once per step: the loss, and whether any of them was asked to stop.

    It is one small collective per step, read after the next step has been computed, so that no rank waits for it. All
    ranks read the same answer at the same step: a signal that reaches them at different times stops them together.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent: tuple[torch.Tensor, torch.Tensor, list[Handle]] | None = None

    def beat(self, loss_times_tokens: torch.Tensor | float, tokens: int, signal: int) -> Pulse | None:
        """Send a step; returns the step before it."""
        previous = self.read()
        device = self._communicator.device
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        numbers[0] = torch.as_tensor(loss_times_tokens, dtype=torch.float64).detach().to(device)
        numbers[1].fill_(tokens)
        flag = torch.full((1,), signal, dtype=torch.int32, device=device)
        handles = [self._communicator.all_reduce(numbers), self._communicator.all_reduce(flag, "max")]
        self._sent = (numbers, flag, handles)
        return previous

    def read(self) -> Pulse | None:
        """The step that was sent last and not yet read. Waits for it."""
        if self._sent is None:
            return None
        (numbers, flag, handles), self._sent = self._sent, None
        for handle in handles:
            handle.wait()
        total, tokens = numbers.tolist()
        loss = total / tokens if tokens else float("nan")
        return Pulse(loss=loss, tokens=int(tokens), signal=int(flag.item()))


class _Ran(NamedTuple):
    """A step as this rank saw it."""

    step: int
    norm: torch.Tensor
    rate: float
    wall: float
    seconds: dict[str, float] | None


class StepRecords:
    """Steps that have run, until the heartbeat says what they were over all ranks: then ``emit`` is called.

    Times are those of the recorder, which is read from here on.
    """

    def __init__(self, recorder: Recorder, emit: Callable[[StepRecord], None], *, on_gpu: bool) -> None:
        self._steps_a_record = GPU_STEPS_A_RECORD if on_gpu else 1
        self._recorder, self._emit = recorder, emit
        self._read_to = recorder.total
        self._began = time.perf_counter()
        self._waiting: list[_Ran] = []
        self._known: list[Pulse] = []

    def _seconds(self) -> dict[str, float]:
        steps = self._recorder.steps_since(self._read_to)
        self._read_to = self._recorder.total
        return seconds_by_phase(steps)

    def add(self, step: int, norm: torch.Tensor, rate: float, wall: float) -> None:
        """A step has run here. Where reading is free, times are read at once: they are this step's alone."""
        seconds = self._seconds() if self._steps_a_record == 1 else None
        self._waiting.append(_Ran(step, norm, rate, wall, seconds))

    def learn(self, pulse: Pulse | None, *, everything: bool = False) -> None:
        """What the oldest step that waits was. A record is made of as many as belong together."""
        self._known += [] if pulse is None else [pulse]
        count = len(self._known)
        if not count or (count < self._steps_a_record and not everything):
            return
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        pulses, self._known = self._known, []
        ran, tokens, wall = taken[-1], sum(each.tokens for each in pulses), sum(each.wall for each in taken)
        self._emit(
            StepRecord(
                step=ran.step,
                time=time.perf_counter() - self._began,
                loss=sum(each.loss * each.tokens for each in pulses) / tokens if tokens else float("nan"),
                tokens=tokens,
                tokens_per_second=tokens / wall if wall > 0 else 0.0,
                gradient_norm=float(ran.norm),
                learning_rate=ran.rate,
                seconds=self._seconds() if ran.seconds is None else ran.seconds,
            )
        )
