"""Decides which micro-batch ends a window: counted separately for every set of models, unless they share one count.

A generator and a discriminator that accumulate in the same loop have one window each; neither shortens the other's. The
last batch of the loader being iterated ends all windows, whatever their count.

[Note: local SGD] Accelerate's ``LocalSGD`` enters ``no_sync()`` of the prepared model for the whole training, lets
optimizers step on each rank's local gradients, and averages by ``accelerator.reduce(parameter.data, "mean")``, the last
time before it leaves. The same steps without the averaging are a common mistake: replicas drift apart. While they
happen, the two look alike. So the steps are allowed and remembered, and leaving ``no_sync()`` raises unless the
parameters were averaged. Only the model's own ``no_sync()`` allows them. In ``accelerator.no_sync(model)``, which is
for accumulating, a step is refused at once.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from gradsync.accelerator.settings import GradientAccumulationPlugin
from gradsync.base.errors import MisuseError
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.parallel.accumulation import Accumulation, MicroBatches, framed

__all__ = ["GradientState", "LocalTraining", "ModelWindows"]

LOGGER = logging.getLogger("gradsync")
Batch = TypeVar("Batch")


class GradientState:
    """Shared by an accelerator and everything it has prepared.

    Loaders register themselves while they are iterated; the innermost one is the *active* one. ``end_of_dataloader``
    says that its current batch is its last, on all ranks; ``remainder`` is how many samples of that last global batch
    are real, or -1 when all are.
    """

    def __init__(self) -> None:
        self.sync_gradients = True
        self._loaders: list[Any] = []

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being iterated, or None."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        return self.in_dataloader and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    def enter_dataloader(self, loader: Any) -> None:
        self._loaders.append(loader)

    def leave_dataloader(self, loader: Any) -> None:
        # Only the innermost: a loader may be iterated inside itself.
        for number in reversed(range(len(self._loaders))):
            if self._loaders[number] is loader:
                del self._loaders[number]
                return


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
        """A context in which the model trains by itself."""
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
        """The mean of these tensors over all ranks is being taken; parameters are recognized by their memory."""
        if not any(self._drifted.values()):
            return
        places = {tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}
        for drifted in self._drifted.values():
            for key, parameter in list(drifted.items()):
                if parameter.data_ptr() in places:
                    del drifted[key]


class ModelWindows:
    """The windows of the models of one accelerator."""

    def __init__(self, plugin: GradientAccumulationPlugin, state: GradientState) -> None:
        self.plugin = plugin
        self.num_steps = plugin.num_steps or 1
        # The models of the running micro-batch.
        self.running: list[Accumulation] = []
        self.joining = False
        self.local = LocalTraining()
        self._state = state
        self._counts: dict[tuple[int, ...], int] = {}
        self._ends: dict[int, bool] = {}
        # Micro-batches of the window that ends with the running one, where it is not one of num_steps.
        self._odd_length: int | None = None
        self._warned = False

    @property
    def weighs(self) -> bool:
        """Whether means are over what a window really had. In local SGD only this rank knows that."""
        return self.plugin.divide_by == "window" and not self.local.includes(each.synchronizer for each in self.running)

    def micro_batch(self, models: Sequence[Accumulation]) -> AbstractContextManager[None]:
        """A micro-batch of these models, counted."""
        self._refuse_nesting()
        return self._block(models, self._count(models))

    def window(self, models: Sequence[Accumulation], batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of one whole window; the last of them ends it. Ranks may have different numbers, or none."""
        self._refuse_nesting()
        self._odd_length = None
        return framed(batches, lambda last: self._block(models, last))

    @contextmanager
    def _block(self, models: Sequence[Accumulation], last: bool) -> Iterator[None]:
        synchronizes = last or self._synchronizes_each
        for model in models:
            self._ends[id(model.synchronizer)] = last
        self._state.sync_gradients = last
        self.running = list(models)
        try:
            with ExitStack() as stack:
                if self.weighs:
                    stack.enter_context(MicroBatches(models, last=last, synchronizes=synchronizes))
                elif not synchronizes:
                    for model in models:
                        stack.enter_context(model.synchronizer.switched(enabled=False))
                yield
        finally:
            self.running = []

    @property
    def _synchronizes_each(self) -> bool:
        """``sync_each_batch``, but not where ranks may have different numbers of micro-batches in a window."""
        uneven = self._state.in_dataloader and self._state.active_dataloader.uneven
        return self.plugin.sync_each_batch and not uneven

    def _refuse_nesting(self) -> None:
        if self.joining:
            raise MisuseError(
                "accumulate() inside join_uneven_inputs(): ranks with different numbers of batches would disagree on "
                "where windows end. accumulate() needs no join: prepare the loader with even_batches=False instead"
            )
        if self.running:
            raise MisuseError(
                "accumulate() was entered inside accumulate(). Name all models in one call, accumulate(a, b), or leave "
                "the first block before the second"
            )

    def _count(self, models: Sequence[Accumulation]) -> bool:
        """Whether the micro-batch that begins is the last of its window."""
        shared = self.plugin.windows == "shared"
        key = () if shared else tuple(sorted(id(model.synchronizer) for model in models))
        count = self._counts.get(key, 0) + 1
        self._odd_length = None
        last = count >= self.num_steps
        if self.plugin.sync_with_dataloader and self._state.in_dataloader:
            loader = self._state.active_dataloader
            last = loader.closes_window(self.num_steps) if loader.uneven else last or self._state.end_of_dataloader
        self._counts[key] = 0 if last else count
        if last and count != self.num_steps:
            self._odd_length = count
        return last

    def warn_if_short(self) -> None:
        """Log, once, before a backward without a weight, that Accelerate would divide this window by another number."""
        if self._odd_length is None or self._warned:
            return
        self._warned = True
        LOGGER.warning(
            "a window ends after %d of %d micro-batches. Its gradient is their mean; Accelerate divides by %d whatever "
            "the window had. GradientAccumulationPlugin.like_accelerate(%d) does as Accelerate (said once)",
            self._odd_length,
            self.num_steps,
            self.num_steps,
            self.num_steps,
        )

    def end_for(self, synchronizers: Sequence[Synchronizer]) -> bool:
        """Whether an optimizer of these models may step now."""
        known = [self._ends[id(synchronizer)] for synchronizer in synchronizers if id(synchronizer) in self._ends]
        return all(known) if known else self._state.sync_gradients

    def may_zero(self, synchronizers: Sequence[Synchronizer]) -> bool:
        """Whether zeroing their gradients would lose nothing that a window still needs."""
        if not self.weighs and not self.end_for(synchronizers):
            return False
        return all(synchronizer.window.may_zero for synchronizer in synchronizers)

    def counts(self, synchronizers: Sequence[Synchronizer]) -> list[tuple[list[int], int]]:
        """The position of each set of models in its window, by index in ``synchronizers``."""
        place = {id(synchronizer): number for number, synchronizer in enumerate(synchronizers)}
        return [
            (sorted(place[key] for key in keys), count)
            for keys, count in self._counts.items()
            if all(key in place for key in keys)
        ]

    def load_counts(self, synchronizers: Sequence[Synchronizer], counts: Sequence[tuple[list[int], int]]) -> None:
        """Continue from the result of :meth:`counts`."""
        self.forget()
        for places, count in counts:
            self._counts[tuple(sorted(id(synchronizers[place]) for place in places))] = count

    def forget(self) -> None:
        """Restart all windows."""
        self._counts.clear()
        self._ends.clear()
        self._state.sync_gradients = True
