"""Who averages a parameter's gradient: one synchronizer at a time, the last that was given the parameter."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["own", "owner_of", "release"]

_owners: Any = WeakIdKeyDictionary()


def owner_of(parameter: torch.Tensor) -> Any:
    """The owner, or None."""
    reference = _owners.get(parameter)
    return None if reference is None else reference()


def own(owner: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Make ``owner`` the owner of these parameters. It is not kept alive by that."""
    reference = weakref.ref(owner)
    for parameter in parameters:
        _owners[parameter] = reference


def release(owner: Any, parameters: Iterable[torch.Tensor]) -> None:
    """These parameters have no owner any more, as far as it was ``owner``."""
    for parameter in parameters:
        if owner_of(parameter) is owner:
            del _owners[parameter]
