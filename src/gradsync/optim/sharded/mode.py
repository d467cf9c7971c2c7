"""``mode="auto"``: whether to communicate behind the next forward or behind backward alone, as requested or by trial.

::

    windows    …  plain │ plain again   next-forward     plain │ whatever was faster, for good
                  ▲                     ▲                      ▲
                  the tuner's sizes     finer buckets          the verdict

Where backward hides all communication, the ``next-forward`` mode has nothing to gain, and its copies cost time. That
depends on the model, the link and the machine, so it is tried. The optimizer's state moves at every change: whole on
every rank where steps are plain, else in shares.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from gradsync.communicator import Communicator
from gradsync.core.bucket import Bucket
from gradsync.core.reduction import Reduction, ScatteredMean
from gradsync.core.reduction.auto import SIZES_CHOSEN_AFTER, ByTrial, in_ms
from gradsync.core.reduction.measurement import TRIAL

__all__ = ["DECIDED_AFTER", "ChosenMode", "Mode"]

Mode = Literal["next-forward", "plain", "auto"]

# Each trial ends after this many further windows: of plain steps, of the next forward, of plain steps again.
TRIALS = (TRIAL + 2, 2 * (TRIAL + 2), 3 * (TRIAL + 2))
DECIDED_AFTER = SIZES_CHOSEN_AFTER + TRIALS[-1]


class ChosenMode(ByTrial):
    """Uses ``whole`` means in the first windows, then the ``scattered`` ones if they make steps faster.

    ``changed`` is called when one replaces the other, with True for shares: all ranks are there, and buckets are about
    to be rebuilt.
    """

    def __init__(
        self,
        whole: Reduction,
        scattered: ScatteredMean,
        changed: Callable[[bool], None],
    ) -> None:
        super().__init__("mode", whole)
        self._scattered, self._changed = scattered, changed
        # The number of windows in all trials, including this one.
        self._windows = 0

    def __repr__(self) -> str:
        return f"ChosenMode({self._usual!r}, {self._scattered!r})"

    def reconsider(self, window: int, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        # Whatever follows, it completes what it has begun in the previous window.
        self.current.reconsider(window, buckets, communicator)
        if self._loaded is not None:
            self._take_loaded()
            self._windows = 0
            return self._become(self.chosen == "next-forward")
        if self.chosen is not None or not buckets or window < SIZES_CHOSEN_AFTER:
            return False
        self._watch.window_began()
        self._windows += 1
        if self._windows not in TRIALS:
            return False
        self._end_trial(communicator)
        return self._conclude(communicator) if self._windows == TRIALS[-1] else self._become(not self.scatters)

    def _become(self, scatters: bool) -> bool:
        if scatters == self.scatters:
            return False
        self.current = self._scattered if scatters else self._usual
        self._changed(scatters)
        return True

    def _conclude(self, communicator: Communicator) -> bool:
        gains, plain, behind = self._verdict()
        if gains:
            chosen, words, mine, other = "next-forward", "communication overlaps the next forward", behind, plain
        else:
            chosen, words, mine, other = "plain", "steps wait for the whole mean", plain, behind
        self._decide(chosen, f"{words} from now on: {in_ms(mine)} per step instead of {in_ms(other)}", communicator)
        return self._become(gains)
