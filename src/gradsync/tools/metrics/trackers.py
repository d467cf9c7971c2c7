"""Sinks that write the metrics of one run, on rank 0, for a program that draws them."""

import os
from collections.abc import Mapping

from gradsync.base.extras import import_extra

__all__ = ["TensorBoardSink"]


class TensorBoardSink:
    """Writes TensorBoard events to ``folder``.

    ``first_step`` is that of a run that goes on: TensorBoard hides what was written from there on before.
    """

    def __init__(self, folder: str | os.PathLike[str], *, first_step: int | None = None) -> None:
        package = import_extra("torch.utils.tensorboard", "writing TensorBoard events", "tensorboard")
        self._writer = package.SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
