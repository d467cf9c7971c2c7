"""gradsync: data-parallel gradients for PyTorch, exact, fast and clear.

    from gradsync import DistributedDataParallel          # instead of torch.nn.parallel's
    from gradsync import Accelerator                      # instead of accelerate's

``import gradsync`` needs torch and nothing else.
"""

from gradsync.accelerator import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from gradsync.attach import GradientSynchronization, synchronize_gradients
from gradsync.averaging import average_gradients
from gradsync.clipping import clip_grad_norm_, clip_grad_value_
from gradsync.data_parallel import DistributedDataParallel
from gradsync.elastic import Elastic
from gradsync.engine import Fingerprints, SyncPolicy
from gradsync.errors import (
    ConfigurationError,
    GradsyncError,
    MismatchError,
    MisuseError,
    PeerFailedError,
    VetoError,
    WireLostError,
)
from gradsync.layer_drop import LayerDrop
from gradsync.local_steps import LocalSteps
from gradsync.sharded import OverlappedOptimizer, ShardedOptimizer
from gradsync.timeline import Timeline
from gradsync.version import __version__

__all__ = [
    "Accelerator",
    "ConfigurationError",
    "DataLoaderConfiguration",
    "DistributedDataParallel",
    "Elastic",
    "Fingerprints",
    "GradientAccumulationPlugin",
    "GradientSynchronization",
    "GradsyncError",
    "LayerDrop",
    "LocalSteps",
    "MismatchError",
    "MisuseError",
    "OverlappedOptimizer",
    "PeerFailedError",
    "ShardedOptimizer",
    "SyncPolicy",
    "Timeline",
    "VetoError",
    "WireLostError",
    "__version__",
    "average_gradients",
    "clip_grad_norm_",
    "clip_grad_value_",
    "synchronize_gradients",
]
