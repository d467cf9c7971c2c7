"""Metrics of a training as it runs: where a step's time went, what was sent, what was skipped and who was lost.

Everything is read from what gradsync measures anyway: the recorder of the model, the warnings of the watch, the scaler.
A :class:`StepMetrics` reads it and writes it to sinks; :mod:`gradsync.tools.metrics` has sinks for TensorBoard, W&B,
MLflow, Prometheus and OpenTelemetry. A metric has a name of two words, ``group/name``, and is a number per step.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol

import torch

from gradsync.base.environment import times_restarted
from gradsync.base.errors import MisuseError, PeerFailedError
from gradsync.health.watch import slowness_warnings
from gradsync.observe.explain.explanation import REMEDY
from gradsync.observe.recording import Recorder, Step

__all__ = ["COUNTERS", "DESCRIPTIONS", "LOST", "MetricsSink", "StepMetrics"]

LOGGER = logging.getLogger("gradsync")

# Spans of a step, each a metric `step/NAME_seconds`.
PARTS = ("data", "loop", "forward", "backward", "synchronization", "gather", "optimizer", "other")
SKIPPED, LOST = "training/skipped_steps", "ranks/lost"

# Totals since the process started, which only grow.
COUNTERS = {
    "communication/bytes": "Bytes of gradients, and of gathered parameters, that this rank gave to collectives",
    "communication/collectives": "Collectives that the engine started",
    "training/steps": "Optimizer steps",
    SKIPPED: "Steps that changed nothing: a rank abstained, or gradients were not finite",
    "ranks/slow_warnings": "Warnings about slow ranks and slow communication; on rank 0",
    LOST: "Ranks that were lost",
    "ranks/restarts": "How often the launcher has started the ranks again",
}
DESCRIPTIONS = COUNTERS | {
    "step/seconds": "Seconds of a step",
    **{f"step/{part}_seconds": f"Seconds of a step: {part}" for part in PARTS},
    "step/exposed_seconds": "Seconds of a step in which this rank waited for communication, or for a slower rank",
    "training/loss_scale": "The loss scale of mixed precision",
}


class MetricsSink(Protocol):
    """Where metrics go. What it raises is logged, and it is not used any more: the training goes on."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of ``step``. Those in :data:`COUNTERS` are totals, all others are gauges."""

    def close(self) -> None:
        """Write what is buffered; nothing follows."""


class StepMetrics:
    """Reads the metrics of one model on this rank, and writes them to ``sinks``.

    ``model`` is a wrapped model, or its :class:`~gradsync.observe.recording.Recorder`. Seconds are means over the steps
    since the last write, so it may be called every step or once in a while; on a GPU it waits for these steps.

    As a context manager, it closes the sinks at the end, and counts a rank whose loss ends the block.
    """

    def __init__(self, model: Any, *sinks: MetricsSink, scaler: torch.amp.GradScaler | None = None) -> None:
        recorder = model if isinstance(model, Recorder) else getattr(getattr(model, "replica", None), "recorder", None)
        if recorder is None:
            raise MisuseError(f"expected a wrapped model that is recorded, got {type(model).__name__}. {REMEDY}")
        self._recorder: Recorder = recorder
        self._sinks = list(sinks)
        self._scaler = scaler
        self._scale: float | None = None
        self._counts: Counter[str] = Counter({"ranks/restarts": times_restarted(), LOST: 0})
        self._read_to = recorder.total
        self._step = 0

    @property
    def active(self) -> bool:
        """Whether there is a sink to write to."""
        return bool(self._sinks)

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter that only the caller can know, like ``ranks/lost``."""
        self._counts[name] += by  # type: ignore[assignment]

    def use(self, sinks: Iterable[MetricsSink]) -> None:
        """Write to these from here on."""
        self._sinks = list(sinks)

    def read(self) -> dict[str, float]:
        """The metrics of the steps since the last call."""
        steps = self._recorder.steps_since(self._read_to)
        made, self._read_to = self._recorder.total - self._read_to, self._recorder.total
        self._count_traffic(steps, made)
        self._counts["ranks/slow_warnings"] = len(slowness_warnings())
        scale = self._read_scale()
        counts = {**self._counts, "training/steps": self._read_to}
        counts[SKIPPED] = self._counts[SKIPPED] + self._recorder.skipped
        return {name: float(value) for name, value in counts.items()} | _seconds(steps) | scale

    def write(self, step: int, values: Mapping[str, float] | None = None, **more: float) -> None:
        """Write the metrics of the steps since the last call as those of ``step``, together with values of your own:
        ``write(step, loss=loss.item())``, or a mapping where names have two words."""
        if self._sinks:
            self.log(step, {**self.read(), **(values or {}), **more})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write these values, and no others."""
        self._step = step
        self._each("write", step, values)

    def close(self) -> None:
        """Close the sinks."""
        self._each("close")
        self._sinks = []

    def __enter__(self) -> "StepMetrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, PeerFailedError):
            self.count(LOST)
            self.log(self._step, {LOST: float(self._counts[LOST])})
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(sinks={self._sinks!r}, steps read: {self._read_to})"

    def _each(self, method: str, *arguments: Any) -> None:
        for sink in self._sinks.copy():
            try:
                getattr(sink, method)(*arguments)
            except Exception:
                self._sinks.remove(sink)
                LOGGER.exception("the metrics sink %r failed, and is not used any more; training goes on", sink)

    def _count_traffic(self, steps: list[Step], made: int) -> None:
        """Count what ``made`` steps have sent. A recorder keeps the last ones, which stand for those before them."""
        layouts, nbytes, collectives = self._recorder.layouts, 0, 0
        for step in steps:
            sizes = [part.nbytes for part in layouts[step.layout]] if step.layout >= 0 else []
            sent = [bucket.index for part in step.synchronizations for bucket in part.buckets]
            nbytes += sum(sizes[index] for index in sent if index < len(sizes))
            nbytes += sum(gather.nbytes for gather in step.gathers)
            collectives += step.collectives
        weight = made / max(1, len(steps))
        self._counts["communication/bytes"] += round(nbytes * weight)
        self._counts["communication/collectives"] += round(collectives * weight)

    def _read_scale(self) -> dict[str, float]:
        """The loss scale. A scaler says that it has skipped steps by lowering it."""
        if self._scaler is None or not self._scaler.is_enabled():
            return {}
        scale, before = self._scaler.get_scale(), self._scale
        if before is not None and scale < before:
            self._counts[SKIPPED] += max(1, round(math.log(scale / before, self._scaler.get_backoff_factor())))
        self._scale = scale
        return {"training/loss_scale": scale}


def _seconds(steps: list[Step]) -> dict[str, float]:
    """The mean seconds of a step, by part; nothing where no step has ended."""
    if not steps:
        return {}
    seconds = {f"step/{part}_seconds": sum(step.spent(part) for step in steps) / len(steps) for part in PARTS}
    exposed = seconds["step/synchronization_seconds"] + seconds["step/gather_seconds"]
    return {
        "step/seconds": sum(step.seconds for step in steps) / len(steps),
        **seconds,
        "step/exposed_seconds": exposed,
    }
