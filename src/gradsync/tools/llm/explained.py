"""What a report says about the recording of its run: the split of a step, advice, and a picture of all ranks."""

import logging
import statistics
from collections.abc import Iterator
from pathlib import Path

from gradsync.base.errors import ConfigurationError
from gradsync.observe.charts.canvas import PARTS
from gradsync.observe.charts.kinds import Lane, Stretch
from gradsync.observe.charts.numbers import duration, size
from gradsync.observe.explain import Explanation, explain_recordings
from gradsync.observe.explain.explanation import NAMES
from gradsync.observe.explain.merging import MergedStep
from gradsync.observe.explain.split import PARTS as STEP_PARTS
from gradsync.observe.recording import find_recordings, read_recordings

__all__ = ["COLOURS", "explain_run", "lanes_of", "names_of", "shown_step"]

LOGGER = logging.getLogger("gradsync")

# More do not fit on a page: then some of them stand for all.
MOST_RANKS = 8
COLOURS = {name: PARTS[name] for name in STEP_PARTS}


def explain_run(folder: Path) -> Explanation | None:
    """Of the run's recording; None where there is none, or one that tells nothing: too short, or of another version."""
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
    """One that took as long as most."""
    middle = statistics.median(step.seconds for step in explanation.timeline.steps)
    return min(explanation.timeline.steps, key=lambda step: abs(step.seconds - middle))


def names_of() -> dict[str, str]:
    """What the colours of lanes mean."""
    shown = {NAMES.get(name, name): shade for name, shade in COLOURS.items() if name != "turn"}
    return {**shown, "bucket on the wire": PARTS["hidden"]}


def lanes_of(explanation: Explanation) -> list[Lane]:
    """Two lanes a rank: what it did, and what the wire carried meanwhile."""
    step = shown_step(explanation)
    origin = min(each.begin for each in step.ranks)
    lanes = []
    for place in _places(len(step.ranks)):
        rank = explanation.timeline.members[place]
        lanes.append(Lane(name=f"rank {rank}", stretches=list(_doing(explanation, step, place, origin))))
        wire = list(_carried(explanation, step, place, origin))
        if wire:
            lanes.append(Lane(name="wire", stretches=wire, narrow=True))
    return lanes


def _places(count: int) -> list[int]:
    if count <= MOST_RANKS:
        return list(range(count))
    return sorted({round(number * (count - 1) / (MOST_RANKS - 1)) for number in range(MOST_RANKS)})


def _doing(explanation: Explanation, merged: MergedStep, place: int, origin: float) -> Iterator[Stretch]:
    step, members = merged.ranks[place], explanation.timeline.members
    parts = iter(zip(step.synchronizations, merged.wires, strict=False))

    def stretch(name: str, begin: float, end: float, words: str) -> Stretch:
        return Stretch(begin=begin - origin, end=end - origin, colour=COLOURS[name], hint=words)

    for span in step.spans:
        words = f"rank {members[place]}, {span.name}: {duration(span.seconds)}"
        if span.name not in ("synchronization", "gather"):
            yield stretch(span.name, span.begin, span.end, words)
            continue
        wires = next(parts, (None, ()))[1] if span.name == "synchronization" else ()
        come = span.begin
        if wires and wires[-1].last != place:
            come = min(max(span.begin, wires[-1].begin), span.end)
        if come > span.begin:
            last = members[wires[-1].last]
            words = f"rank {members[place]} waits for rank {last}: {duration(come - span.begin)}"
            yield stretch("waiting", span.begin, come, words)
        if span.end > come:
            words = f"rank {members[place]}, exposed wire: {duration(span.end - come)}"
            yield stretch("exposed", come, span.end, words)


def _carried(explanation: Explanation, merged: MergedStep, place: int, origin: float) -> Iterator[Stretch]:
    layout, members = explanation.timeline.layout, explanation.timeline.members
    for wires in merged.wires:
        for wire in wires:
            begin, end = max(wire.begin, wire.free[place]), wire.ends[place]
            bucket = layout[wire.index] if wire.index < len(layout) else None
            what = "" if bucket is None else f", {size(bucket.nbytes)}, {bucket.parameters[0]} …"
            words = (
                f"bucket {wire.index}{what}: {duration(end - begin)} on the wire; rank {members[wire.last]} came last"
            )
            yield Stretch(begin=begin - origin, end=end - origin, colour=PARTS["hidden"], hint=words)
    for gather in merged.ranks[place].gathers:
        if gather.end is not None and gather.end > origin:
            words = f"bucket {gather.index}: new parameters, {duration(gather.end - gather.start)}"
            begin = max(gather.start, origin) - origin
            yield Stretch(begin=begin, end=gather.end - origin, colour=PARTS["update"], hint=words)
