"""Snapshots of parameter group options: numbers, and tensors that may be changed in place."""

from typing import Any

import torch

__all__ = ["Options", "copied", "is_equal", "same"]

# One entry per group.
Options = list[dict[str, Any]]


def copied(options: Options) -> Options:
    return [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in options
    ]


def same(first: Options, second: Options) -> bool:
    return len(first) == len(second) and all(
        one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
        for one, other in zip(first, second, strict=True)
    )


def is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and torch.equal(first, second)
    return bool(first == second)
