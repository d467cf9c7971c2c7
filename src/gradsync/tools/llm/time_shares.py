"""Where the time of a run's steps went: one list of parts, for a report's bar, legend and sentence.

With a recording, it comes from the explanation, over all ranks; without one, from the phases of rank 0. The columns
over steps have the same parts, in the same colours.
"""

import itertools
import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.canvas import PARTS
from gradsync.observe.charts.kinds import Lane, Stretch
from gradsync.observe.charts.numbers import duration, size
from gradsync.observe.explain import Explanation, explain_recordings
from gradsync.observe.explain.explanation import NAMES
from gradsync.observe.explain.merging import MergedStep
from gradsync.observe.explain.split import PARTS as STEP_PARTS
from gradsync.observe.explain.split import step_parts
from gradsync.observe.recording import find_recordings, read_recordings
from gradsync.tools.llm.run_folder import Run
from gradsync.tools.llm.step_records import PHASES

__all__ = ["TimeShares", "explain_run", "first_step", "lanes_of", "names_of", "shown_step", "time_shares"]

LOGGER = logging.getLogger("gradsync")

MOST_COLUMNS = 120
# More do not fit on a page: then some of them stand for all.
MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class TimeShares:
    """Shares of time: ``parts`` are seconds of the mean ``step``; ``edges`` frame the columns, of which each has a
    share of every part; ``waits`` are what is waited for."""

    parts: Mapping[str, float]
    step: float
    waits: dict[str, float]
    edges: tuple[float, ...]
    columns: dict[str, list[float]]
    per_column: int

    @property
    def hints(self) -> dict[float, str]:
        """What is read out below a pointer, by its place."""
        words = {}
        for place, (left, right) in enumerate(itertools.pairwise(self.edges)):
            shares = (f"{NAMES.get(name, name)} {values[place]:.0%}" for name, values in self.columns.items())
            words[(left + right) / 2] = f"to step {right - 0.5:,.0f}: " + ", ".join(shares)
        return words


def time_shares(run: Run, explanation: Explanation | None) -> TimeShares | None:
    """The time shares of the run; None where no times were recorded."""
    if explanation is None:
        return _of_phases(run)
    mean, begin = explanation.split.mean, first_step(run, explanation)
    steps = ((merged.number, vars(step_parts(merged))) for merged in explanation.timeline.recorded)
    rows = [(begin + number, [parts[name] for name in STEP_PARTS]) for number, parts in steps]
    waits = {"other ranks": mean.waiting / mean.step, "the wire": (mean.turn + mean.exposed) / mean.step}
    return _shares(dict(explanation.parts()), rows, stride=1, waits=waits)


def _of_phases(run: Run) -> TimeShares | None:
    rows = []
    for record in run.steps:
        known = record.get("seconds") or {}
        values = [float(known.get(phase) or 0.0) for phase in PHASES]
        rows.append((int(record["step"]), [each if math.isfinite(each) and each > 0 else 0.0 for each in values]))
    rows = [(step, seconds) for step, seconds in rows if sum(seconds) > 0]
    if not rows:
        return None
    means = [math.fsum(column) / run.count for column in zip(*(seconds for _, seconds in rows), strict=True)]
    parts = dict(zip(PHASES, means, strict=True))
    return _shares(parts, rows, stride=run.stride, waits={"synchronization": parts["synchronization"] / sum(means)})


def first_step(run: Run, explanation: Explanation) -> int:
    """What the run calls the first step of its recording, which starts again where the run was resumed."""
    last = int(run.steps[-1]["step"]) if run.steps else 0
    return max(0, last - explanation.timeline.recordings[0].total) + 1


def _shares(
    parts: Mapping[str, float], rows: Sequence[tuple[int, Sequence[float]]], *, stride: int, waits: dict[str, float]
) -> TimeShares:
    step = sum(parts.values())
    per_column = math.ceil(len(rows) / MOST_COLUMNS)
    columns = [rows[begin : begin + per_column] for begin in range(0, len(rows), per_column)]
    sums = [[sum(values) for values in zip(*(seconds for _, seconds in column), strict=True)] for column in columns]
    return TimeShares(
        parts=parts,
        step=step,
        waits=waits,
        edges=(rows[0][0] - stride + 0.5, *(column[-1][0] + 0.5 for column in columns)),
        columns={name: [values[place] / (sum(values) or 1.0) for values in sums] for place, name in enumerate(parts)},
        per_column=per_column * stride,
    )


def explain_run(folder: Path) -> Explanation | None:
    """Explain the run's recording; None where there is none, or one that tells nothing: too short, or of another
    version."""
    if not find_recordings(folder):
        return None
    try:
        return explain_recordings(read_recordings(folder))
    except ConfigurationError:
        return None
    except Exception:
        # The training has done its work, and must not fail by what is said of it.
        LOGGER.exception("the recording in %s could not be explained", folder)
        return None


def shown_step(explanation: Explanation) -> MergedStep:
    """A step that took as long as most."""
    middle = statistics.median(step.seconds for step in explanation.timeline.steps)
    return min(explanation.timeline.steps, key=lambda step: abs(step.seconds - middle))


def names_of() -> dict[str, str]:
    """The names of what the colours of lanes mean."""
    shown = {NAMES.get(name, name): PARTS[name] for name in STEP_PARTS if name != "turn"}
    return {**shown, "bucket on the wire": PARTS["hidden"]}


def lanes_of(explanation: Explanation) -> list[Lane]:
    """Two lanes a rank: what it did, and what the wire carried meanwhile."""
    step = shown_step(explanation)
    origin = min(each.begin for each in step.ranks)
    lanes, count = [], len(step.ranks)
    shown = min(count, MOST_RANKS)
    for place in sorted({round(number * (count - 1) / max(1, shown - 1)) for number in range(shown)}):
        rank = explanation.timeline.members[place]
        lanes.append(Lane(name=f"rank {rank}", stretches=list(_doing(explanation, step, place, origin))))
        wire = list(_carried(explanation, step, place, origin))
        if wire:
            lanes.append(Lane(name="wire", stretches=wire, narrow=True))
    return lanes


def _doing(explanation: Explanation, merged: MergedStep, place: int, origin: float) -> Iterator[Stretch]:
    step, members = merged.ranks[place], explanation.timeline.members
    parts = iter(zip(step.synchronizations, merged.collectives, strict=False))

    def stretch(name: str, begin: float, end: float, words: str) -> Stretch:
        return Stretch(begin=begin - origin, end=end - origin, colour=PARTS[name], hint=words)

    for span in step.spans:
        words = f"rank {members[place]}, {span.name}: {duration(span.seconds)}"
        if span.name not in ("synchronization", "gather"):
            yield stretch(span.name, span.begin, span.end, words)
            continue
        collectives = next(parts, (None, ()))[1] if span.name == "synchronization" else ()
        come = span.begin
        if collectives and collectives[-1].last != place:
            come = min(max(span.begin, collectives[-1].begin), span.end)
        if come > span.begin:
            last = members[collectives[-1].last]
            words = f"rank {members[place]} waits for rank {last}: {duration(come - span.begin)}"
            yield stretch("waiting", span.begin, come, words)
        if span.end > come:
            words = f"rank {members[place]}, exposed communication: {duration(span.end - come)}"
            yield stretch("exposed", come, span.end, words)


def _carried(explanation: Explanation, merged: MergedStep, place: int, origin: float) -> Iterator[Stretch]:
    layout, members = explanation.timeline.layout, explanation.timeline.members
    for collectives in merged.collectives:
        for each in collectives:
            begin, end = max(each.begin, each.free[place]), each.ends[place]
            bucket = layout[each.index] if each.index < len(layout) else None
            what = "" if bucket is None else f", {size(bucket.nbytes)}, {bucket.parameters[0]} …"
            words = f"{what}: {duration(end - begin)} on the wire; rank {members[each.last]} came last"
            hint = f"bucket {each.index}{words}"
            yield Stretch(begin=begin - origin, end=end - origin, colour=PARTS["hidden"], hint=hint)
    for gather in merged.ranks[place].gathers:
        if gather.end is not None and gather.end > origin:
            words = f"bucket {gather.index}: new parameters, {duration(gather.end - gather.start)}"
            begin = max(gather.start, origin) - origin
            yield Stretch(begin=begin, end=gather.end - origin, colour=PARTS["update"], hint=words)
