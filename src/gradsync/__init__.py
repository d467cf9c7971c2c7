"""gradsync: exact, fast and clear gradient averaging for data-parallel training in PyTorch.

    from gradsync import DistributedDataParallel          # instead of torch.nn.parallel's
    from gradsync import Accelerator                      # instead of accelerate's

``import gradsync`` needs torch and nothing else.
"""

from gradsync.accelerator import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from gradsync.base import __version__
from gradsync.core.engine import ReplicaCheck, SyncPolicy
from gradsync.errors import (
    BadStepError,
    CommunicatorLostError,
    ConfigurationError,
    GradsyncError,
    MismatchError,
    MisuseError,
    PeerFailedError,
)
from gradsync.health.elastic import Elastic
from gradsync.observe.timeline import Timeline
from gradsync.optim.local_steps import LocalSteps
from gradsync.optim.sharded import OverlappedOptimizer, ShardedOptimizer
from gradsync.parallel.attach import GradientSynchronization, synchronize_gradients
from gradsync.parallel.averaging import average_gradients
from gradsync.parallel.clipping import clip_grad_norm_, clip_grad_value_
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.parallel.layer_drop import LayerDrop

__all__ = [
    "Accelerator",
    "BadStepError",
    "CommunicatorLostError",
    "ConfigurationError",
    "DataLoaderConfiguration",
    "DistributedDataParallel",
    "Elastic",
    "GradientAccumulationPlugin",
    "GradientSynchronization",
    "GradsyncError",
    "LayerDrop",
    "LocalSteps",
    "MismatchError",
    "MisuseError",
    "OverlappedOptimizer",
    "PeerFailedError",
    "ReplicaCheck",
    "ShardedOptimizer",
    "SyncPolicy",
    "Timeline",
    "__version__",
    "average_gradients",
    "clip_grad_norm_",
    "clip_grad_value_",
    "synchronize_gradients",
]
