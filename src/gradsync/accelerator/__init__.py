"""The Accelerator and the objects that configure it."""

from gradsync.accelerator.accelerator import Accelerator
from gradsync.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from gradsync.accelerator.plugins import DataLoaderConfiguration, GradientAccumulationPlugin

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
]
