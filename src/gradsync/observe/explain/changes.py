"""Possible changes to a script, each with its effect on a step."""

from collections.abc import Callable
from dataclasses import replace

from gradsync.observe.explain.link import Link
from gradsync.observe.explain.replay import Bucket, Piece, Script

__all__ = [
    "accumulated",
    "as_fast_as_others",
    "in_eight_bits",
    "next_forward",
    "synchronized_once",
    "without",
]

# Bytes of int8 to those of float32, scales included, and seconds a byte of coding: before it goes, and on the way.
INT8_SHARE, ENCODE, DECODE = 0.254, 4e-10, 6e-10

Change = Callable[[Script], Script]
Spent = dict[str, float]


def as_fast_as_others(place: int, factors: dict[str, float]) -> Change:
    """The rank at ``place`` takes only so much of what it took, phase by phase."""

    def quicker(spent: tuple[Spent, ...]) -> tuple[Spent, ...]:
        mine = {name: seconds * factors.get(name, 1.0) for name, seconds in spent[place].items()}
        return (*spent[:place], mine, *spent[place + 1 :])

    def change(script: Script) -> Script:
        factor = factors.get("backward", 1.0)
        pieces = [
            replace(
                piece,
                seconds=quicker(piece.seconds),
                backward=_scaled(piece.backward, place, factor),
                buckets=tuple(
                    bucket if bucket.at_end else replace(bucket, starts=_scaled(bucket.starts, place, factor))
                    for bucket in piece.buckets
                ),
            )
            for piece in script.pieces
        ]
        return Script(pieces=tuple(pieces), rest=quicker(script.rest))

    return change


def _scaled(values: tuple[float, ...], place: int, factor: float) -> tuple[float, ...]:
    return tuple(value * factor if number == place else value for number, value in enumerate(values))


def without(name: str) -> Change:
    """Nobody spends time on ``name``: data that is there when it is wanted, a loop that does nothing else."""

    def change(script: Script) -> Script:
        pieces = [
            replace(piece, seconds=tuple({**spent, name: 0.0} for spent in piece.seconds)) for piece in script.pieces
        ]
        return Script(pieces=tuple(pieces), rest=tuple({**spent, name: 0.0} for spent in script.rest))

    return change


def synchronized_once() -> Change:
    """Only the last backward of a step synchronizes."""

    def change(script: Script) -> Script:
        *local, last = script.pieces
        return replace(script, pieces=(*(replace(each, buckets=(), tails=_none(each)) for each in local), last))

    return change


def _none(piece: Piece) -> tuple[float, ...]:
    return (0.0,) * len(piece.backward)


def accumulated(times: int) -> Change:
    """So many micro-batches a step instead of one, and one synchronization."""

    def change(script: Script) -> Script:
        more: list[Spent] = []
        for rank in range(len(script.rest)):
            spent: Spent = {}
            for part in [piece.seconds[rank] for piece in script.pieces]:
                for name, seconds in part.items():
                    # What follows the optimizer's step comes once.
                    if name != "other":
                        spent[name] = spent.get(name, 0.0) + seconds
            backward = sum(piece.backward[rank] for piece in script.pieces)
            spent["backward"] = spent.get("backward", 0.0) + backward
            more.append({name: (times - 1) * seconds for name, seconds in spent.items()})
        first, *others = script.pieces
        spent_now = tuple(
            {name: own.get(name, 0.0) + extra.get(name, 0.0) for name in {*own, *extra}}
            for own, extra in zip(first.seconds, more, strict=True)
        )
        return replace(script, pieces=(replace(first, seconds=spent_now), *others))

    return change


def in_eight_bits(link: Link) -> Change:
    """A quarter of the bytes, and the time of making and reading them."""

    def smaller(bucket: Bucket) -> Bucket:
        latency = min(link.latency, bucket.wire)
        wire = latency + (bucket.wire - latency) * INT8_SHARE + DECODE * bucket.nbytes
        return replace(bucket, wire=wire)

    def change(script: Script) -> Script:
        pieces = []
        for piece in script.pieces:
            coded, buckets = 0.0, []
            for bucket in piece.buckets:
                coded += ENCODE * bucket.nbytes
                shifted = bucket.starts if bucket.at_end else tuple(start + coded for start in bucket.starts)
                buckets.append(replace(smaller(bucket), starts=shifted))
            backward = tuple(seconds + coded for seconds in piece.backward)
            pieces.append(replace(piece, backward=backward, buckets=tuple(buckets)))
        return replace(script, pieces=tuple(pieces))

    return change


def next_forward() -> Change:
    """Half of what crosses the wire does so behind the next forward; a layer waits for what it needs."""

    def change(script: Script) -> Script:
        pieces = []
        for number, piece in enumerate(script.pieces):
            halves = tuple(replace(bucket, wire=bucket.wire / 2) for bucket in piece.buckets)
            seconds = piece.seconds
            if number == 0:
                seconds = tuple(_awaited(spent, piece) for spent in piece.seconds)
            pieces.append(replace(piece, seconds=seconds, buckets=halves))
        ranks = len(script.rest)
        rest = tuple({**spent, "optimizer": spent.get("optimizer", 0.0) / ranks} for spent in script.rest)
        return Script(pieces=tuple(pieces), rest=rest)

    return change


def _awaited(spent: Spent, piece: Piece) -> Spent:
    """A forward whose layers wait for gathers, which have begun when the step ended. What started last is needed first,
    and layers take as long as their bytes have it."""
    forward, before = spent.get("forward", 0.0), sum(spent.get(name, 0.0) for name in ("data", "loop", "other"))
    total = sum(bucket.nbytes for bucket in piece.buckets) or 1
    arrived, now = 0.0, before
    for bucket in reversed(piece.buckets):
        arrived += bucket.wire / 2
        now = max(now, arrived) + forward * bucket.nbytes / total
    return {**spent, "forward": max(forward, now - before)}
