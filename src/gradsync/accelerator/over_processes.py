"""The Accelerator's collectives: tensors over all processes, and a flag that any process may raise for all."""

from typing import Any

import torch

from gradsync.accelerator import operations
from gradsync.accelerator.gradient_state import GradientState
from gradsync.accelerator.model_windows import ModelWindows
from gradsync.accelerator.process_control import ProcessControl
from gradsync.core.engine.backward_watch import tensors_in

__all__ = ["OverProcesses"]


class OverProcesses(ProcessControl):
    """An Accelerator's operations on the tensors of all processes. All processes must call each method."""

    gradient_state: GradientState
    windows: ModelWindows
    _triggered = False

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, one after the other along the first dimension; also in nested structures."""
        return operations.gather(self.communicator, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """:meth:`gather` without the samples that only completed the last batch: each sample of the data once.

        What is no structure of tensors alone must be a list with an element a sample.
        """
        state = self.gradient_state
        return operations.gather_for_metrics(self.communicator, input_data, state, objects=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, or mean, of tensors over all processes."""
        if reduction == "mean":
            self.windows.local.averaged(tensors_in(tensor))
        return operations.reduce(self.communicator, tensor, reduction, scale)  # type: ignore[arg-type]

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors made as long in ``dim`` as the longest of all processes."""
        return operations.pad_across_processes(self.communicator, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise the flag that :meth:`check_trigger` asks for: here alone, at any time."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any process has raised its flag since the last time; all flags go down again."""
        flag = torch.tensor([int(self._triggered)], device=self.communicator.device)
        self.communicator.all_reduce(flag, "max").wait()
        self._triggered = False
        return bool(flag.item())
