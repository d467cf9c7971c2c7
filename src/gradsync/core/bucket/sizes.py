"""Bucket sizes: a cost model estimates the best one, and a tuner tries others in the first windows.

Reducing S bytes in buckets of b bytes costs about ``S/b · latency`` for starting them and, after backward has ended,
``b / bandwidth`` for the last one, which nothing hides. The sum is smallest at ``b = sqrt(S · latency · bandwidth)``.

This holds where the transport needs no cores. Where ranks use all cores of a machine and communicate through its
memory, moving bytes takes time from the cores that compute. Overlap then gains nothing, and only the number of buckets
counts. ``hidden`` is the share of a transfer during which the cores are free.

The cost model estimates from a few all-reduces on an idle link (:mod:`gradsync.core.reduction.measurement`). It knows
neither when gradients become ready nor how well a link carries several buckets at once. So the tuner tries that
estimate, then all gradients in one bucket, in two, four, eight, …, for a few windows each. It measures the time from
the start of a synchronizing backward to its end, on the rank that began last: the others have only waited for it. When
two finer sizes in a row are worse, it stops. The two best are tried once more, since a few windows may have been lucky.
The tuner takes the better one and is done for the rest of the training run.

A trial begins and ends at a window's boundary, after numbers of windows that all ranks know. There they share their
times and reach the same conclusion.

On a CUDA device the clock is the device's: events on its timeline, which are read where ranks negotiate. The host runs
ahead of the device, so its own clock would say nothing.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradsync.core.bucket.layout import BucketCaps

__all__ = ["TUNED_AFTER", "BucketTuner", "LinkCost", "auto_caps"]

MIN_BUCKET_BYTES = 256 * 1024
MAX_BUCKET_BYTES = 64 * 1024 * 1024
MIN_HIDDEN = 0.02
WORTH_OVERLAPPING = 0.5

# The engine's own work for a bucket (gathering, starting, finishing) is latency too.
HOST_SECONDS_PER_BUCKET = 100e-6


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The cost of an all-reduce: of n bytes, ``latency + n · seconds_per_byte``; compute can hide a share of it."""

    latency: float
    seconds_per_byte: float
    hidden: float = 1.0

    @property
    def overlaps(self) -> bool:
        """Whether reducing buckets during backward gains anything."""
        return self.hidden >= WORTH_OVERLAPPING

    def best_bucket_bytes(self, total_bytes: int) -> int:
        latency = self.latency + HOST_SECONDS_PER_BUCKET
        best = math.sqrt(max(total_bytes, 1) * latency / (self.seconds_per_byte * self.hidden))
        return int(min(max(best, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))


def auto_caps(cost: LinkCost, total_bytes: int) -> BucketCaps:
    """The caps by the cost model: the best size, with smaller buckets at the end, where nothing hides them."""
    best = cost.best_bucket_bytes(total_bytes)
    if not cost.overlaps:
        return BucketCaps.uniform(best)
    return BucketCaps.tapered(best, least=MIN_BUCKET_BYTES // 4)


PARTS = (1, 2, 4, 8, 16)
# Windows per trial; the first one is not counted, since its memory is new.
WINDOWS = 4
# By then the order has been learned and found stable.
FIRST_TRIAL_AFTER = 4
FINALISTS = 2
# Ranks negotiate after this many windows: after the trials of the estimate, of each number of parts, of the finalists.
TUNED_AFTER = tuple(FIRST_TRIAL_AFTER + WINDOWS * number for number in range(1, len(PARTS) + FINALISTS + 2))
SMALLEST_BUCKET = 32 * 1024
# A smaller gain is noise, and not worth a new layout.
WORTH_CHANGING = 0.02
WORSE_IN_A_ROW = 2


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """The caps tried, and the time per window in each of their trials.

    The time is the minimum of its windows, because anything else that runs on the machine only adds to it.
    """

    caps: BucketCaps
    times: list[float]

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


class BucketTuner:
    """An engine observer that proposes bucket sizes.

    ``clock`` marks a moment; ``seconds`` is the time between two moments.
    """

    def __init__(
        self,
        clock: Callable[[], Any] = time.perf_counter,
        seconds: Callable[[Any, Any], float] = lambda began, ended: ended - began,
    ) -> None:
        self._clock, self._seconds = clock, seconds
        self.rounds = 0
        # The least number of buckets wanted by what follows a synchronization, which is not timed here. It counts only
        # on asynchronous transports: elsewhere a bucket only costs.
        self.fewest, self._total = 1, 0
        self._trials: list[_Trial] = []
        # The sizes still to be tried again; None as long as there are new sizes to try.
        self._finalists: list[BucketCaps] | None = None
        # When each window of the trial began and when it had ended; None without a backward.
        self._windows: list[tuple[Any, Any] | None] = []
        self._began: Any = None

    @property
    def finished(self) -> bool:
        return self.rounds == len(TUNED_AFTER)

    def backward_began(self, *, synchronizes: bool) -> None:
        self._began = self._clock()

    def synchronization_finished(self) -> None:
        # A rank without a backward in this window has waited for the others, which says nothing.
        self._windows.append(None if self._began is None else (self._began, self._clock()))
        self._began = None

    def due(self, windows: int) -> bool:
        """Whether ranks negotiate after this many windows: the same answer on all ranks."""
        return not self.finished and windows == TUNED_AFTER[self.rounds]

    @property
    def times(self) -> list[float]:
        """How long this rank took for each window of the trial."""
        measured = [float("inf") if window is None else self._seconds(*window) for window in self._windows]
        return ([float("inf")] * WINDOWS + measured)[-(WINDOWS - 1) :]

    def propose(self, times: list[float], caps: BucketCaps, sizes: Callable[[BucketCaps], list[int]]) -> BucketCaps:
        """End the trial of ``caps``, whose windows took at least these ``times`` on all ranks; returns the next caps.

        ``sizes`` maps caps to bucket sizes.
        """
        self.rounds += 1
        self._note(caps, times)
        self._windows.clear()
        following = self._next_caps(sizes)
        if following is None or self.finished:
            self.rounds = len(TUNED_AFTER)
            return self._best().caps
        return following

    def _note(self, caps: BucketCaps, times: list[float]) -> None:
        for trial in self._trials:
            if trial.caps == caps:
                trial.times.append(min(times))
                return
        self._trials.append(_Trial(caps=caps, times=[min(times)]))

    def _next_caps(self, sizes: Callable[[BucketCaps], list[int]]) -> BucketCaps | None:
        """The caps to try next: other sizes, then the finalists once more, then nothing."""
        if self._finalists is None:
            other = None if self._got_worse() else self._finer_caps(sizes)
            if other is not None:
                return other
            ranked = sorted(self._eligible, key=lambda trial: trial.seconds)
            self._finalists = [trial.caps for trial in ranked[:FINALISTS]] if len(ranked) > 1 else []
        return self._finalists.pop() if self._finalists else None

    @property
    def _eligible(self) -> list[_Trial]:
        """The trials of at least ``fewest`` buckets; all trials, if there is none."""
        if self.fewest == 1 or not self._trials[0].caps.from_the_end:
            return self._trials
        return [trial for trial in self._trials if max(trial.caps.caps) <= self._total // self.fewest] or self._trials

    def _best(self) -> _Trial:
        best, *others = self._eligible
        for trial in others:
            if trial.seconds < best.seconds * (1 - WORTH_CHANGING):
                best = trial
        return best

    def _got_worse(self) -> bool:
        """Whether the last trials of ever finer buckets, the estimate aside, were all worse than an earlier one."""
        finer = [trial.seconds for trial in self._trials[1:]]
        return len(finer) > WORSE_IN_A_ROW and min(finer) < min(finer[-WORSE_IN_A_ROW:])

    def _finer_caps(self, sizes: Callable[[BucketCaps], list[int]]) -> BucketCaps | None:
        """Caps finer than in all trials but the estimate, if any make buckets that were not tried yet."""
        guess = self._trials[0].caps
        total = self._total = sum(sizes(guess))
        tried = [sizes(trial.caps) for trial in self._trials]
        finest = min((max(trial.caps.caps) for trial in self._trials[1:]), default=total + 1)
        fewest = self.fewest if guess.from_the_end else 1
        for part in PARTS:
            cap = total // part
            if part >= fewest and SMALLEST_BUCKET <= cap < finest:
                # On an asynchronous transport, the last bucket is what counts at the end.
                tapers = guess.from_the_end and part > 1
                candidate = BucketCaps.tapered(cap, least=SMALLEST_BUCKET) if tapers else BucketCaps.uniform(cap)
                if sizes(candidate) not in tried:
                    return candidate
        return None
