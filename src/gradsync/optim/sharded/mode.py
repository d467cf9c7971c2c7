"""``mode="auto"``: whether to communicate behind the next forward or behind backward alone, as requested or by trial.

::

    windows    …  plain │ plain again   next-forward     plain │ whatever was faster, for good
                  ▲                     ▲                      ▲
                  the tuner's sizes     finer buckets          the verdict

Where backward hides all communication, the ``next-forward`` mode has nothing to gain, and its copies cost time. That
depends on the model, the link and the machine, so it is tried. Trials are interleaved because machine speed drifts.
Ranks negotiate before the first bucket of windows whose numbers all of them know, and decide by numbers that they have
agreed on. The optimizer's state moves at every change: whole on every rank where steps are plain, else in shares.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

from gradsync.communicator import Communicator
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.sizes import TUNED_AFTER
from gradsync.core.reduction import Reduction, ScatteredMean
from gradsync.core.reduction.auto import Changing, in_ms
from gradsync.core.reduction.measurement import TRIAL, StepWatch

__all__ = ["DECIDED_AFTER", "ChosenMode", "Mode"]

LOGGER = logging.getLogger("gradsync")

Mode = Literal["next-forward", "plain", "auto"]

# Bucket sizes have been chosen by then.
SETTLED_AFTER = TUNED_AFTER[-1] + 1
# Each trial ends after this many further windows: of plain steps, of the next forward, of plain steps again.
TRIALS = (TRIAL + 2, 2 * (TRIAL + 2), 3 * (TRIAL + 2))
DECIDED_AFTER = SETTLED_AFTER + TRIALS[-1]
# The minimum gain of the next-forward mode.
WORTH_KEEPING = 0.01


class ChosenMode(Changing):
    """Uses ``whole`` means in the first windows, then the ``scattered`` ones if they make steps faster.

    ``changed`` is called when one replaces the other, with True for shares: all ranks are there, and buckets are about
    to be rebuilt. ``chosen`` is the mode once that is decided, and ``report`` says why.
    """

    def __init__(
        self,
        whole: Reduction,
        scattered: ScatteredMean,
        changed: Callable[[bool], None],
        watch: StepWatch | None = None,
    ) -> None:
        self._whole, self._scattered, self._changed = whole, scattered, changed
        self.current = whole
        self.chosen: Mode | None = None
        self.report = ""
        self._watch = StepWatch() if watch is None else watch
        # The number of trials, including this one.
        self._windows = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}
        # Loaded state is applied when all ranks get there.
        self._loaded: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"ChosenMode({self._whole!r}, {self._scattered!r})"

    def reconsider(self, window: int, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        # Whatever follows, it completes what it has begun in the previous window.
        self.current.reconsider(window, buckets, communicator)
        if self._loaded is not None:
            return self._take_loaded()
        if self.chosen is not None or not buckets or window < SETTLED_AFTER:
            return False
        self._watch.window_began()
        self._windows += 1
        if self._windows not in TRIALS:
            return False
        self._times[self.scatters].append(self._watch.read(communicator)[0])
        return self._conclude(communicator) if self._windows == TRIALS[-1] else self._become(not self.scatters)

    def _become(self, scatters: bool) -> bool:
        if scatters == self.scatters:
            return False
        self.current = self._scattered if scatters else self._whole
        self._changed(scatters)
        return True

    def _conclude(self, communicator: Communicator) -> bool:
        behind, plain = statistics.mean(self._times[True]), statistics.mean(self._times[False])
        gains = behind <= plain * (1 - WORTH_KEEPING)
        self.chosen = "next-forward" if gains else "plain"
        words, mine, other = "communication overlaps the next forward", behind, plain
        if not gains:
            words, mine, other = "steps wait for the whole mean", plain, behind
        self.report = f"{words} from now on: {in_ms(mine)} per step instead of {in_ms(other)}"
        if communicator.rank == 0:
            # Nothing is wrong. But a user who left the choice to us wants to be told, without setting up logging.
            LOGGER.warning("mode auto: %s", self.report)
        return self._become(gains)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        # In the middle of trials: they start again.
        return {} if self.chosen is None else {"mode": self.chosen, "report": self.report}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = dict(state)

    def _take_loaded(self) -> bool:
        state, self._loaded = self._loaded or {}, None
        self._windows, self._times = 0, {True: [], False: []}
        self._watch.forget(began=True)
        self.chosen, self.report = state.get("mode"), state.get("report", "")
        return self._become(self.chosen == "next-forward")
