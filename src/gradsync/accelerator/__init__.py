"""The Accelerator and the objects that configure it."""

from gradsync.accelerator.accelerator import Accelerator
from gradsync.accelerator.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from gradsync.accelerator.plugins import DataLoaderConfiguration, GradientAccumulationPlugin, ProjectConfiguration

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
]
