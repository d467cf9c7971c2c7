"""Numbers of an accelerator on their way to the host, which goes on meanwhile."""

import torch

__all__ = ["HostCopy", "reads_at_once"]


class HostCopy:
    """What ``numbers`` are now, to be read later."""

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
    """Whether the host may read what came over the wire: on an accelerator it would stop, and run ahead no more."""
    return device.type == "cpu"
