"""``Auto``: tries reductions and keeps the mildest one that hides communication, or the exact mean if none helps.

::

    windows    …  exact │ exact again      candidate   exact   candidate │ whatever was faster, for good
                  ▲                     ▲                                ▲
                  the tuner's sizes     every reduction is timed         the verdict
                                        on one bucket, a gain is
                                        predicted, a candidate taken

Compression helps in few set-ups, so neither its nominal gain nor the prediction made here is trusted.
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

__all__ = ["DECIDED_AFTER", "SIZES_CHOSEN_AFTER", "Auto", "ByTrial", "in_ms", "predict"]


LOGGER = logging.getLogger("gradsync")

# Bucket sizes have been chosen by then.
SIZES_CHOSEN_AFTER = TUNED_AFTER[-1] + 1
# The gain that an alternative must deliver.
WORTH_KEEPING = 0.01


class ByTrial(Reduction):
    """A reduction that delegates to ``current``: the ``usual`` one, or an alternative while it is tried.

    The alternative stays for good if steps become faster. ``chosen`` names what was chosen once that is decided, and
    ``report`` says why. Trials are interleaved because machine speed drifts. They begin and end before the first bucket
    of a window whose number all ranks know, and are decided by numbers that ranks have agreed on, so all reach the same
    conclusion.
    """

    def __init__(self, setting: str, usual: Reduction, clock: Callable[[], float] = time.perf_counter) -> None:
        self._setting, self._usual, self.current = setting, usual, usual
        self.chosen: str | None = None
        self.report = ""
        self._watch = StepWatch(clock=clock)
        # The seconds per step in each trial, by whether it was one of the usual reduction.
        self._times: dict[bool, list[float]] = {True: [], False: []}
        # Loaded state is applied when all ranks get there, where buckets can be laid out for it.
        self._loaded: dict[str, Any] | None = None

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

    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        self.current.window_ended(succeeded=succeeded, correction=correction)

    def rescaled(self, factor: float | torch.Tensor) -> None:
        self.current.rescaled(factor)

    def rebuilt(self, layout: BucketLayout) -> None:
        self.current.rebuilt(layout)

    def _end_trial(self, communicator: Communicator) -> tuple[float, float]:
        """The seconds per step of the trial that ends, and those spent waiting in it. Collective."""
        step, wait = self._watch.read(communicator)
        self._times[self.current is self._usual].append(step)
        return step, wait

    def _verdict(self) -> tuple[bool, float, float]:
        """Whether to keep the alternative, and the seconds per step with the usual reduction and with that one."""
        usual, tried = statistics.mean(self._times[True]), statistics.mean(self._times[False])
        return tried <= usual * (1 - WORTH_KEEPING), usual, tried

    def _decide(self, chosen: str, report: str, communicator: Communicator | None = None) -> None:
        self.chosen, self.report = chosen, report
        if communicator is not None and communicator.rank == 0:
            # A warning, although nothing is wrong: the user sees what was chosen without configuring logging.
            LOGGER.warning("%s auto: %s", self._setting, report)

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        # In the middle of trials: they start again.
        return {} if self.chosen is None else {"chosen": self.chosen, "report": self.report}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = dict(state)

    def _take_loaded(self) -> dict[str, Any]:
        """Apply what was loaded, except for ``current``. All ranks get here."""
        state, self._loaded = self._loaded or {}, None
        self._times = {True: [], False: []}
        self._watch.forget(began=True)
        self.chosen, self.report = state.get("chosen"), state.get("report", "")
        return state


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


# The trials: exact, candidate, exact, candidate.
TRIALS = 4
DECIDED_AFTER = SIZES_CHOSEN_AFTER + TRIALS * (TRIAL + 1)
# Communication counts as hidden if the time spent waiting for it is at most this fraction of a step.
HIDDEN = 0.05
# The gain that a candidate must promise.
WORTH_TRYING = 0.03


@dataclass(frozen=True, kw_only=True)
class ReductionPrediction:
    """A candidate, the predicted time of its step, and how much of that would be waiting for communication."""

    name: str
    step: float
    exposed: float

    @property
    def hides_communication(self) -> bool:
        return self.exposed <= HIDDEN * self.step


def predict(name: str, compute: float, wait: float, speed: Speed, exact: Speed) -> ReductionPrediction:
    """Predict a step at another speed, if it computes ``compute`` and waits ``wait`` seconds with the ``exact`` mean.

    Whatever is saved shortens the wait. Communication that is still hidden behind compute takes processor time away
    from it, for the part of its time in which processors are busy with compression.
    """
    exposed = min(max(wait - (exact.seconds - speed.seconds), 0.0), speed.seconds)
    hidden = (speed.seconds - exposed) / speed.seconds if speed.seconds else 0.0
    busy = max(speed.busy - exact.busy, 0.0) * hidden
    return ReductionPrediction(name=name, step=compute + exposed + busy, exposed=exposed)


class Auto(ByTrial):
    """Reduces exactly in the first windows, then by one of ``candidates``, mildest first, if steps become faster.

    ``clock`` returns the time in seconds.
    """

    def __init__(
        self, candidates: Mapping[str, Callable[[], Reduction]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not candidates:
            raise ConfigurationError("Auto needs at least one candidate to choose from, got none")
        super().__init__("reduction", Mean(), clock)
        self._candidates = dict(candidates)
        self._first: int | None = None
        self._tried: tuple[ReductionPrediction, Reduction] | None = None

    def __repr__(self) -> str:
        return f"Auto({', '.join(self._candidates)})"

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

    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        self._watch.window_ended()
        super().window_ended(succeeded=succeeded, correction=correction)

    def reconsider(self, window: int, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        if self._loaded is not None:
            return self._use_loaded()
        if self.chosen is not None:
            return False
        if communicator.world_size == 1 or not self._candidates or not buckets:
            self._keep("mean", "there is nothing to choose")
            return False
        if self._first is None:
            self._first = window
        self._watch.window_began()
        trials, rest = divmod(window - self._first - SIZES_CHOSEN_AFTER, TRIAL + 1)
        if trials < 0 or rest:
            return False
        if trials == 0:
            # Measurements from while sizes were tried mean nothing.
            self._watch.forget()
            return False
        step, wait = self._end_trial(communicator)
        if trials == 1:
            speeds = measure_speed({"mean": Mean, **self._candidates}, buckets, communicator, self._watch.clock)
            return self._propose(step, wait, speeds, communicator)
        return self._alternate() if trials < TRIALS else self._conclude(communicator)

    def _propose(self, step: float, wait: float, speeds: Mapping[str, Speed], communicator: Communicator) -> bool:
        compute = max(step - wait, 0.0)
        predictions = [predict(name, compute, wait, speeds[name], speeds["mean"]) for name in self._candidates]
        worthy = [each for each in predictions if each.step <= step * (1 - WORTH_TRYING)]
        if not worthy:
            best = min(predictions, key=lambda each: each.step)
            words = f"{in_ms(step)} a step, with {best.name} {in_ms(best.step)} are expected"
            self._keep("mean", words, communicator)
            return False
        hiding = [each for each in worthy if each.hides_communication]
        best = hiding[0] if hiding else min(worthy, key=lambda each: each.step)
        self._tried = best, self._candidates[best.name]()
        return self._alternate()

    def _alternate(self) -> bool:
        assert self._tried is not None
        self.current = self._tried[1] if self.current is self._usual else self._usual
        return True

    def _conclude(self, communicator: Communicator) -> bool:
        assert self._tried is not None
        (predicted, candidate), before = self._tried, self.current
        keeps, exact, tried = self._verdict()
        self.current, self._tried = candidate if keeps else self._usual, None
        reason = f"{in_ms(tried)} a step with {predicted.name}, as against {in_ms(exact)}; expected were "
        self._keep(predicted.name if keeps else "mean", reason + in_ms(predicted.step), communicator)
        return self.current is not before

    def _keep(self, name: str, reason: str, communicator: Communicator | None = None) -> None:
        words = "exactly" if name == "mean" else f"by {name}"
        self._decide(name, f"gradients are averaged {words} from now on: {reason}", communicator)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self._loaded is not None or not state else state | {"state": self.current.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = state.get("chosen")
        if name not in (None, "mean", *self._candidates):
            raise ConfigurationError(
                f"the saved state was reduced by {name!r}, which {self!r} does not choose from. Give it the candidates "
                "of the training that was saved"
            )
        super().load_state_dict(state)

    def _use_loaded(self) -> bool:
        state = self._take_loaded()
        self._first, self._tried = None, None
        self.current = self._usual if self.chosen in (None, "mean") else self._candidates[self.chosen]()
        self.current.load_state_dict(state.get("state", {}))
        return True
