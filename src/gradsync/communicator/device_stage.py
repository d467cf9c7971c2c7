"""Collectives on tensors of an accelerator: ordered by streams, so that the host never waits.

A stage is called at once. Its kernels are put on a stream of their own, which waits for the collective and for what the
caller had put on its stream; whoever waits for the stage has its current stream wait for that one.
"""

from collections.abc import Callable
from typing import Any

import torch

from gradsync.communicator.base import Handle, Stage
from gradsync.communicator.collective import Collective, Owner, StageHandle, Work

__all__ = ["DeviceCollective"]

# One for every device: what a stage allocates is used again by later ones, in the order of the stream.
_streams: dict[torch.device, Any] = {}


def _stream_of(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class DeviceCollective(Collective):
    """A collective whose tensors are on ``device``."""

    __slots__ = ("_device",)

    def __init__(self, wire: Owner, collective: Collective, device: torch.device) -> None:
        super().__init__(wire, collective.kind, collective.detail, collective.numel, collective.dtype)
        self._device = device

    def then(self, stage: Stage) -> Handle:
        return _call_stage(self, stage, self._device)


class _DeviceStage(StageHandle):
    """A stage whose kernels are on ``device``."""

    __slots__ = ("_device",)

    def __init__(self, wire: Owner, first: Handle, device: torch.device) -> None:
        super().__init__(wire, first)
        self._device = device

    def then(self, stage: Stage) -> Handle:
        return _call_stage(self, stage, self._device)


def _call_stage(first: Collective, stage: Stage, device: torch.device) -> Handle:
    handle = _DeviceStage(first.wire, first, device)

    def run() -> Work | None:
        if device.type != "cuda":
            return handle.call(first, stage)
        stream = _stream_of(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            started = handle.call(first, stage)
            if started is not None:
                started.wait()
            event = torch.cuda.Event()
            event.record(stream)
        return _OnStream(event, device, stage)

    with torch.no_grad():
        handle.begin(run)
    return handle


class _OnStream:
    """What ends when ``event`` does. Holds the stage, and with it the tensors that its kernels use."""

    __slots__ = ("_device", "_event", "_stage")

    def __init__(self, event: Any, device: torch.device, stage: Stage) -> None:
        self._event, self._device, self._stage = event, device, stage

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        return bool(self._event.query())

    def when_done(self, callback: Callable[[], None]) -> None:
        stream = _stream_of(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._event)
            callback()
