"""Ownership of parameters: one synchronizer at a time averages a gradient, the last that was given the parameter."""

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
    """Make ``owner`` the owner of these parameters. This does not keep it alive."""
    reference = weakref.ref(owner)
    for parameter in parameters:
        _owners[parameter] = reference


def release(owner: Any, parameters: Iterable[torch.Tensor]) -> None:
    """Remove the owner of these parameters, where it was ``owner``."""
    for parameter in parameters:
        if owner_of(parameter) is owner:
            del _owners[parameter]
