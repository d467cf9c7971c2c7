"""What a training step was: its loss and tokens over all ranks, and where its time went on this one."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.observe.recording import Recorder, Step

__all__ = ["PHASES", "StepRecord", "StepRecords"]

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


class _Ran(NamedTuple):
    """A step as this rank saw it."""

    step: int
    norm: torch.Tensor
    rate: float
    wall: float
    seconds: dict[str, float] | None


class StepRecords:
    """Records steps over all ranks: ``emit`` is called with each. Also tells all ranks of a signal to stop.

    Ranks exchange losses and signals in one small collective per step. It is read after the next step has been
    computed, so that no rank waits for it. All ranks read the same answer at the same step: a signal that reaches them
    at different times stops them together. Times are those of the recorder, which is read from here on.
    """

    def __init__(
        self, communicator: Communicator, recorder: Recorder, emit: Callable[[StepRecord], None], *, on_gpu: bool
    ) -> None:
        self._steps_a_record = GPU_STEPS_A_RECORD if on_gpu else 1
        self._communicator, self._recorder, self._emit = communicator, recorder, emit
        self._read_to = recorder.total
        self._began = time.perf_counter()
        self._sent: tuple[torch.Tensor, torch.Tensor, list[Handle]] | None = None
        self._waiting: list[_Ran] = []
        # Losses and tokens of steps that are known over all ranks and not recorded yet.
        self._known: list[tuple[float, int]] = []

    def send(self, loss_times_tokens: torch.Tensor | float, tokens: int, signal: int) -> int:
        """Send what a step was here. Returns the signal that the step before it was sent with on any rank, or 0."""
        answer = self._receive()
        device = self._communicator.device
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        numbers[0] = torch.as_tensor(loss_times_tokens, dtype=torch.float64).detach().to(device)
        numbers[1].fill_(tokens)
        flag = torch.full((1,), signal, dtype=torch.int32, device=device)
        handles = [self._communicator.all_reduce(numbers), self._communicator.all_reduce(flag, "max")]
        self._sent = (numbers, flag, handles)
        return answer

    def add(self, step: int, norm: torch.Tensor, rate: float, wall: float) -> None:
        """Add the step that was sent last. Where reading times is free, they are read at once, for this step alone."""
        seconds = self._seconds() if self._steps_a_record == 1 else None
        self._waiting.append(_Ran(step, norm, rate, wall, seconds))
        if len(self._known) >= self._steps_a_record:
            self._record()

    def flush(self) -> int:
        """Record everything that was sent. Returns the signal that the last step was sent with on any rank, or 0."""
        signal = self._receive()
        if self._known:
            self._record()
        return signal

    def _receive(self) -> int:
        """Wait for what was sent last, and learn what that step was over all ranks."""
        if self._sent is None:
            return 0
        (numbers, flag, handles), self._sent = self._sent, None
        for handle in handles:
            handle.wait()
        total, tokens = numbers.tolist()
        self._known.append((total / tokens if tokens else math.nan, int(tokens)))
        return int(flag.item())

    def _seconds(self) -> dict[str, float]:
        steps = self._recorder.steps_since(self._read_to)
        self._read_to = self._recorder.total
        return seconds_by_phase(steps)

    def _record(self) -> None:
        """Make a record of the oldest steps: as many as are known."""
        taken, self._waiting = self._waiting[: len(self._known)], self._waiting[len(self._known) :]
        known, self._known = self._known, []
        ran, tokens, wall = taken[-1], sum(count for _, count in known), sum(each.wall for each in taken)
        self._emit(
            StepRecord(
                step=ran.step,
                time=time.perf_counter() - self._began,
                loss=sum(loss * count for loss, count in known) / tokens if tokens else math.nan,
                tokens=tokens,
                tokens_per_second=tokens / wall if wall > 0 else 0.0,
                gradient_norm=float(ran.norm),
                learning_rate=ran.rate,
                seconds=self._seconds() if ran.seconds is None else ran.seconds,
            )
        )
