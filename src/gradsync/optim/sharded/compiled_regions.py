"""Waits in front of compiled regions: what ``torch.compile`` has compiled waits for its own parameters before it runs.

A compiled graph reads its parameters without asking them, and the compiler recompiles if the class of one has changed.
So a graph must find ordinary parameters. A compiled region inside the model, ``block.compile()`` or
``torch.compile(block)`` in the place of a block, gets a wait of its own: in front of its call and outside its graph, so
nothing breaks the graph, and earlier regions run while its parameters are still on their way. A model that was compiled
as a whole is one region.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from gradsync.core.engine.compilation import compiled_regions
from gradsync.optim.sharded.gather import await_parameters

__all__ = ["await_before_regions"]


def await_before_regions(module: nn.Module) -> None:
    """Have every compiled region of ``module`` wait for its own parameters, from now on."""
    for region in compiled_regions(module):
        if region._compiled_call_impl is None:
            if _await_all not in region._forward_pre_hooks.values():
                region.register_forward_pre_hook(_await_all)
        elif not isinstance(region._compiled_call_impl, _AwaitingCall):
            region._compiled_call_impl = _AwaitingCall(region, region._compiled_call_impl)


def _await_all(region: nn.Module, args: Any) -> None:
    await_parameters(region.parameters())


class _AwaitingCall:
    """The call of a region that was compiled in place. ``Module.compile`` replaces it with one that does not wait."""

    def __init__(self, region: nn.Module, compiled: Callable[..., Any] | None) -> None:
        assert compiled is not None
        self._region, self._compiled = region, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        await_parameters(self._region.parameters())
        return self._compiled(*args, **kwargs)
