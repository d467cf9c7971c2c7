"""How ``Accelerator.prepare`` handles a model: moves it to the device, wraps it, connects it to the engine."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradsync.accelerator.comm_hooks import register_named_hook
from gradsync.accelerator.local_training import DistributedDataParallel as PreparedWrapper
from gradsync.accelerator.local_training import LocalTraining
from gradsync.accelerator.precision import Precision
from gradsync.accelerator.world import World
from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.policy import SyncPolicy
from gradsync.parallel.accumulation import Accumulation
from gradsync.parallel.attach import synchronize_gradients
from gradsync.parallel.data_parallel import DistributedDataParallel

__all__ = ["PreparedModels"]

# The wrapper's arguments that the engine without a wrapper has too.
_ENGINE = ("policy", "bucket_cap_mb")

# What names a communication hook, and its defaults.
_HOOK: dict[str, Any] = {"comm_hook": "no", "comm_wrapper": "no", "comm_state_option": {}}


class PreparedModels:
    """The models of one accelerator, each with its engine."""

    def __init__(self, world: World, precision: Precision, local: LocalTraining, options: Mapping[str, Any]) -> None:
        self._world = world
        self._precision = precision
        self._local = local
        self._options = dict(options)
        self._hook = {name: self._options.pop(name) for name in _HOOK if name in self._options}
        self._attachments: dict[int, Accumulation] = {}
        self.prepared: list[nn.Module] = []
        # The same models without a wrapper.
        self.plain: list[nn.Module] = []

    def prepare(self, model: nn.Module, *, place: bool = True, evaluation_mode: bool = False) -> nn.Module:
        """The model to train with: a wrapper, or the model itself in a world of one, where there is nobody to meet."""
        if any(model is prepared for prepared in self.prepared):
            return model
        if id(model) in self._attachments:
            raise ConfigurationError(
                f"this {type(model).__name__} has been prepared already. Use the object that prepare() returned"
            )
        if place and not _is_spread(model):
            model.to(self._world.device)
        self._precision.wrap_forward(model)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            self.prepared.append(model)
            self.plain.append(model)
            return model
        return self._connect(model)

    def _connect(self, model: nn.Module) -> nn.Module:
        ranks = self._world.engine_options
        if isinstance(model, DistributedDataParallel):
            self._remember(model, model, model.module)
            return model
        if self._world.num_processes == 1 and not self._world.is_elastic:
            options = {name: value for name, value in self._options.items() if name in _ENGINE}
            self._remember(model, synchronize_gradients(model, **ranks, **options), model)
            return model
        wrapper = PreparedWrapper(model, **ranks, **self._options | self._fresh_policy)
        wrapper.local_training = self._local
        if self._hook:
            register_named_hook(wrapper, *[self._hook.get(name, default) for name, default in _HOOK.items()])
        self._remember(wrapper, wrapper, model)
        return wrapper

    @property
    def _fresh_policy(self) -> dict[str, SyncPolicy]:
        """Where ranks may come and go, reductions keep nothing of those of before: who comes has nothing of it."""
        policy = self._options.get("policy")
        if not self._world.is_elastic or policy is None:
            return {}
        return {"policy": dataclasses.replace(policy, reduction=copy.deepcopy(policy.reduction))}

    def regroup(self) -> None:
        """Continue with the world's current ranks. Collective among them."""
        for wrapper in self.attachments:
            if not isinstance(wrapper, DistributedDataParallel):
                raise ConfigurationError(
                    f"{type(wrapper).__name__} cannot go on with other ranks: prepare the model itself, unwrapped"
                )
            wrapper.regroup(self._world.communicator, self._fresh_policy.get("policy", wrapper.current_policy()))

    def _remember(self, prepared: nn.Module, attachment: Accumulation, inner: nn.Module) -> None:
        self.prepared.append(prepared)
        self.plain.append(inner)
        self._attachments[id(prepared)] = self._attachments[id(inner)] = attachment

    def attachment_of(self, model: Any) -> Accumulation:
        """The engine of a prepared model, or of the model that was prepared."""
        inner = getattr(model, "_orig_mod", model)
        attachment = self._attachments.get(id(inner))
        if attachment is None:
            raise ConfigurationError(
                f"{type(model).__name__} was not prepared by this accelerator, so its gradients are not synchronized. "
                "Call model = accelerator.prepare(model) first"
            )
        return attachment

    @property
    def attachments(self) -> list[Accumulation]:
        return list({id(attachment): attachment for attachment in self._attachments.values()}.values())

    def clear(self) -> None:
        """Take the engine off all models."""
        for attachment in self.attachments:
            attachment.synchronizer.detach()
        self._attachments.clear()
        self.prepared.clear()
        self.plain.clear()


def _is_spread(model: nn.Module) -> bool:
    """Whether somebody has put parts of the model on several devices, and so knows better."""
    devices: set[torch.device] = {parameter.device for parameter in model.parameters()}
    return len(devices) > 1
