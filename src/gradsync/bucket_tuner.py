"""Bucket sizes by trial, in the first windows of a training.

The cost model guesses from a few all-reduces on an idle wire; see :mod:`gradsync.cost_model`. It knows neither when
gradients become ready nor how well a wire carries several buckets at once. So the tuner tries: its guess, then all
gradients in one bucket, in two, four, eight, …, for a few windows each. What counts is the time from the begin of a
synchronizing backward to its end, on the rank that began last: the others have only waited for it. When two finer
sizes in a row are worse, it stops, takes the best, and is done for the rest of the training.

A trial begins and ends at a window's boundary, after numbers of windows that all ranks know. There they share their
times and come to the same conclusion.

On accelerators the host does not see when buckets travel, and the sizes of the cost model stay.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradsync.bucket import Bucket
from gradsync.bucket_layout import BucketCaps
from gradsync.communicator import Communicator, Handle

__all__ = ["TUNED_AFTER", "BucketTuner"]

PARTS = (1, 2, 4, 8, 16)
# Windows of a trial; the first one is not counted, since its memory is new.
WINDOWS = 4
# Order is learned before, and has been seen to be stable.
FIRST_TRIAL_AFTER = 4
# After so many windows the ranks meet: at the end of the trial of the guess, and of each of the parts.
TUNED_AFTER = tuple(FIRST_TRIAL_AFTER + WINDOWS * number for number in range(1, len(PARTS) + 2))
SMALLEST_BUCKET = 32 * 1024
# Less is noise, and not worth another layout.
WORTH_CHANGING = 0.02
WORSE_IN_A_ROW = 2


@dataclass(frozen=True, kw_only=True)
class _Trial:
    caps: BucketCaps
    seconds: float


class BucketTuner:
    """An observer of the engine that proposes bucket sizes."""

    def __init__(self) -> None:
        self.rounds = 0
        self._trials: list[_Trial] = []
        self._times: list[float] = []
        self._began: float | None = None

    @property
    def finished(self) -> bool:
        return self.rounds == len(TUNED_AFTER)

    # -- watching --------------------------------------------------------------------------------------------------

    def backward_began(self, *, synchronizes: bool) -> None:
        self._began = time.perf_counter()

    def bucket_ready(self, bucket: Bucket) -> None:
        pass

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        pass

    def backward_ended(self) -> None:
        pass

    def bucket_finished(self, bucket: Bucket) -> None:
        pass

    def synchronization_finished(self) -> None:
        # A rank without a backward in this window has waited for the others, which says nothing.
        self._times.append(float("inf") if self._began is None else time.perf_counter() - self._began)
        self._began = None

    # -- proposing -------------------------------------------------------------------------------------------------

    def due(self, windows: int) -> bool:
        """Whether ranks meet after this many windows: the same answer on all ranks."""
        return not self.finished and windows == TUNED_AFTER[self.rounds]

    def propose(
        self, communicator: Communicator, caps: BucketCaps, sizes: Callable[[BucketCaps], list[int]]
    ) -> BucketCaps:
        """End the trial of ``caps``: what to go on with. ``sizes`` tells which buckets caps would make. Collective."""
        self.rounds += 1
        self._trials.append(_Trial(caps=caps, seconds=self._shared_seconds(communicator)))
        self._times.clear()
        following = None if self._grows_worse() else self._next(sizes)
        if following is None:
            self.rounds = len(TUNED_AFTER)
            return self._best().caps
        return following

    def _shared_seconds(self, communicator: Communicator) -> float:
        """The median over windows of the shortest time of any rank in each."""
        times = ([float("inf")] * WINDOWS + self._times)[-(WINDOWS - 1) :]
        message = torch.tensor([-seconds for seconds in times], dtype=torch.float64, device=communicator.device)
        communicator.all_reduce(message, "max").wait()
        seconds: list[float] = message.tolist()
        return -statistics.median(seconds)

    def _best(self) -> _Trial:
        best = self._trials[0]
        for trial in self._trials[1:]:
            if trial.seconds < best.seconds * (1 - WORTH_CHANGING):
                best = trial
        return best

    def _grows_worse(self) -> bool:
        """Whether the last trials of finer and finer buckets, the guess aside, were all worse than an earlier one."""
        finer = [trial.seconds for trial in self._trials[1:]]
        return len(finer) > WORSE_IN_A_ROW and min(finer) < min(finer[-WORSE_IN_A_ROW:])

    def _next(self, sizes: Callable[[BucketCaps], list[int]]) -> BucketCaps | None:
        """Finer buckets than in all trials but the guess, if there are any that make other buckets than one tried."""
        total = sum(sizes(self._trials[0].caps))
        tried = [sizes(trial.caps) for trial in self._trials]
        finest = min((trial.caps.caps[0] for trial in self._trials[1:]), default=total + 1)
        for part in PARTS:
            cap = total // part
            if SMALLEST_BUCKET <= cap < finest:
                candidate = BucketCaps.uniform(cap)
                if sizes(candidate) not in tried:
                    return candidate
        return None
