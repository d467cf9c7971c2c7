"""``join_uneven_inputs``: processes with different numbers of batches in one loop, without windows."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from gradsync.accelerator.model_windows import ModelWindows
from gradsync.accelerator.process_control import DistributedType, ProcessControl
from gradsync.accelerator.state_saving import Prepared
from gradsync.base.errors import ConfigurationError

__all__ = ["Joining"]


class Joining(ProcessControl):
    """How an Accelerator behaves when processes run out of batches at different times."""

    even_batches: bool
    prepared: Prepared
    windows: ModelWindows

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Processes in here may have different numbers of batches; those that run out shadow the others.

        Nothing of that is needed, or done, where batches are even; ``even_batches`` changes it for prepared loaders.
        """
        if self.distributed_type not in list(DistributedType):
            warnings.warn(
                "joining uneven inputs is only supported for multi-GPU and multi-CPU training, and distributed_type is "
                f"{self.distributed_type}: join_uneven_inputs() has no effect",
                stacklevel=3,
            )
            yield
            return
        if even_batches is not None and not self.prepared.loaders:
            raise ConfigurationError("even_batches changes prepared loaders, and none has been prepared")
        uneven = not (self.even_batches if even_batches is None else even_batches)
        joined = [each for each in joinables if isinstance(each, Joinable) and self.use_distributed and uneven]
        with ExitStack() as stack:
            if even_batches is not None:
                self._change_loaders(stack, even=even_batches)
            if joined:
                self.windows.joining = True
                stack.callback(setattr, self.windows, "joining", False)
                stack.enter_context(Join(joined, enable=True, throw_on_early_termination=False))
            yield

    def _change_loaders(self, stack: ExitStack, *, even: bool) -> None:
        for loader in self.prepared.loaders:
            stack.enter_context(loader.evening(even))
        if self.use_distributed and any(loader.deals_streams for loader in self.prepared.loaders):
            warnings.warn(
                f"even_batches={even} holds for iterable and dispatched loaders too. In Accelerate overriding it is "
                "only supported for map-style datasets: there these loaders keep what they were prepared with",
                stacklevel=4,
            )
