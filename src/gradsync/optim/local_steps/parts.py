"""Checks the arguments of ``LocalSteps`` on every rank before anything is sent: model, optimizers, reduction."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.core.engine.synchronizer import Synchronizer, synchronizer_of
from gradsync.core.reduction import Auto, Mean, Reduction, reduction_by_name
from gradsync.optim.local_steps.exchange import wide
from gradsync.optim.local_steps.outer import Outer, OuterFactory, make_outer
from gradsync.optim.local_steps.settings import Settings
from gradsync.parallel.data_parallel import TrainingAlone
from gradsync.parallel.replica import Replica
from gradsync.parallel.torch_names import TorchDDP

__all__ = ["Optimizers", "Parts", "communicator_of"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@runtime_checkable
class Wrapped(Protocol):
    """The part of a DistributedDataParallel that is needed here."""

    replica: Replica
    synchronizer: Synchronizer
    communicator: Communicator

    def train_alone(self) -> TrainingAlone: ...


def communicator_of(model: Any) -> Communicator | None:
    """The communicator that averages the model's gradients, or would, if there is one."""
    if isinstance(model, Wrapped):
        return model.communicator
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    owner = next((owner for each in parameters if (owner := synchronizer_of(each)) is not None), None)
    return None if owner is None else owner.engine.communicator


class Parts:
    """``parameters`` are the trained ones, with their ``specs``; ``alone`` stops a wrapper from averaging gradients;
    the steps of ``optimizer`` are the ones that count."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, settings: Settings) -> None:
        settings.check()
        self._settings = settings
        self.replica, self.alone = _look_at_model(model)
        trained = [index for index, each in enumerate(self.replica.parameters) if each.requires_grad]
        self.parameters = [self.replica.parameters[index] for index in trained]
        self.specs = [self.replica.specs[index] for index in trained]
        if settings.fragments > len(self.parameters):
            raise ConfigurationError(
                f"fragments={settings.fragments} cannot each have a parameter of a model that trains "
                f"{len(self.parameters)}. Take fewer fragments"
            )
        self.optimizer = _look_at_optimizers(optimizer, self.parameters)

    def choose(self, reduction: Reduction | str | None, outer: OuterFactory | None) -> None:
        """Decide how means are computed, and of what."""
        self.reduction = _look_at_reduction(reduction)
        specs = wide(self.specs)
        self.reduction.examine(specs)
        self.outer: Outer | None = make_outer(outer, self.parameters, specs, exact=type(self.reduction) is Mean)

    @property
    def described(self) -> list[tuple[str, Any]]:
        """What must be the same on all ranks."""
        settings = self._settings
        return [
            ("every", settings.every),
            ("fragments", settings.fragments),
            ("delay", settings.delay),
            ("reduction", repr(self.reduction)),
            ("outer", "parameters are averaged" if self.outer is None else _in_words(self.outer.optimizer)),
            *(
                (
                    f"parameter {number} ({spec.name})",
                    {"shape": list(spec.shape), "dtype": str(spec.dtype), "requires_grad": parameter.requires_grad},
                )
                for number, (spec, parameter) in enumerate(
                    zip(self.replica.specs, self.replica.parameters, strict=True)
                )
            ),
            *(
                (f"buffer {name}", {"shape": list(buffer.shape), "dtype": str(buffer.dtype)})
                for name, buffer in self.replica.named_buffers.items()
            ),
        ]


def _look_at_model(model: Any) -> tuple[Replica, Callable[[], TrainingAlone] | None]:
    if isinstance(model, Wrapped):
        if model.synchronizer.engine.sharing.client is not None:
            raise ConfigurationError(
                "a sharded optimizer has this model's parameters, and cannot take local steps: every rank has the "
                "state of its own share only. Use a plain optimizer for them"
            )
        return model.replica, model.train_alone
    if isinstance(model, TorchDDP):
        raise ConfigurationError(
            "LocalSteps got a model in torch's DistributedDataParallel, which would average gradients in every "
            "backward. Train its .module itself and pass that, or wrap it in gradsync's DistributedDataParallel"
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"LocalSteps needs a module and its optimizer, got {type(model).__name__}")
    replica = Replica(model)
    owners = [(spec.name, synchronizer_of(p)) for spec, p in zip(replica.specs, replica.parameters, strict=True)]
    # In a world of one, where models are not wrapped, there is nothing to switch off.
    owned = [name for name, owner in owners if owner is not None and owner.engine.communicator.world_size > 1]
    if owned:
        raise ConfigurationError(
            f"the gradient of parameter {owned[0]!r} is averaged in every backward already. Pass the "
            "DistributedDataParallel itself, which LocalSteps can switch off, or detach() what synchronize_gradients "
            "returned"
        )
    return replica, None


def _look_at_optimizers(given: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    optimizers = list(given) if isinstance(given, list | tuple) else [given]
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                "LocalSteps counts the steps of an optimizer of torch's, or of the last one in a list, got "
                f"{type(optimizer).__name__}"
            )
    known = {id(parameter) for parameter in parameters}
    if not any(id(p) in known for each in optimizers for group in each.param_groups for p in group["params"]):
        raise ConfigurationError(
            f"none of the {len(known)} parameters that the model trains is in the optimizer, so that nobody would take "
            "local steps with them. Make the optimizer of the parameters of this very model"
        )
    last: torch.optim.Optimizer = optimizers[-1]
    # A prepared optimizer of an Accelerator forwards its steps: those that are taken are the inner one's.
    inner = getattr(last, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else last


def _look_at_reduction(given: Any) -> Reduction:
    reduction = Mean() if given is None else reduction_by_name(given) if isinstance(given, str) else given
    if not isinstance(reduction, Reduction) or isinstance(reduction, type):
        raise ConfigurationError(
            f"reduction is how outer gradients travel: a name such as 'int8', or a Reduction; got {given!r}"
        )
    if isinstance(reduction, Auto):
        raise ConfigurationError(
            "reduction='auto' weighs the wire against backward, behind which gradients travel, and local steps do not. "
            "Name one, such as 'int8'"
        )
    if reduction.scatters:
        raise ConfigurationError(
            f"every rank needs the whole mean, and {reduction!r} leaves it a share. Leave reduction out for the exact "
            "mean"
        )
    return reduction


def _in_words(optimizer: torch.optim.Optimizer) -> str:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__}({', '.join(map(str, groups))})"
