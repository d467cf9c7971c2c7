"""What ranks exchange once per step: the loss, and whether any of them was asked to stop.

It is one small collective per step, read after the next step has been computed, so that no rank waits for it. All ranks
read the same answer at the same step: a signal that reaches them at different times stops them together.
"""

from dataclasses import dataclass

import torch

from gradsync.communicator import Communicator, Handle

__all__ = ["Heartbeat", "Pulse"]


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """A step, over all ranks. ``signal`` is the number of the signal that asks to stop, or 0."""

    loss: float
    tokens: int
    signal: int


class Heartbeat:
    """Sends this rank's part of a step, and reads the one before."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent: tuple[torch.Tensor, torch.Tensor, list[Handle]] | None = None

    def beat(self, loss_times_tokens: torch.Tensor | float, tokens: int, signal: int) -> Pulse | None:
        """Send a step; returns the step before it."""
        previous = self.read()
        device = self._communicator.device
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        numbers[0] = torch.as_tensor(loss_times_tokens, dtype=torch.float64).detach().to(device)
        numbers[1].fill_(tokens)
        flag = torch.full((1,), signal, dtype=torch.int32, device=device)
        handles = [self._communicator.all_reduce(numbers), self._communicator.all_reduce(flag, "max")]
        self._sent = (numbers, flag, handles)
        return previous

    def read(self) -> Pulse | None:
        """The step that was sent last and not yet read. Waits for it."""
        if self._sent is None:
            return None
        (numbers, flag, handles), self._sent = self._sent, None
        for handle in handles:
            handle.wait()
        total, tokens = numbers.tolist()
        loss = total / tokens if tokens else float("nan")
        return Pulse(loss=loss, tokens=int(tokens), signal=int(flag.item()))
