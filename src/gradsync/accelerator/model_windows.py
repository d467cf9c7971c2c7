"""Which micro-batch ends a window: counted for every set of models by itself.

A generator and a discriminator that accumulate in the same loop have a window each; neither shortens the other's. The
last batch of the loader that is being iterated ends all of them, whatever their count.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from gradsync.accelerator.gradient_state import GradientState
from gradsync.accelerator.plugins import GradientAccumulationPlugin
from gradsync.accumulation import Accumulation, MicroBatch
from gradsync.errors import MisuseError
from gradsync.synchronizer import Synchronizer

__all__ = ["ModelWindows"]


class ModelWindows:
    """The windows of the models of one accelerator."""

    def __init__(self, plugin: GradientAccumulationPlugin, state: GradientState) -> None:
        self.plugin = plugin
        self.num_steps = plugin.num_steps or 1
        # The models of the running micro-batch.
        self.running: list[Accumulation] = []
        self.joining = False
        self._state = state
        self._counts: dict[tuple[int, ...], int] = {}
        self._ends: dict[int, bool] = {}

    @property
    def weighs(self) -> bool:
        """Whether means are over what a window really had."""
        return self.plugin.divide_by == "window"

    @contextmanager
    def micro_batch(self, models: Sequence[Accumulation]) -> Iterator[None]:
        """A micro-batch of these models."""
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
        last = self._count(models)
        synchronizes = last or self.plugin.sync_each_batch
        for model in models:
            self._ends[id(model.synchronizer)] = last
        self._state.sync_gradients = last
        self.running = list(models)
        try:
            with ExitStack() as stack:
                for model in models:
                    if self.weighs:
                        stack.enter_context(MicroBatch(model, last=last, synchronizes=synchronizes))
                    elif not synchronizes:
                        stack.enter_context(model.no_sync())
                yield
        finally:
            self.running = []

    def _count(self, models: Sequence[Accumulation]) -> bool:
        """Whether the micro-batch that begins is the last of its window."""
        key = tuple(sorted(id(model.synchronizer) for model in models))
        count = self._counts.get(key, 0) + 1
        last = count >= self.num_steps
        if self.plugin.sync_with_dataloader and self._state.in_dataloader:
            loader = self._state.active_dataloader
            last = loader.closes_window(self.num_steps) if loader.uneven else last or self._state.end_of_dataloader
        self._counts[key] = 0 if last else count
        return last

    def end_for(self, synchronizers: Sequence[Synchronizer]) -> bool:
        """Whether an optimizer of these models may step now."""
        known = [self._ends[id(synchronizer)] for synchronizer in synchronizers if id(synchronizer) in self._ends]
        return all(known) if known else self._state.sync_gradients

    def may_zero(self, synchronizers: Sequence[Synchronizer]) -> bool:
        """Whether zeroing their gradients would lose nothing that a window still needs."""
        if not self.weighs:
            return self.end_for(synchronizers)
        return all(synchronizer.window.may_zero for synchronizer in synchronizers)

    def forget(self) -> None:
        """Begin all windows anew."""
        self._counts.clear()
        self._ends.clear()
        self._state.sync_gradients = True
