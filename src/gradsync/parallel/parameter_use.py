"""Hooks that run right before a module's forward uses its parameters: the latest moment for new values to arrive.

A hook on every module that has parameters of its own calls back with them. That alone is not enough, because a module
may use the parameters of a child without calling the child: ``nn.MultiheadAttention`` does so with its ``out_proj``.
The first forward shows which modules are called, and requests all parameters at once. From the second forward on, the
parameters of modules that were not called are requested by the nearest enclosing module that was. A module that is
called only later (a branch not taken in the first forward) has a hook of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["ParameterUse"]

BeforeUse = Callable[[Sequence[nn.Parameter]], None]


class ParameterUse:
    """Calls ``before_use`` with parameters of ``module`` before a forward of it, or of part of it, uses them.

    It may be called several times with one parameter, where modules share it or run twice: the second time, the values
    are already there.
    """

    def __init__(self, module: nn.Module, before_use: BeforeUse) -> None:
        self._module = module
        self._before_use = before_use
        self._all = list(module.parameters())
        self._own = {
            path: [parameter for parameter in part._parameters.values() if parameter is not None]
            for path, part in module.named_modules()
        }
        self._asked: dict[str, list[nn.Parameter]] | None = None
        self._called: set[str] = set()
        self._handles = [
            part.register_forward_pre_hook(self._hook(path), prepend=True) for path, part in module.named_modules()
        ]
        self._handles.append(module.register_forward_hook(self._after))

    def _hook(self, path: str) -> Callable[[nn.Module, Any], None]:
        def before_forward(_: nn.Module, args: Any) -> None:
            if self._asked is not None:
                wanted = self._asked[path]
                if wanted:
                    self._before_use(wanted)
                return
            # A first forward may begin inside, or fail: only one that began at the whole module and ended is recorded.
            self._before_use(self._all)
            self._called = {path} if path == "" else self._called | {path}

        return before_forward

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        """A first forward of the whole module has ended: now it is known which parts are called."""
        if self._asked is None and "" in self._called:
            self._asked = {path: list(own) for path, own in self._own.items()}
            for path, own in self._own.items():
                if path not in self._called:
                    self._asked[_nearest(path, self._called)] += own

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _nearest(path: str, called: set[str]) -> str:
    """The innermost module around ``path`` that was called; the outermost one always was."""
    while path not in called:
        path = path.rpartition(".")[0]
    return path
