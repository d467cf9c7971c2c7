"""Writes tracks to a file that ui.perfetto.dev opens. The package perfetto, an extra, has the format; imported here."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gradsync.base.errors import ConfigurationError
from gradsync.base.files import whole_file
from gradsync.observe.recording import Recording
from gradsync.observe.trace.tracks import Process, Slice, Value, processes_of

__all__ = ["write_trace"]

NANOSECONDS = 1e9


def write_trace(recordings: Sequence[Recording], path: str | os.PathLike[str]) -> int:
    """Write one trace of all ranks. Returns the number of its slices."""
    builder_kind, format_of = _perfetto()
    processes = processes_of(recordings)
    slices = [each for process in processes for track in process.tracks for each in track.slices]
    if not slices:
        raise ConfigurationError(
            "the recordings hold no step yet, so there is nothing to draw: a step is over when the next forward begins"
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        writer = _Writer(file, builder_kind, format_of, origin=min(each.begin for each in slices))
        for process in processes:
            writer.write_process(process)
    return writer.written


def _perfetto() -> tuple[Any, Any]:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise ConfigurationError(
            f"a Perfetto trace needs the package perfetto ({error}): pip install 'gradsync[trace]'"
        ) from error
    return StreamingTraceProtoBuilder, perfetto_trace_pb2


class _Writer:
    """Packets, track after track. Each track is a sequence of its own, in which time never goes back."""

    def __init__(self, file: BinaryIO, builder_kind: Any, format_of: Any, *, origin: float) -> None:
        self._builder = builder_kind(file)
        self._format = format_of
        self._origin = origin
        # Of tracks and sequences; 0 means none.
        self._numbers = itertools.count(1)
        self._flows: dict[tuple[int, ...], int] = {}
        self.written = 0

    def write_process(self, process: Process) -> None:
        number = next(self._numbers)
        packet = self._builder.create_packet()
        descriptor = packet.track_descriptor
        descriptor.uuid = number
        # Processes of several hosts may have the same, and 0 is the kernel's.
        descriptor.process.pid = process.rank + 1
        descriptor.process.process_name = process.name
        descriptor.process.process_labels.extend(process.labels)
        descriptor.process.legacy_sort_index = process.rank
        descriptor.child_ordering = self._format.TrackDescriptor.ChildTracksOrdering.EXPLICIT
        self._builder.write_packet(packet)
        for place, track in enumerate(process.tracks):
            uuid = next(self._numbers)
            packet = self._builder.create_packet()
            packet.track_descriptor.uuid = uuid
            packet.track_descriptor.parent_uuid = number
            packet.track_descriptor.name = track.name
            packet.track_descriptor.sibling_order_rank = place
            self._builder.write_packet(packet)
            for slice_ in track.slices:
                self._write_slice(slice_, uuid)

    def _write_slice(self, slice_: Slice, track: int) -> None:
        packet = self._event(track, slice_.begin, "TYPE_SLICE_BEGIN")
        event = packet.track_event
        event.name = slice_.name
        if slice_.flow is not None:
            event.flow_ids.append(self._flows.setdefault(slice_.flow, len(self._flows) + 1))
        for name, value in slice_.values.items():
            self._annotate(event.debug_annotations.add(), name, value)
        self._builder.write_packet(packet)
        for inner in slice_.inner:
            self._write_slice(inner, track)
        self._builder.write_packet(self._event(track, slice_.end, "TYPE_SLICE_END"))
        self.written += 1

    def _event(self, track: int, moment: float, kind: str) -> Any:
        packet = self._builder.create_packet()
        packet.timestamp = round((moment - self._origin) * NANOSECONDS)
        packet.trusted_packet_sequence_id = track
        packet.track_event.type = self._format.TrackEvent.Type.Value(kind)
        packet.track_event.track_uuid = track
        return packet

    def _annotate(self, annotation: Any, name: str, value: Value) -> None:
        annotation.name = name
        if isinstance(value, list):
            for each in value:
                annotation.array_values.add().string_value = each
        elif isinstance(value, str):
            annotation.string_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        else:
            annotation.double_value = value
