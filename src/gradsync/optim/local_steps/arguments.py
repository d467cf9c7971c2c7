"""Checks what ``LocalSteps`` is given, on every rank before anything is sent: schedule, model, optimizers, state.

A cycle of ``every=6`` optimizer steps with two fragments that are merged one step after they were sent::

    step           1   2   3   4   5   6 │ 1   2   3   4 …
    fragment 0             ├─▶           │         ├─▶
    fragment 1                         ├─│─▶

A fragment must have arrived before the next is sent, so the delay is shorter than the interval between two of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.core.engine.synchronizer import synchronizer_of
from gradsync.core.reduction import Auto, Mean, Reduction, reduction_by_name
from gradsync.optim.sharded.states import check_groups
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.parallel.replica import Replica
from gradsync.parallel.torch_names import TorchDDP

__all__ = [
    "Optimizers",
    "Settings",
    "check_state",
    "checked_reduction",
    "communicator_of",
    "counted_optimizer",
    "cut",
    "described",
    "inner_optimizers",
    "replica_of",
]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The schedule: in ``every`` optimizer steps each of the ``fragments`` is sent once, and merged ``delay`` steps
    later.

    Raises ConfigurationError for numbers that make no valid schedule.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
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


def communicator_of(model: Any) -> Communicator | None:
    """The communicator that averages the model's gradients, or would, if there is one."""
    if isinstance(model, DistributedDataParallel):
        return model.communicator
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    owner = next((owner for each in parameters if (owner := synchronizer_of(each)) is not None), None)
    return None if owner is None else owner.communicator


def described(
    settings: Settings, replica: Replica, reduction: Reduction, outer: torch.optim.Optimizer | None
) -> list[tuple[str, Any]]:
    """What must be the same on all ranks."""
    return [
        ("every", settings.every),
        ("fragments", settings.fragments),
        ("delay", settings.delay),
        ("reduction", repr(reduction)),
        ("outer", "parameters are averaged" if outer is None else _in_words(outer)),
        *replica.described_parameters,
        *(
            (f"buffer {name}", {"shape": list(buffer.shape), "dtype": str(buffer.dtype)})
            for name, buffer in replica.named_buffers.items()
        ),
    ]


def replica_of(model: Any) -> Replica:
    """The replica of a model that may take local steps."""
    if isinstance(model, DistributedDataParallel):
        if model.synchronizer.bucket_client is not None:
            raise ConfigurationError(
                "a sharded optimizer has this model's parameters, and cannot take local steps: every rank has the "
                "state of its own share only. Use a plain optimizer for them"
            )
        return model.replica
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
    return replica


def counted_optimizer(given: Any, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer whose steps count."""
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
    return inner_optimizers(optimizers)[-1]


def inner_optimizers(given: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers whose steps are taken: a prepared one of an Accelerator forwards its own."""
    listed = [given] if isinstance(given, torch.optim.Optimizer) else given
    inner = [getattr(each, "optimizer", None) for each in listed]
    return [one if isinstance(one, torch.optim.Optimizer) else each for one, each in zip(inner, listed, strict=True)]


def checked_reduction(given: Any) -> Reduction:
    """The reduction that was given, by name or as an object; the exact mean by default."""
    reduction = Mean() if given is None else reduction_by_name(given) if isinstance(given, str) else given
    if not isinstance(reduction, Reduction) or isinstance(reduction, type):
        raise ConfigurationError(
            f"reduction is how outer gradients travel: a name such as 'int8', or a Reduction; got {given!r}"
        )
    if isinstance(reduction, Auto):
        raise ConfigurationError(
            "reduction='auto' compares communication with the backward that hides it, and none hides that of local "
            "steps. Name one, such as 'int8'"
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


def check_state(
    state: dict[str, Any],
    settings: Settings,
    outer: torch.optim.Optimizer | None,
    anchors: Mapping[str, torch.Tensor],
) -> None:
    """Raise ConfigurationError unless the state was saved by local steps like these, with these ``anchors`` by name."""
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise ConfigurationError(f"no state of LocalSteps: {missing[0]!r} is missing. Pass what state_dict() gave")
    under_way = state["step"] > 0 or any(state["drift"])
    if under_way and (len(state["drift"]) != settings.fragments or state["step"] >= settings.every):
        raise ConfigurationError(
            f"the state was saved at step {state['step']} of a cycle with {len(state['drift'])} fragments, and does "
            f"not fit every={settings.every}, fragments={settings.fragments}. Use the settings of then, or save "
            "after synchronize()"
        )
    if (outer is None) != (state["outer"] is None):
        theirs, ours = ("without", "has one") if state["outer"] is None else ("with", "has none")
        raise ConfigurationError(
            f"the state was saved {theirs} an outer optimizer, and this LocalSteps {ours}. Use the outer and the "
            "reduction of then, or do without it"
        )
    if outer is not None:
        _check_anchors(state["anchors"], anchors)
        check_groups(state["outer"]["param_groups"], outer.param_groups)


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
