"""A recording of all ranks as a trace that ui.perfetto.dev opens: a few tracks for every rank, each with nested slices.

Track ``steps`` shows what the rank computed, ``waiting`` the time it lost to communication after a backward and to
parameters in flight. ``communication`` has a slice for each bucket from its start until it was reduced, ``gathers`` one
for each bucket whose new parameters are in flight. Several buckets may be in flight at once, and slices of one track
must not overlap partially; so a track may have several lanes, all with the same name.

The package perfetto, an extra, has the format; it is imported when a trace is written.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import whole_file
from gradsync.observe.explain.merging import on_one_clock
from gradsync.observe.recording import BucketPart, Header, Recording, Step

__all__ = ["COMMUNICATION", "GATHERS", "STEPS", "Slice", "Track", "tracks_by_rank", "write_trace"]

STEPS, COMMUNICATION, GATHERS, WAITING = "steps", "communication", "gathers", "waiting"
# Spans that are time lost, and what a reader is told that it is lost to.
LOST = {"synchronization": "for communication", "gather": "for parameters"}
MOST_NAMES = 20
NANOSECONDS = 1e9

Value = str | int | float | list[str]
VALUE_FIELDS = {str: "string_value", int: "int_value", float: "double_value"}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A time range from ``begin`` to ``end``, on rank 0's clock. Slices of all ranks with one ``flow`` are one
    collective.

    ``inner`` slices lie inside it, one after another.
    """

    name: str
    begin: float
    end: float
    values: dict[str, Value] = field(default_factory=dict)
    flow: tuple[int, ...] | None = None
    inner: tuple["Slice", ...] = ()


# The slices of a track, which do not overlap, in order; with the name that all lanes of one track have.
Track = tuple[str, list[Slice]]


def _by_rank(recordings: Sequence[Recording]) -> dict[int, list[tuple[Recording, list[Step]]]]:
    """The models of each rank that have a step, with their steps on one clock."""
    recorded = [each for each in recordings if each.steps]
    ranks: dict[int, list[tuple[Recording, list[Step]]]] = {}
    for model in sorted({each.header.model for each in recorded}):
        alike = sorted((each for each in recorded if each.header.model == model), key=lambda each: each.header.rank)
        for recording, steps in zip(alike, on_one_clock(alike), strict=True):
            ranks.setdefault(recording.header.rank, []).append((recording, steps))
    return dict(sorted(ranks.items()))


def _tracks(recording: Recording, steps: Sequence[Step], *, several: bool) -> Iterator[Track]:
    """The tracks of one model from top to bottom; those of ``several`` models are told apart by their names."""
    model = recording.header.model
    prefix = f"{recording.header.name or 'model'} {model}: " if several else ""
    tracks: dict[str, list[Slice]] = {STEPS: [], WAITING: [], COMMUNICATION: [], GATHERS: []}
    for step in steps:
        layout = recording.layouts[step.layout] if step.layout < len(recording.layouts) else ()
        tracks[STEPS].append(_computed(step))
        tracks[WAITING] += [
            Slice(name=LOST[span.name], begin=span.begin, end=span.end, values={"step": step.number})
            for span in step.spans
            if span.name in LOST
        ]
        tracks[COMMUNICATION] += _collectives(step, layout, model)
        tracks[GATHERS] += _gathered(step, layout, model)
    for name, slices in tracks.items():
        yield from ((prefix + name, lane) for lane in _lanes(slices))


def tracks_by_rank(recordings: Sequence[Recording]) -> list[tuple[Header, list[Track]]]:
    """The tracks of each rank, all on rank 0's clock."""
    return [
        (models[0][0].header, [track for model in models for track in _tracks(*model, several=len(models) > 1)])
        for models in _by_rank(recordings).values()
    ]


def _computed(step: Step) -> Slice:
    return Slice(
        name=f"step {step.number}",
        begin=step.begin,
        end=step.end,
        values={"micro-batches": step.micro_batches, "collectives": step.collectives},
        inner=tuple(
            Slice(name=span.name, begin=max(span.begin, step.begin), end=min(span.end, step.end))
            for span in step.spans
            if span.name not in LOST
        ),
    )


def _collectives(step: Step, layout: Sequence[BucketPart], model: int) -> Iterator[Slice]:
    for number, synchronization in enumerate(step.synchronizations):
        for bucket in synchronization.buckets:
            values: dict[str, Value] = {"step": step.number, "bucket": bucket.index, **_part(layout, bucket.index)}
            if bucket.ready is not None:
                values["ready before start, µs"] = round((bucket.start - bucket.ready) * 1e6, 1)
            yield Slice(
                name=f"bucket {bucket.index}",
                begin=bucket.start,
                end=max(synchronization.end_of(bucket), bucket.start),
                values=values,
                flow=(0, model, step.number, number, bucket.index),
            )


def _gathered(step: Step, layout: Sequence[BucketPart], model: int) -> Iterator[Slice]:
    for gather in step.gathers:
        end = next((each for each in (gather.end, gather.arrived) if each is not None), gather.start)
        values: dict[str, Value] = {"step": step.number, "bucket": gather.index, **_part(layout, gather.index)}
        values["bytes"] = gather.nbytes
        if gather.needed is not None and gather.arrived is not None:
            values["waited for, µs"] = round((gather.arrived - gather.needed) * 1e6, 1)
        yield Slice(
            name=f"gather {gather.index}",
            begin=gather.start,
            end=max(end, gather.start),
            values=values,
            flow=(1, model, step.number, 0, gather.index),
        )


def _part(layout: Sequence[BucketPart], index: int) -> dict[str, Value]:
    if index >= len(layout):
        return {}
    names, more = list(layout[index].parameters[:MOST_NAMES]), len(layout[index].parameters) - MOST_NAMES
    return {"bytes": layout[index].nbytes, "parameters": [*names, *([f"and {more} more"] if more > 0 else [])]}


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Spread slices over lanes, each on the first that is free when it begins."""
    lanes: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: (each.begin, each.end)):
        free = next((lane for lane in lanes if lane[-1].end <= each.begin), None)
        if free is None:
            lanes.append(free := [])
        free.append(each)
    return lanes


# -- the file ---------------------------------------------------------------------------------------------------------


def write_trace(recordings: Sequence[Recording], path: str | os.PathLike[str]) -> int:
    """Write one trace of all ranks. Returns the number of its slices."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as format_of
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder as Builder
    except ImportError as error:
        raise ConfigurationError(
            f"a Perfetto trace needs the package perfetto ({error}): pip install 'gradsync[trace]'"
        ) from error
    ranks = tracks_by_rank(recordings)
    begins = [lane[0].begin for _, tracks in ranks for _, lane in tracks]
    if not begins:
        raise ConfigurationError(
            "the recordings hold no step yet, so there is nothing to draw: a step is over when the next forward begins"
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        writer = _Writer(Builder(file), format_of, origin=min(begins))
        for header, tracks in ranks:
            writer.write_rank(header, tracks)
    return writer.written


class _Writer:
    """Writes packets, track after track. Each track is a sequence of its own, in which time never goes back."""

    def __init__(self, builder: Any, format_of: Any, *, origin: float) -> None:
        self._builder, self._format, self._origin = builder, format_of, origin
        # Of tracks and sequences; 0 means none.
        self._numbers = itertools.count(1)
        self._flows: dict[tuple[int, ...], int] = {}
        self.written = 0

    def write_rank(self, header: Header, tracks: Sequence[Track]) -> None:
        number = next(self._numbers)
        packet = self._builder.create_packet()
        descriptor = packet.track_descriptor
        descriptor.uuid = number
        # Processes of several hosts may have the same, and 0 is the kernel's.
        descriptor.process.pid = header.rank + 1
        descriptor.process.process_name = f"rank {header.rank} on {header.host}"
        descriptor.process.process_labels.extend([f"process {header.process}", header.device])
        descriptor.process.legacy_sort_index = header.rank
        descriptor.child_ordering = self._format.TrackDescriptor.ChildTracksOrdering.EXPLICIT
        self._builder.write_packet(packet)
        for place, (name, slices) in enumerate(tracks):
            uuid = next(self._numbers)
            packet = self._builder.create_packet()
            packet.track_descriptor.uuid = uuid
            packet.track_descriptor.parent_uuid = number
            packet.track_descriptor.name = name
            packet.track_descriptor.sibling_order_rank = place
            self._builder.write_packet(packet)
            for each in slices:
                self._write_slice(each, uuid)

    def _write_slice(self, each: Slice, track: int) -> None:
        packet = self._event(track, each.begin, "TYPE_SLICE_BEGIN")
        event = packet.track_event
        event.name = each.name
        if each.flow is not None:
            event.flow_ids.append(self._flows.setdefault(each.flow, len(self._flows) + 1))
        for name, value in each.values.items():
            annotation = event.debug_annotations.add(name=name)
            if isinstance(value, list):
                for text in value:
                    annotation.array_values.add(string_value=text)
            else:
                setattr(annotation, VALUE_FIELDS[type(value)], value)
        self._builder.write_packet(packet)
        for inner in each.inner:
            self._write_slice(inner, track)
        self._builder.write_packet(self._event(track, each.end, "TYPE_SLICE_END"))
        self.written += 1

    def _event(self, track: int, moment: float, kind: str) -> Any:
        packet = self._builder.create_packet()
        packet.timestamp = round((moment - self._origin) * NANOSECONDS)
        packet.trusted_packet_sequence_id = track
        packet.track_event.type = self._format.TrackEvent.Type.Value(kind)
        packet.track_event.track_uuid = track
        return packet
