"""Predicts a step with different buckets: laid out by the engine's own rule, from the existing parameters.

A joined bucket is full when the last of its gradients is ready, and a parameter is never split. Fewer buckets save, for
each one, the latency, the work that the rank does after its backward to finish it, and, where the thread of the
backward computes itself, the work to start it. A thread that waits for an accelerator has that time to spare.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gradsync.core.bucket.layout import BucketCaps, ParameterSpec, plan_layout
from gradsync.observe.explain.link import Link
from gradsync.observe.explain.merging import Timeline
from gradsync.observe.explain.replay import Bucket, Piece, Script

__all__ = ["Regrouped", "other_buckets", "regroup"]

# What is left of a duration at least, however much is saved on it.
LEAST = 0.1


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """One bucket of a different layout: full when ``share`` of the recorded bucket ``source``'s gradients is ready."""

    nbytes: int
    source: int
    share: float


def regroup(timeline: Timeline, cap: int) -> tuple[Regrouped, ...]:
    """The buckets that a cap of so many bytes makes."""
    sizes, sources, shares = _parameters(timeline)
    specs = [
        ParameterSpec(name=str(place), shape=(size,), stride=(1,), dtype=torch.uint8, device=torch.device("cpu"))
        for place, size in enumerate(sizes)
    ]
    layout = plan_layout(specs, range(len(specs)), BucketCaps.uniform(cap), ballot=0)
    groups = [[slot.parameter for slot in plan.slots] for plan in layout.buckets]
    return tuple(
        Regrouped(nbytes=sum(sizes[each] for each in group), source=sources[group[-1]], share=shares[group[-1]])
        for group in groups
    )


def _parameters(timeline: Timeline) -> tuple[list[int], list[int], list[float]]:
    """In the order of their buckets: bytes, the bucket, and how much of it is full with this one."""
    known = timeline.recordings[0].header.parameters
    sizes, sources, shares = [], [], []
    for index, bucket in enumerate(timeline.layout):
        parts = [int(known.get(name, 0)) for name in bucket.parameters]
        if not all(parts):
            # Not all sizes are known: it stays in one piece.
            parts = [bucket.nbytes]
        for place, nbytes in enumerate(parts):
            sizes.append(nbytes)
            sources.append(index)
            shares.append(sum(parts[: place + 1]) / max(sum(parts), 1))
    return sizes, sources, shares


def other_buckets(layout: Sequence[Regrouped], link: Link) -> Callable[[Script], Script]:
    """The same steps with these buckets."""

    def change(script: Script) -> Script:
        return replace(script, pieces=tuple(_changed(piece, layout, link) for piece in script.pieces))

    return change


def _changed(piece: Piece, layout: Sequence[Regrouped], link: Link) -> Piece:
    if len(piece.buckets) <= max(each.source for each in layout):
        # Not all buckets travelled here, or none did.
        return piece
    fewer = len(piece.buckets) - len(layout)
    backward = tuple(_less(seconds, fewer * link.starting) for seconds in piece.backward)
    ratios = [new / old if old else 1.0 for new, old in zip(backward, piece.backward, strict=True)]
    buckets = [
        Bucket(
            nbytes=each.nbytes,
            starts=tuple(start * ratio for start, ratio in zip(_starts(piece, each), ratios, strict=True)),
            at_end=False,
            wire=link.seconds(each.nbytes),
        )
        for each in layout
    ]
    last = piece.buckets[-1]
    # Whatever is in it, the last one starts when the last one did.
    buckets[-1] = replace(buckets[-1], at_end=last.at_end, starts=last.starts)
    tails = tuple(_less(seconds, fewer * link.finishing) for seconds in piece.tails)
    return replace(piece, backward=backward, buckets=tuple(buckets), tails=tails)


def _less(seconds: float, saved: float) -> float:
    return max(seconds - saved, seconds * LEAST)


def _starts(piece: Piece, new: Regrouped) -> tuple[float, ...]:
    """Seconds after the backward began: between the start of the bucket before and that of its own."""
    before = (0.0,) * len(piece.backward) if new.source == 0 else _since_begin(piece, piece.buckets[new.source - 1])
    after = _since_begin(piece, piece.buckets[new.source])
    return tuple(old + (end - old) * new.share for old, end in zip(before, after, strict=True))


def _since_begin(piece: Piece, bucket: Bucket) -> tuple[float, ...]:
    return piece.backward if bucket.at_end else bucket.starts
