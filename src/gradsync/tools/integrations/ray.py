"""``GradsyncConfig`` for the ``TorchTrainer`` of Ray Train.

Ray starts the ranks, creates their process group and starts them again after a failure, from the last checkpoint, on as
many workers as there are. While a training function runs, ``ray.train.torch.prepare_model`` wraps in gradsync's class;
a training function need not change. The class is exchanged in the worker that runs the function, and put back after it.
"""

import functools
import sys
from typing import Any, Unpack

import ray.train.torch
from ray.train.torch.config import TorchConfig
from torch import nn

from gradsync.core.engine.policy import PolicySettings, SyncPolicy
from gradsync.parallel.data_parallel import DistributedDataParallel

__all__ = ["GradsyncConfig"]

NAME = "DistributedDataParallel"


class GradsyncConfig(TorchConfig):
    """Has a ``TorchTrainer`` train with gradsync: ``TorchTrainer(train, torch_config=GradsyncConfig(), …)``.

    backend, init_method, timeout_s
        of the process group, as in Ray's ``TorchConfig``.
    policy
        how gradients are averaged; see :class:`gradsync.SyncPolicy`. Its fields are also keyword arguments, such as
        ``reduction``, ``on_bad_step`` and ``replica_check``. Workers get a copy, so it must be possible to pickle it.

    Arguments that a training function passes to ``prepare_model`` as ``parallel_strategy_kwargs`` come before these.
    """

    def __init__(
        self,
        backend: str | None = None,
        init_method: str = "env",
        timeout_s: int = 1800,
        *,
        policy: SyncPolicy | None = None,
        **settings: Unpack[PolicySettings],
    ) -> None:
        super().__init__(backend, init_method, timeout_s)
        SyncPolicy.chosen(policy, settings, wrapper=type(self).__name__)
        self.options: dict[str, Any] = {**settings, **({} if policy is None else {"policy": policy})}

    @property
    def train_func_context(self) -> Any:
        return functools.partial(_InTrainingFunction, super().train_func_context, self.options)


class _InTrainingFunction:
    """The context, in a worker, in which Ray runs a training function."""

    def __init__(self, rays_context: Any, options: dict[str, Any]) -> None:
        self._rays = rays_context()
        self._options = options
        # Where Ray looks its wrapper up.
        self._module: Any = sys.modules[ray.train.torch.prepare_model.__module__]

    def __enter__(self) -> None:
        self._rays.__enter__()
        self._before = getattr(self._module, NAME)
        setattr(self._module, NAME, self._wrap)

    def __exit__(self, *error: Any) -> None:
        setattr(self._module, NAME, self._before)
        self._rays.__exit__(*error)

    @property
    def _wrap(self) -> Any:
        @functools.wraps(DistributedDataParallel, updated=())
        def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
            return DistributedDataParallel(module, **{**self._options, **options})

        return wrap
