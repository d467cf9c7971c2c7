"""Replays recorded steps with something changed: how long would they have taken?

Every recorded step is replayed with its recorded durations, on every rank: computing takes as long as it did, buckets
start as long after the beginning of their backward as they did, and communication takes the recorded time for each.
Only waiting is computed again: a bucket begins on the wire when the last rank has started it and the wire is free. So a
replay without a change gives nearly the recorded time, and the ratio of two replays is the gain.

:mod:`gradsync.observe.plan` has its own simulator, because it answers a different question: it scales one synthetic
step, from a profile and a link of known costs, to ranks and links that nobody has recorded. Here every recorded step of
every rank is replayed with its own durations, which keeps differences between ranks and steps. A profile would average
them away, and what the simulator needs to know about a link cannot be learned by observing it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradsync.observe.explain.merging import MergedStep, Timeline

__all__ = ["Bucket", "Piece", "Play", "Script", "duration", "script_of"]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket in a script. ``starts`` are seconds after the backward began, rank by rank; with ``at_end`` after it
    ended. ``wire`` is how long the wire is busy with it."""

    nbytes: int
    starts: tuple[float, ...]
    at_end: bool
    wire: float


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What all ranks do between two meetings: they spend the ``seconds`` of each part, one after the other, and then
    run a backward with these buckets, if there are any."""

    seconds: tuple[dict[str, float], ...]
    backward: tuple[float, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    # From the end of the last bucket to where a rank goes on.
    tails: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Script:
    """One step of all ranks: pieces, and what comes after the last meeting."""

    pieces: tuple[Piece, ...]
    rest: tuple[dict[str, float], ...]


Change = Callable[[Script], Script]


def script_of(merged: MergedStep, sizes: Sequence[int]) -> Script:
    """The script of a recorded step."""
    pieces = []
    begins = [step.begin for step in merged.ranks]
    for number, wires in enumerate(merged.wires):
        parts = [step.synchronizations[number] for step in merged.ranks]
        buckets = []
        for wire in wires:
            found = [next(b for b in part.buckets if b.index == wire.index) for part in parts]
            late = all(b.start >= part.backward_end for b, part in zip(found, parts, strict=True))
            buckets.append(
                Bucket(
                    nbytes=sizes[wire.index] if wire.index < len(sizes) else 0,
                    starts=tuple(
                        b.start - (part.backward_end if late else part.begin)
                        for b, part in zip(found, parts, strict=True)
                    ),
                    at_end=late,
                    wire=statistics.fmean(wire.seconds(place) for place in range(len(parts))),
                )
            )
        ends = [wires[-1].ends[place] if wires else part.finished for place, part in enumerate(parts)]
        pieces.append(
            Piece(
                seconds=tuple(
                    _spent(step.spans, begin, part.begin)
                    for step, begin, part in zip(merged.ranks, begins, parts, strict=True)
                ),
                backward=tuple(part.backward_end - part.begin for part in parts),
                buckets=tuple(buckets),
                tails=tuple(
                    max(0.0, part.finished - max(part.backward_end, end)) for part, end in zip(parts, ends, strict=True)
                ),
            )
        )
        begins = [part.finished for part in parts]
    rest = tuple(_spent(step.spans, begin, step.end) for step, begin in zip(merged.ranks, begins, strict=True))
    return Script(pieces=tuple(pieces), rest=rest)


def _spent(spans: Sequence[object], since: float, until: float) -> dict[str, float]:
    spent: dict[str, float] = {}
    for span in spans:
        begin, end, name = span.begin, span.end, span.name  # type: ignore[attr-defined]
        inside = min(end, until) - max(begin, since)
        if inside > 0:
            spent[name] = spent.get(name, 0.0) + inside
    return spent


@dataclass
class Play:
    """Ranks that run one script after another. ``at`` is the current time of each."""

    at: list[float] = field(default_factory=list)

    def step(self, script: Script) -> None:
        ranks = len(script.rest)
        at = self.at or [0.0] * ranks
        for piece in script.pieces:
            begins = [at[rank] + sum(piece.seconds[rank].values()) for rank in range(ranks)]
            ends = [begins[rank] + piece.backward[rank] for rank in range(ranks)]
            free = 0.0
            for bucket in piece.buckets:
                bases = ends if bucket.at_end else begins
                free = max(free, *(bases[rank] + bucket.starts[rank] for rank in range(ranks))) + bucket.wire
            at = [max(ends[rank], free) + piece.tails[rank] for rank in range(ranks)]
        self.at = [at[rank] + sum(script.rest[rank].values()) for rank in range(ranks)]


def duration(timeline: Timeline, change: Change | None = None) -> float:
    """Seconds a step takes when it is played again."""
    sizes = [bucket.nbytes for bucket in timeline.layout]
    play = Play()
    for merged in timeline.steps:
        script = script_of(merged, sizes)
        play.step(script if change is None else change(script))
    return max(play.at) / max(len(timeline.steps), 1)
