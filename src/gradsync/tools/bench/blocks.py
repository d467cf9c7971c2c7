"""The blocks of a model: the units that FSDP2 is told to synchronize."""

from torch import nn

__all__ = ["blocks_of"]


def blocks_of(model: nn.Module) -> list[list[nn.Module]]:
    """What FSDP2 synchronizes together: the modules of every block, a child of the model or of a container in it."""
    blocks: list[nn.Module] = []
    for child in model.children():
        blocks.extend([child] if _is_called(child) else child.children())
    groups = [[module for module in _called_in(block) if _has_parameters(module)] for block in blocks]
    return [group for group in groups if group]


def _called_in(module: nn.Module) -> list[nn.Module]:
    if _is_called(module):
        return [module]
    return [called for child in module.children() for called in _called_in(child)]


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
