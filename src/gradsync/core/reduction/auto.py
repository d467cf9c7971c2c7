"""``Auto``: tries reductions and keeps the mildest one that hides communication, or the exact mean if none helps.

::

    windows    …  exact │ exact again      candidate   exact   candidate │ whatever was faster, for good
                  ▲                     ▲                                ▲
                  the tuner's sizes     every reduction is timed         the verdict
                                        on one bucket, a gain is
                                        predicted, a candidate taken

Compression helps in few set-ups, so neither its nominal gain nor the prediction made here is trusted. Trials are
interleaved because machine speed drifts. Ranks negotiate only before the first bucket of a window whose number all of
them know, and decide by numbers that they have agreed on, so they reach the same conclusion.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket, BucketLayout
from gradsync.core.bucket.layout import ParameterSpec
from gradsync.core.bucket.sizes import TUNED_AFTER
from gradsync.core.reduction.base import Reduction
from gradsync.core.reduction.mean import Mean
from gradsync.core.reduction.measurement import TRIAL, Speed, StepWatch, measure_speed

__all__ = ["DECIDED_AFTER", "Auto", "Changing", "in_ms", "predict"]


class Changing(Reduction):
    """Delegates to ``current``, whichever reduction that is at the moment."""

    current: Reduction

    @property
    def carries_tail(self) -> bool:
        return self.current.carries_tail

    @property
    def scatters(self) -> bool:
        return self.current.scatters

    @property
    def keeps_layout(self) -> bool:
        return self.current.keeps_layout

    def unit(self, ranks: int) -> int:
        return self.current.unit(ranks)

    def prescale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return self.current.prescale(bucket, communicator, divisor)

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        return self.current.start(bucket, communicator, divisor)

    def ended(self, *, well: bool, correction: float | torch.Tensor = 1.0) -> None:
        self.current.ended(well=well, correction=correction)

    def rescaled(self, factor: float | torch.Tensor) -> None:
        self.current.rescaled(factor)

    def rebuilt(self, layout: BucketLayout) -> None:
        self.current.rebuilt(layout)


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


LOGGER = logging.getLogger("gradsync")

# Bucket sizes have been chosen by then.
SETTLED_AFTER = TUNED_AFTER[-1] + 1
# The trials: exact, candidate, exact, candidate.
TRIALS = 4
DECIDED_AFTER = SETTLED_AFTER + TRIALS * (TRIAL + 1)
# Communication counts as hidden if the time spent waiting for it is at most this fraction of a step.
HIDDEN = 0.05
# The gain that a candidate must promise, and the gain that it must deliver.
WORTH_TRYING = 0.03
WORTH_KEEPING = 0.01


@dataclass(frozen=True, kw_only=True)
class ReductionPrediction:
    """A candidate, the predicted time of its step, and how much of that would be waiting for communication."""

    name: str
    step: float
    exposed: float

    @property
    def hides_the_wire(self) -> bool:
        return self.exposed <= HIDDEN * self.step


def predict(name: str, compute: float, wait: float, speed: Speed, exact: Speed) -> ReductionPrediction:
    """A step that computes for ``compute`` seconds and waits for ``wait`` with the ``exact`` mean, at another speed.

    Whatever is saved shortens the wait. Communication that is still hidden behind compute takes processor time away
    from it, for the part of its time in which processors are busy with compression.
    """
    exposed = min(max(wait - (exact.seconds - speed.seconds), 0.0), speed.seconds)
    hidden = (speed.seconds - exposed) / speed.seconds if speed.seconds else 0.0
    busy = max(speed.busy - exact.busy, 0.0) * hidden
    return ReductionPrediction(name=name, step=compute + exposed + busy, exposed=exposed)


class Auto(Changing):
    """Exact in the first windows, then one of ``candidates``, mildest first, if and only if steps become faster.

    ``current`` is the reduction in use; ``chosen`` is its name once that is decided, and ``report`` says why. ``clock``
    returns the time in seconds.
    """

    def __init__(
        self, candidates: Mapping[str, Callable[[], Reduction]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not candidates:
            raise ConfigurationError("Auto needs at least one candidate to choose from, got none")
        self._candidates = dict(candidates)
        self._exact: Reduction = Mean()
        self.current: Reduction = self._exact
        self.chosen: str | None = None
        self.report = ""
        self._watch = StepWatch(clock=clock)
        self._first: int | None = None
        self._tried: tuple[ReductionPrediction, Reduction] | None = None
        self._times: dict[bool, list[float]] = {True: [], False: []}
        # Loaded state is applied when all ranks get there, where buckets can be laid out for it.
        self._loaded: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Auto({', '.join(self._candidates)})"

    # -- the reduction of the running window -------------------------------------------------------------------------

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        """Remove candidates that cannot handle these parameters."""
        for name, make in list(self._candidates.items()):
            try:
                make().examine(specs)
            except ConfigurationError:
                del self._candidates[name]

    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        # The last bucket, which has the control flags, starts when backward has ended.
        if self.chosen is None and bucket.plan.control:
            self._watch.backward_ended()
        return super().start(bucket, communicator, divisor)

    def ended(self, *, well: bool, correction: float | torch.Tensor = 1.0) -> None:
        self._watch.window_ended()
        super().ended(well=well, correction=correction)

    # -- choosing ------------------------------------------------------------------------------------------------------

    def reconsider(self, window: int, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        if self._loaded is not None:
            return self._take_loaded()
        if self.chosen is not None:
            return False
        if communicator.world_size == 1 or not self._candidates or not buckets:
            self._settle("mean", "there is nothing to choose")
            return False
        if self._first is None:
            self._first = window
        self._watch.window_began()
        trials, rest = divmod(window - self._first - SETTLED_AFTER, TRIAL + 1)
        if trials < 0 or rest:
            return False
        if trials == 0:
            # Measurements from while sizes were tried mean nothing.
            self._watch.forget()
            return False
        step, wait = self._watch.read(communicator)
        self._times[self.current is self._exact].append(step)
        if trials == 1:
            speeds = measure_speed(self._all_makers(), buckets, communicator, self._watch.clock)
            return self._propose(step, wait, speeds, communicator)
        return self._alternate() if trials < TRIALS else self._conclude(communicator)

    def _all_makers(self) -> dict[str, Callable[[], Reduction]]:
        return {"mean": Mean, **self._candidates}

    def _propose(self, step: float, wait: float, speeds: Mapping[str, Speed], communicator: Communicator) -> bool:
        compute = max(step - wait, 0.0)
        predictions = [predict(name, compute, wait, speeds[name], speeds["mean"]) for name in self._candidates]
        worthy = [each for each in predictions if each.step <= step * (1 - WORTH_TRYING)]
        if not worthy:
            best = min(predictions, key=lambda each: each.step)
            words = f"{in_ms(step)} a step, with {best.name} {in_ms(best.step)} are expected"
            self._settle("mean", words, communicator)
            return False
        hiding = [each for each in worthy if each.hides_the_wire]
        best = hiding[0] if hiding else min(worthy, key=lambda each: each.step)
        self._tried = best, self._candidates[best.name]()
        return self._alternate()

    def _alternate(self) -> bool:
        assert self._tried is not None
        self.current = self._tried[1] if self.current is self._exact else self._exact
        return True

    def _conclude(self, communicator: Communicator) -> bool:
        assert self._tried is not None
        (predicted, candidate), before = self._tried, self.current
        exact, tried = statistics.mean(self._times[True]), statistics.mean(self._times[False])
        keeps = tried <= exact * (1 - WORTH_KEEPING)
        self.current, self._tried = candidate if keeps else self._exact, None
        reason = f"{in_ms(tried)} a step with {predicted.name}, as against {in_ms(exact)}; expected were "
        self._settle(predicted.name if keeps else "mean", reason + in_ms(predicted.step), communicator)
        return self.current is not before

    def _settle(self, name: str, reason: str, communicator: Communicator | None = None) -> None:
        self.chosen = name
        words = "exactly" if name == "mean" else f"by {name}"
        self.report = f"gradients are averaged {words} from now on: {reason}"
        if communicator is not None and communicator.rank == 0:
            # Nothing is wrong. But a user who left the choice to us wants to be told, without setting up logging.
            LOGGER.warning("reduction auto: %s", self.report)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        if self.chosen is None:
            # In the middle of trials: they start again.
            return {}
        return {"chosen": self.chosen, "report": self.report, "state": self.current.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = state.get("chosen")
        if name is not None and name not in self._all_makers():
            raise ConfigurationError(
                f"the saved state was reduced by {name!r}, which {self!r} does not choose from. Give it the candidates "
                "of the training that was saved"
            )
        self._loaded = dict(state)

    def _take_loaded(self) -> bool:
        state, self._loaded = self._loaded or {}, None
        self._first, self._tried, self._times = None, None, {True: [], False: []}
        self._watch.forget(began=True)
        self.chosen, self.report = state.get("chosen"), state.get("report", "")
        self.current = self._exact if self.chosen in (None, "mean") else self._candidates[self.chosen]()
        self.current.load_state_dict(state.get("state", {}))
        return True
