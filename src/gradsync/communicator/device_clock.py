"""Timestamps on a CUDA device: events, which the device reaches once it has finished all work queued before them."""

from typing import Any

import torch

__all__ = ["DeviceClock"]


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
        """Nobody asks for this one any more: to make another one would take longer."""
        self._spare.append(event)
