"""Changes to a script: what a step would be if something were done about it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gradsync.explain.link import Link
from gradsync.explain.replay import Bucket, Piece, Script

__all__ = [
    "SMALLEST",
    "accumulated",
    "as_fast_as_others",
    "count_buckets",
    "in_eight_bits",
    "next_forward",
    "other_buckets",
    "synchronized_once",
    "without_data",
]

SMALLEST = 64 * 1024
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


def without_data() -> Change:
    """Data is there when it is wanted."""

    def change(script: Script) -> Script:
        pieces = [
            replace(piece, seconds=tuple({**spent, "data": 0.0} for spent in piece.seconds)) for piece in script.pieces
        ]
        return Script(pieces=tuple(pieces), rest=tuple({**spent, "data": 0.0} for spent in script.rest))

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
    forward, before = spent.get("forward", 0.0), sum(spent.get(name, 0.0) for name in ("data", "other"))
    total = sum(bucket.nbytes for bucket in piece.buckets) or 1
    arrived, now = 0.0, before
    for bucket in reversed(piece.buckets):
        arrived += bucket.wire / 2
        now = max(now, arrived) + forward * bucket.nbytes / total
    return {**spent, "forward": max(forward, now - before)}


def other_buckets(cap: int, link: Link) -> Change:
    """Buckets of at most ``cap`` bytes: neighbours joined, or large ones cut."""

    def change(script: Script) -> Script:
        pieces = []
        for piece in script.pieces:
            buckets = _laid(piece.buckets, piece.backward, cap, link)
            saved = (len(piece.buckets) - len(buckets)) * link.host
            backward = tuple(max(seconds - saved, seconds * 0.1) for seconds in piece.backward)
            ratios = [new / old if old else 1.0 for new, old in zip(backward, piece.backward, strict=True)]
            moved = tuple(
                bucket
                if bucket.at_end
                else replace(
                    bucket, starts=tuple(start * ratio for start, ratio in zip(bucket.starts, ratios, strict=True))
                )
                for bucket in buckets
            )
            pieces.append(replace(piece, backward=backward, buckets=moved))
        return replace(script, pieces=tuple(pieces))

    return change


def _laid(buckets: Sequence[Bucket], backward: Sequence[float], cap: int, link: Link) -> list[Bucket]:
    """They start in the same order; a joined one when its last part does, cut ones one after the other."""
    pieces: list[Bucket] = []
    before = tuple(0.0 for _ in buckets[0].starts) if buckets else ()
    for bucket in buckets:
        parts = max(1, round(bucket.nbytes / cap))
        for number in range(1, parts + 1):
            share = number / parts
            ends = backward if bucket.at_end else bucket.starts
            starts = tuple(old + (new - old) * share for old, new in zip(before, ends, strict=True))
            pieces.append(replace(bucket, nbytes=bucket.nbytes // parts, starts=starts, at_end=False))
        before = tuple(backward) if bucket.at_end else bucket.starts
    joined: list[Bucket] = []
    for piece in pieces:
        if joined and joined[-1].nbytes + piece.nbytes <= cap:
            joined[-1] = replace(piece, nbytes=joined[-1].nbytes + piece.nbytes)
        else:
            joined.append(piece)
    if joined and buckets:
        joined[-1] = replace(joined[-1], at_end=buckets[-1].at_end, starts=buckets[-1].starts)
    return [replace(bucket, wire=link.seconds(bucket.nbytes)) for bucket in joined]


def count_buckets(sizes: Sequence[int], cap: int) -> int:
    """How many there would be."""
    empty = Link(latency=0.0, seconds_per_byte=0.0, host=0.0)
    buckets = [Bucket(nbytes=each, starts=(0.0,), at_end=False, wire=0.0) for each in sizes]
    return len(_laid(buckets, (0.0,), cap, empty))
