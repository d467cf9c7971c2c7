"""What a training step was: its loss and tokens over all ranks, and where its time went on this one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.observe.timeline import StepTimes, Timeline

__all__ = ["GPU_STEPS_A_RECORD", "PHASES", "Heartbeat", "PhaseTimes", "Pulse", "StepRecord", "StepRecords"]

PHASES = ("data", "forward", "backward", "synchronization", "update")
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
    timeline: StepTimes | None


class PhaseTimes:
    """Times the phases of a loop. ``timeline`` tells how much of a backward was waiting for the wire.

    On a GPU the host runs ahead of the device, so phases are delimited by events on its stream and read later; on the
    CPU the clock is enough.
    """

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self.on_gpu = device.type == "cuda"
        self._timeline = timeline
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs in here is ``name``."""
        begin = self._now()
        try:
            yield
        finally:
            self._spans.append((name, begin, self._now()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> tuple[dict[str, float], StepTimes | None]:
        """Seconds by phase since the last call, and the last synchronization. On a GPU it waits for all of them."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, begin, end in self._spans:
            seconds[name] += self._between(begin, end)
        self._spans.clear()
        steps = self._timeline.take()
        seconds["synchronization"] = sum(step.exposed for step in steps)
        seconds["backward"] = max(0.0, seconds["backward"] - seconds["synchronization"])
        return seconds, steps[-1] if steps else None

    def _between(self, begin: Any, end: Any) -> float:
        if not self.on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


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
    times: tuple[dict[str, float], StepTimes | None] | None


class StepRecords:
    """Steps that have run, until the heartbeat says what they were over all ranks. Then ``tell`` hears of them."""

    def __init__(self, phases: PhaseTimes, tell: Callable[[StepRecord], None]) -> None:
        self._steps_a_record = GPU_STEPS_A_RECORD if phases.on_gpu else 1
        self._phases, self._tell = phases, tell
        self._began = time.perf_counter()
        self._waiting: list[_Ran] = []
        self._known: list[Pulse] = []

    def add(self, step: int, norm: torch.Tensor, rate: float, wall: float) -> None:
        """A step has run here. Where reading is free, times are read at once: they are this step's alone."""
        times = self._phases.take() if self._steps_a_record == 1 else None
        self._waiting.append(_Ran(step, norm, rate, wall, times))

    def learn(self, pulse: Pulse | None, *, everything: bool = False) -> None:
        """What the oldest step that waits was. A record is made of as many as belong together."""
        self._known += [] if pulse is None else [pulse]
        count = len(self._known)
        if not count or (count < self._steps_a_record and not everything):
            return
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        pulses, self._known = self._known, []
        ran, tokens, wall = taken[-1], sum(each.tokens for each in pulses), sum(each.wall for each in taken)
        seconds, timeline = ran.times or self._phases.take()
        record = StepRecord(
            step=ran.step,
            time=time.perf_counter() - self._began,
            loss=sum(each.loss * each.tokens for each in pulses) / tokens if tokens else float("nan"),
            tokens=tokens,
            tokens_per_second=tokens / wall if wall > 0 else 0.0,
            gradient_norm=float(ran.norm),
            learning_rate=ran.rate,
            seconds=seconds,
            timeline=timeline,
        )
        self._tell(record)
