"""Collectives and stages on accelerator tensors: ordered by streams, so that the host never waits.

A stage is called at once. Its kernels are queued on a separate stream, which waits for the collective and for what the
caller had queued on its stream; waiting for the stage makes the current stream wait for the separate one.

[Note: memory over streams] torch's allocator gives memory that the host has released to the next allocation on the
stream where it was allocated, its *home*. It does not know about other streams that may still use it. torch.distributed
holds the tensors of a collective only until it is waited for, on whichever stream that happens. So where a stage's
stream waits and the home stream does not, memory would be reused while the collective is still reading it.

The rule, which only this file needs to know: **a handle keeps whatever its work uses until the stream on which the work
was started has waited for it.** That covers the tensors of a collective; the stage with everything it refers to; and
the handles before it. So a stage may use what its caller allocated, and start collectives on what it allocated itself,
without considering streams. Three things make the rule complete:

- A stage's stream serves only one caller's stream, and waits for it before each stage. Memory that a stage allocated
  and the caller has read since is not reused before the caller's stream is done with it.
- A handle that is released before its home stream has waited for it (because its window failed) leaves what it keeps
  here, until the device is done with it.
- Nothing else is allocated for work on a different stream.

``GRADSYNC_POISON=1`` makes violations visible: whenever a collective is waited for, as much memory as its tensors use
is allocated on their home stream and filled with NaN, which overwrites memory that was released too early. It is slow.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsync.communicator.background import call_back
from gradsync.communicator.base import Handle, Stage
from gradsync.communicator.collective import Collective, Owner, StageHandle, Work

__all__ = ["POISON_VARIABLE", "DeviceClock", "DeviceCollective", "DeviceWork"]


class DeviceClock:
    """Calling it returns an event on the stream that is current on ``device``.

    Asking torch for that stream takes longer than recording an event. Its id is at hand, and there are few streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._spare: list[Any] = []

    def __call__(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        number = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = torch.cuda.current_stream(self._device)
        event.record(stream)
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """What the device took from the one event to the other, which are given back. The host waits for the latter."""
        ended.synchronize()
        seconds: float = began.elapsed_time(ended) / 1e3
        self.reuse(began)
        self.reuse(ended)
        return seconds

    def reuse(self, event: Any) -> None:
        """Keep an event that nobody asks for any more, to use it again: making another takes longer."""
        self._spare.append(event)


POISON_VARIABLE = "GRADSYNC_POISON"
# Bytes that are NaN in every floating-point type, and far from any sensible whole number.
POISON = 0xFF

_poisons = os.environ.get(POISON_VARIABLE, "") not in ("", "0")

# The stream of the stages of each stream, by the number that CUDA has for the latter. One of those has itself.
_stage_streams: dict[tuple[int, int], Any] = {}

# What handles kept that were let go too early, each with what says that the device is done with it.
_left_over: list[tuple[Callable[[], bool], object]] = []


def _current(device: torch.device) -> tuple[int, int]:
    """The device and its current stream, as numbers: asking for the stream object takes ten times as long."""
    if device.type != "cuda":
        return -1, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch._C._cuda_getCurrentRawStream(index)


def _stage_stream(device: torch.device) -> Any:
    """The stream for stages of what is on the current stream."""
    key = _current(device)
    if key not in _stage_streams:
        stream = torch.cuda.Stream(device)
        _stage_streams[key] = _stage_streams[key[0], stream.cuda_stream] = stream
    return _stage_streams[key]


class _Kept:
    """References to what the work on a device uses. See [Note: memory over streams]."""

    __slots__ = ("_device", "_home", "_is_done", "_things")

    def __init__(self, device: torch.device, is_done: Callable[[], bool], things: object) -> None:
        self._things: object = None
        self._device, self._is_done = device, is_done
        self._home = _current(device)
        self._things = things
        if _left_over and not torch.cuda.is_current_stream_capturing():
            _sweep()

    def waited(self) -> None:
        """The current stream waits for the work from now on."""
        if self._things is not None and _current(self._device) == self._home:
            self._things = None

    def __del__(self) -> None:
        if self._things is not None:
            _left_over.append((self._is_done, self._things))


def _sweep() -> None:
    # A new list in one go: another thread may be adding to it.
    done = [each for each in list(_left_over) if _says_done(each[0])]
    for each in done:
        _left_over.remove(each)


def _says_done(is_done: Callable[[], bool]) -> bool:
    try:
        return is_done()
    except Exception:
        # A device that has failed uses nothing any more.
        return True


class DeviceWork:
    """A ``Work`` of torch on ``tensors`` of a device."""

    __slots__ = ("_kept", "_poisoned", "_work")

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._work = work
        self._kept = _Kept(tensors[0].device, work.is_completed, tensors)
        self._poisoned = _Poison(tensors) if _poisons and tensors[0].is_cuda else None

    def wait(self) -> None:
        self._work.wait()
        self._kept.waited()
        if self._poisoned is not None:
            self._poisoned.spread()

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def when_done(self, callback: Callable[[], None]) -> None:
        self._work.get_future().then(lambda _: call_back(callback))

    def outcome(self) -> Any:
        """The future of how it ends, without tensors. RuntimeError where the backend has none."""
        return self._work.get_future_result()


class _Poison:
    """Memory of the sizes of ``tensors``, on their home stream, to be overwritten."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._home = torch.cuda.current_stream(tensors[0].device)
        self._device = tensors[0].device
        self._sizes = sorted({tensor.untyped_storage().nbytes() for tensor in tensors})

    def spread(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.stream(self._home):
            # All at once: one that is let go would be handed out again in place of the next.
            taken = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes * 2]
            for memory in taken:
                memory.fill_(POISON)


class DeviceCollective(Collective):
    """A collective whose tensors are on ``device``."""

    __slots__ = ("_device",)

    def __init__(self, communicator: Owner, collective: Collective, device: torch.device) -> None:
        super().__init__(communicator, collective.kind, collective.detail, collective.numel, collective.dtype)
        self._device = device

    def then(self, stage: Stage) -> Handle:
        return _call_stage(self, stage, self._device)


class _DeviceStage(StageHandle):
    """A stage whose kernels are on ``device``."""

    __slots__ = ("_device",)

    def __init__(self, communicator: Owner, first: Handle, device: torch.device) -> None:
        super().__init__(communicator, first)
        self._device = device

    def then(self, stage: Stage) -> Handle:
        return _call_stage(self, stage, self._device)


def _call_stage(first: Collective, stage: Stage, device: torch.device) -> Handle:
    handle = _DeviceStage(first.communicator, first, device)

    def run() -> Work | None:
        if device.type != "cuda":
            return handle.call(first, stage)
        stream = _stage_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            started = handle.call(first, stage)
            if started is not None:
                started.wait()
            event = torch.cuda.Event()
            event.record(stream)
        return _OnStream(event, device, (stage, first, started))

    with torch.no_grad():
        handle.begin(run)
    return handle


class _OnStream:
    """Work that completes when ``event`` does, and uses ``things`` until then."""

    __slots__ = ("_device", "_event", "_kept")

    def __init__(self, event: Any, device: torch.device, things: object) -> None:
        self._event, self._device = event, device
        self._kept = _Kept(device, event.query, things)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._kept.waited()

    def done(self) -> bool:
        return bool(self._event.query())

    def when_done(self, callback: Callable[[], None]) -> None:
        stream = _stage_stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._event)
            callback()
