"""The Accelerator and the objects that configure it."""

from gradsync.accelerator.accelerator import Accelerator
from gradsync.accelerator.compiling import TorchDynamoPlugin
from gradsync.accelerator.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)

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
    "TorchDynamoPlugin",
]
