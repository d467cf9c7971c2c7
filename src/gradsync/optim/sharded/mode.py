"""Whether the wire works behind the next forward, or behind backward alone: as it was asked for, or by trial.

::

    windows    …  plain │ plain again   next-forward     plain │ whatever was faster, for good
                  ▲                     ▲                      ▲
                  the tuner's sizes     finer buckets; early   the verdict
                                        updates are planned

Where backward hides all of the wire, the way behind the next forward has nothing to gain, and its copies cost. That
hangs on the model, the link and the machine, so it is tried. Trials enclose each other, since machines have moods.
Ranks meet before the first bucket of windows whose numbers all of them know, and decide by numbers that they have
agreed on. The optimizer's state moves at every change: whole on every rank where steps are plain, else in shares.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.tuner import TUNED_AFTER
from gradsync.core.reduction import Reduction, ScatteredMean
from gradsync.core.reduction.changing import TRIAL, Changing, StepWatch, in_ms
from gradsync.optim.sharded.pace import PLANNED_AFTER

__all__ = ["DECIDED_AFTER", "ChosenMode", "Mode", "check_mode"]

LOGGER = logging.getLogger("gradsync")

Mode = Literal["next-forward", "plain", "auto"]

# By then bucket sizes have been chosen.
SETTLED_AFTER = TUNED_AFTER[-1] + 1
# After so many windows more a trial ends: of plain steps, of the next forward, of plain steps again.
PLAIN, NEXT_FORWARD = TRIAL + 2, PLANNED_AFTER + TRIAL + 1
TRIALS = (PLAIN, PLAIN + NEXT_FORWARD, PLAIN + NEXT_FORWARD + PLAIN)
DECIDED_AFTER = SETTLED_AFTER + TRIALS[-1]
# What the next forward must gain.
WORTH_KEEPING = 0.01


def check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise ConfigurationError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")


class ChosenMode(Changing):
    """``whole`` means for the first windows, then the ``scattered`` ones if steps become faster by it.

    ``changed`` is told when the one follows the other, with True for shares: all ranks are there, and buckets are about
    to be laid out anew. ``chosen`` is the mode once that is settled, and ``report`` says why.
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
        # Of the trials, this one included.
        self._windows = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}
        # What was loaded takes its place where all ranks come by.
        self._loaded: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"ChosenMode({self._whole!r}, {self._scattered!r})"

    def reconsider(self, window: int, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        # Whatever follows: it ends what it has begun in the window before.
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
        words, mine, other = "the wire works behind the next forward", behind, plain
        if not gains:
            words, mine, other = "steps wait for the whole mean", plain, behind
        self.report = f"{words} from now on: {in_ms(mine)} a step, as against {in_ms(other)}"
        if communicator.rank == 0:
            # Nothing is wrong. But whoever leaves the choice to us wants to be told, without setting up logging.
            LOGGER.warning("mode auto: %s", self.report)
        return self._become(gains)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        # In the middle of trials: they begin anew.
        return {} if self.chosen is None else {"mode": self.chosen, "report": self.report}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = dict(state)

    def _take_loaded(self) -> bool:
        state, self._loaded = self._loaded or {}, None
        self._windows, self._times = 0, {True: [], False: []}
        self._watch.forget(began=True)
        self.chosen, self.report = state.get("mode"), state.get("report", "")
        return self._become(self.chosen == "next-forward")
