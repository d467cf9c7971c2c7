"""Checks what ``LocalSteps`` is given, on every rank before anything is sent: schedule, model, optimizers, state.

A cycle of ``every=6`` optimizer steps with two fragments that are merged one step after they were sent::

    step           1   2   3   4   5   6 │ 1   2   3   4 …
    fragment 0             ├─▶           │         ├─▶
    fragment 1                         ├─│─▶

A fragment must have arrived before the next is sent, so the delay is shorter than the interval between two of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.core.engine.synchronizer import Synchronizer, synchronizer_of
from gradsync.core.reduction import Auto, Mean, Reduction, reduction_by_name
from gradsync.optim.local_steps.exchange import Outer, OuterFactory, make_outer, wide
from gradsync.parallel.data_parallel import TrainingAlone
from gradsync.parallel.replica import Replica
from gradsync.parallel.torch_names import TorchDDP

__all__ = ["CheckedArguments", "Optimizers", "Settings", "check_state", "communicator_of", "cut"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """In ``every`` optimizer steps, each of the ``fragments`` is sent once, and merged ``delay`` steps later."""

    every: int
    fragments: int = 1
    delay: int = 0

    def check(self) -> None:
        """Raise ConfigurationError for numbers that make no valid schedule."""
        for name, least, meaning in (
            ("every", 1, "optimizer steps between two synchronizations"),
            ("fragments", 1, "parts that are sent one after the other"),
            ("delay", 0, "optimizer steps between sending a fragment and merging it"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(
                    f"{name} is a number of {meaning}, a whole one of at least {least}, got {value!r}"
                )
        if self.fragments > self.every:
            raise ConfigurationError(
                f"fragments={self.fragments} cannot each have a step of their own among every={self.every}. Take fewer "
                "fragments, or more steps"
            )
        if self.delay >= self.every // self.fragments:
            raise ConfigurationError(
                f"delay={self.delay} is too long: with every={self.every} and fragments={self.fragments} the next "
                f"fragment may be sent after {self.every // self.fragments} steps, and this one must be merged before. "
                "Take a shorter delay, fewer fragments or more steps"
            )

    @property
    def schedule(self) -> dict[int, int]:
        """Maps steps of a cycle, counted from 1, to the fragment sent after them; other steps are left out."""
        return {(fragment + 1) * self.every // self.fragments: fragment for fragment in range(self.fragments)}


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut ``sizes`` into this many runs of neighbours, none of them empty, with about equal sums."""
    runs: list[range] = []
    start = 0
    for left in range(fragments, 0, -1):
        end, used = start + 1, sizes[start]
        fair = sum(sizes[start:]) / left
        # The others need one each. A size that crosses the boundary goes where the larger part of it is.
        while end <= len(sizes) - left and (left == 1 or used + sizes[end] / 2 <= fair):
            used += sizes[end]
            end += 1
        runs.append(range(start, end))
        start = end
    return runs


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
    return None if owner is None else owner.communicator


class CheckedArguments:
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
        if model.synchronizer.bucket_client is not None:
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
    owned = [name for name, owner in owners if owner is not None and owner.communicator.world_size > 1]
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


# -- a state that is loaded, while nothing has been changed yet --------------------------------------------------------

KEYS = ("ranks", "step", "rounds", "next", "drift", "anchors", "outer", "reduction")


# The state of an outer optimizer, and its anchors by name.
Kept = tuple[torch.optim.Optimizer, Mapping[str, torch.Tensor]]


def check_state(state: dict[str, Any], settings: Settings, outer: Kept | None) -> None:
    """Raise ConfigurationError unless the state was saved by local steps like these."""
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ConfigurationError(f"no state of LocalSteps: {missing[0]!r} is missing. Pass what state_dict() gave")
    if len(state["drift"]) != settings.fragments or state["step"] >= settings.every:
        raise ConfigurationError(
            f"the state was saved at step {state['step']} of a cycle with {len(state['drift'])} fragments, and does "
            f"not fit every={settings.every}, fragments={settings.fragments}. Use the settings of then, or do "
            "without it"
        )
    if (outer is None) != (state["outer"] is None):
        theirs, ours = ("without", "has one") if state["outer"] is None else ("with", "has none")
        raise ConfigurationError(
            f"the state was saved {theirs} an outer optimizer, and this LocalSteps {ours}. Use the outer and the "
            "reduction of then, or do without it"
        )
    if outer is not None:
        optimizer, anchors = outer
        _check_anchors(state["anchors"], anchors)
        _check_groups(state["outer"], optimizer)


def _check_anchors(saved: Mapping[str, torch.Tensor], anchors: Mapping[str, torch.Tensor]) -> None:
    unknown = sorted(set(saved) ^ set(anchors))
    if unknown:
        where = "the state has and the model has not" if unknown[0] in saved else "the model has and the state has not"
        raise ConfigurationError(
            f"the state belongs to another model: {where} a trained parameter {unknown[0]!r}. Load it with the model "
            "that it was saved with"
        )
    for name, anchor in anchors.items():
        if tuple(saved[name].shape) != tuple(anchor.shape):
            raise ConfigurationError(
                f"the state belongs to another model: {name!r} has shape {tuple(saved[name].shape)} in it and "
                f"{tuple(anchor.shape)} here. Load it with the model that it was saved with"
            )


def _check_groups(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    theirs = [len(group["params"]) for group in saved["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if theirs != ours:
        raise ConfigurationError(
            f"the saved outer optimizer has groups of {theirs} parameters, and this one of {ours}. Make it as it was"
        )
