"""Local SGD: a model trains on each rank by itself for some steps, then the ranks average its parameters.

Accelerate's ``LocalSGD`` enters ``no_sync()`` of the prepared model for the whole training, lets optimizers step on
each rank's local gradients, and averages by ``accelerator.reduce(parameter.data, "mean")``, the last time before it
leaves. The same steps without the averaging are a common mistake: replicas drift apart. While they happen, the two look
alike. So the steps are allowed and remembered, and leaving ``no_sync()`` raises unless the parameters were averaged.

Only the model's own ``no_sync()`` allows them. In ``accelerator.no_sync(model)``, which is for accumulating, a step is
refused at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from gradsync.base.errors import MisuseError
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.parallel.data_parallel import DistributedDataParallel as Wrapper

__all__ = ["DistributedDataParallel", "LocalTraining"]


class LocalTraining:
    """Tracks which models train locally, and which of their parameters have not been averaged since the last step."""

    def __init__(self) -> None:
        self._drifted: dict[int, dict[int, torch.Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return (LocalTraining, ())

    def includes(self, synchronizers: Iterable[Synchronizer]) -> bool:
        """Whether all of them are models that train by themselves now, and there is one."""
        known = [id(synchronizer) in self._drifted for synchronizer in synchronizers]
        return bool(known) and all(known)

    @contextmanager
    def around(self, synchronizer: Synchronizer) -> Iterator[None]:
        """The model trains by itself in here."""
        if id(synchronizer) in self._drifted:
            yield
            return
        drifted = self._drifted[id(synchronizer)] = {}
        try:
            with synchronizer.switched(enabled=False):
                yield
        finally:
            del self._drifted[id(synchronizer)]
        if drifted:
            raise MisuseError(
                f"optimizers have stepped inside model.no_sync() on gradients of this rank alone, and {len(drifted)} "
                "parameters were not averaged over the ranks since: the replicas differ. Step after a backward outside "
                "no_sync(), or, for local SGD, let accelerate.local_sgd.LocalSGD average the parameters, or write "
                "parameter.data = accelerator.reduce(parameter.data, 'mean') for each before the block ends"
            )

    @contextmanager
    def stepping(self, synchronizers: Sequence[Synchronizer]) -> Iterator[None]:
        """An optimizer of these models steps: those that train by themselves let it, and differ from then on."""
        with ExitStack() as stack:
            for synchronizer in synchronizers:
                if (drifted := self._drifted.get(id(synchronizer))) is not None:
                    stack.enter_context(synchronizer.switched(steps_locally=True))
                    drifted.update((id(each), each) for each in synchronizer.parameters if each.numel())
            yield

    def averaged(self, tensors: Iterable[Any]) -> None:
        """The mean of these tensors over all ranks is being taken; parameters are told by their memory."""
        if not any(self._drifted.values()):
            return
        places = {tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}
        for drifted in self._drifted.values():
            for key, parameter in list(drifted.items()):
                if parameter.data_ptr() in places:
                    del drifted[key]


class DistributedDataParallel(Wrapper):
    """The wrapper that an accelerator prepares: its ``no_sync()`` may contain local SGD."""

    local_training: LocalTraining

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here stay on this rank. Prepared optimizers may step, if the parameters are averaged then."""
        return self.local_training.around(self.synchronizer)
