"""Averages floating-point buffers, such as batch norm statistics, whenever the whole model was sent.

Counters and masks have no mean; each rank keeps its own.
"""

import torch

from gradsync.communicator import Communicator
from gradsync.core.bucket import ParameterSpec
from gradsync.core.reduction import Mean
from gradsync.optim.local_steps.exchange import Exchange, put_down
from gradsync.parallel.replica import Replica

__all__ = ["AveragedBuffers"]


class AveragedBuffers:
    """The buffers of ``replica`` that have a mean. Modules may replace them by other tensors of the same shape."""

    def __init__(self, replica: Replica, communicator: Communicator) -> None:
        self._replica = replica
        named = {name: each for name, each in replica.named_buffers.items() if each.is_floating_point()}
        self._specs = [ParameterSpec.of(name, buffer) for name, buffer in named.items()]
        self._sent: list[torch.Tensor] | None = None
        self._exchange: Exchange | None = None
        if named:
            runs = [range(len(named))]
            self._exchange = Exchange(list(named.values()), self._specs, runs, Mean(), communicator)

    def start(self, *, keep: bool) -> bool:
        """Start sending them; False if there are none. ``keep``: they change before they are merged."""
        if self._exchange is None:
            return False
        buffers = self._current()
        self._sent = [buffer.clone() for buffer in buffers] if keep else None
        self._exchange.start([0], buffers, None)
        return True

    def wait(self) -> None:
        """Wait for the means."""
        assert self._exchange is not None
        self._exchange.wait()

    def finish(self) -> None:
        """Write the means back, and add what has been learned since they were sent."""
        assert self._exchange is not None
        sent, self._sent = self._sent, None
        means = self._exchange.results([0])
        for index, buffer in enumerate(self._current()):
            put_down(buffer, means[index], None if sent is None else sent[index])

    def _current(self) -> list[torch.Tensor]:
        named = self._replica.named_buffers
        return [named[spec.name] for spec in self._specs]

    @property
    def misfit(self) -> str | None:
        """What keeps them from being averaged, in words: one has a different shape now, or is gone."""
        named = self._replica.named_buffers
        for spec in self._specs:
            found = named.get(spec.name)
            if found is None or tuple(found.shape) != spec.shape:
                came = "is gone" if found is None else f"has shape {tuple(found.shape)} now"
                return f"buffer {spec.name!r}, of shape {spec.shape} when LocalSteps was made, {came}"
        return None
