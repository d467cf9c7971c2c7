"""Asynchronous copy of numbers from an accelerator to the host."""

import torch

__all__ = ["HostCopy", "reads_at_once"]


class HostCopy:
    """A copy of the current values of ``numbers``, to be read later."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[float]:
        self._event.synchronize()
        numbers: list[float] = self._copy.tolist()
        return numbers


def reads_at_once(device: torch.device) -> bool:
    """Whether the host may read what was received: on an accelerator it would wait, and no longer run ahead."""
    return device.type == "cpu"
