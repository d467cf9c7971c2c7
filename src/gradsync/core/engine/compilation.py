"""What of a model is compiled, and what communication overlaps with because of that."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["Compilation", "compiled_regions"]


def compiled_regions(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules of ``module`` that were given to the compiler."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    if isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None:
        yield module
        return
    for child in module.children():
        yield from compiled_regions(child)


class Compilation:
    """How a forward of ``module`` was compiled. ``by_caller``: the compiler sees all that it calls. ``is_marked``: a
    wrapper shows torch's compiler where buckets end, so that it may cut its graph there."""

    def __init__(self, module: nn.Module, *, by_caller: bool, is_marked: bool) -> None:
        self._module, self._by_caller, self._is_marked = weakref.ref(module), by_caller, is_marked

    def describe(self) -> str:
        """What overlaps, in a sentence; empty if nothing is compiled."""
        module = self._module()
        regions = [] if module is None else list(compiled_regions(module))
        if not self._by_caller and regions != [module]:
            return f"compiled blocks: {len(regions)}. Communication overlaps block by block" if regions else ""
        if not self._is_marked:
            return "compiled as a whole: all gradients arrive when backward has run. Compile its blocks instead"
        if sys.modules["torch._dynamo"].utils.get_optimize_ddp_mode() != "ddp_optimizer":
            return "compiled as a whole: torch._dynamo.config.optimize_ddp is off, so nothing overlaps with backward"
        return (
            "compiled as a whole: backward is cut where buckets end, and a forward waits for all parameters. With a "
            "sharded or overlapped optimizer, compile its blocks instead"
        )
