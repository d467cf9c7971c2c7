"""Where a step's time went: data, forward, backward, exposed synchronization, update.

On a GPU the host runs ahead of the device, so phases are delimited by events on its stream and read later; on the CPU
the clock is enough.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradsync.observe.timeline import StepTimes, Timeline

__all__ = ["PHASES", "Phases"]

PHASES = ("data", "forward", "backward", "synchronization", "update")


class Phases:
    """Times the phases of a loop. ``timeline`` tells how much of a backward was waiting for the wire."""

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self._on_gpu = device.type == "cuda"
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
        if not self._on_gpu:
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
        if not self._on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
