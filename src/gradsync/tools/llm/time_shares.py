"""Where the time of a run's steps went: one list of parts, for a report's bar, legend and sentence.

With a recording, it comes from the explanation, over all ranks; without one, from the phases of rank 0. The columns
over steps have the same parts, in the same colours.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.observe.charts.canvas import PARTS
from gradsync.observe.explain import Explanation
from gradsync.observe.explain.explanation import NAMES
from gradsync.observe.explain.split import PARTS as STEP_PARTS
from gradsync.observe.explain.split import step_parts
from gradsync.tools.llm.phases import PHASES
from gradsync.tools.llm.run_folder import Run

__all__ = ["Part", "TimeShares", "first_step", "time_shares"]

MOST_COLUMNS = 120


@dataclass(frozen=True, kw_only=True)
class Part:
    """``share`` is that of the mean step, ``seconds`` are what it has of it."""

    name: str
    share: float
    seconds: float
    colour: str


@dataclass(frozen=True, kw_only=True)
class TimeShares:
    """``edges`` frame the columns, of which each has a share of every part; ``waits`` are what is waited for."""

    parts: tuple[Part, ...]
    step: float
    waits: dict[str, float]
    edges: tuple[float, ...]
    columns: dict[str, list[float]]
    per_column: int

    @property
    def said(self) -> dict[float, str]:
        """What each column says below a pointer."""
        words = {}
        for place, (left, right) in enumerate(itertools.pairwise(self.edges)):
            shares = (f"{NAMES.get(name, name)} {values[place]:.0%}" for name, values in self.columns.items())
            words[(left + right) / 2] = f"to step {right - 0.5:,.0f}: " + ", ".join(shares)
        return words


def time_shares(run: Run, explanation: Explanation | None) -> TimeShares | None:
    """Of the run; None where no times were recorded."""
    if explanation is None:
        return _of_phases(run)
    mean, begin = explanation.split.mean, first_step(run, explanation)
    rows = []
    for merged in explanation.timeline.recorded:
        parts = step_parts(merged)
        rows.append((begin + merged.number, [float(getattr(parts, name)) for name in STEP_PARTS]))
    wire = (mean.turn + mean.exposed) / mean.step
    return _shares(
        dict(explanation.parts()), rows, stride=1, waits={"other ranks": mean.waiting / mean.step, "the wire": wire}
    )


def _of_phases(run: Run) -> TimeShares | None:
    rows = [(int(record["step"]), _phases(record)) for record in run.steps]
    rows = [(step, seconds) for step, seconds in rows if sum(seconds) > 0]
    if not rows:
        return None
    means = [math.fsum(column) / run.count for column in zip(*(seconds for _, seconds in rows), strict=True)]
    parts = dict(zip(PHASES, means, strict=True))
    return _shares(parts, rows, stride=run.stride, waits={"synchronization": parts["synchronization"] / sum(means)})


def first_step(run: Run, explanation: Explanation) -> int:
    """What the run calls the first step of its recording, which begins anew where the run was resumed."""
    last = int(run.steps[-1]["step"]) if run.steps else 0
    return max(0, last - explanation.timeline.recordings[0].total) + 1


def _phases(record: Mapping[str, Any]) -> list[float]:
    seconds = record.get("seconds") or {}
    values = [float(seconds.get(phase) or 0.0) for phase in PHASES]
    return [value if math.isfinite(value) and value > 0 else 0.0 for value in values]


def _shares(
    parts: Mapping[str, float], rows: Sequence[tuple[int, Sequence[float]]], *, stride: int, waits: dict[str, float]
) -> TimeShares:
    step = sum(parts.values())
    per_column = math.ceil(len(rows) / MOST_COLUMNS)
    columns = [rows[begin : begin + per_column] for begin in range(0, len(rows), per_column)]
    sums = [[sum(values) for values in zip(*(seconds for _, seconds in column), strict=True)] for column in columns]
    return TimeShares(
        parts=tuple(
            Part(name=NAMES.get(name, name), share=seconds / step, seconds=seconds, colour=PARTS[name])
            for name, seconds in parts.items()
        ),
        step=step,
        waits=waits,
        edges=(rows[0][0] - stride + 0.5, *(column[-1][0] + 0.5 for column in columns)),
        columns={name: [values[place] / (sum(values) or 1.0) for values in sums] for place, name in enumerate(parts)},
        per_column=per_column * stride,
    )
