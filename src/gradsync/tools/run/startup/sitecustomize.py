"""Runs in every Python that an observed script starts by itself, and observes it as soon as it has imported torch.

Launchers that start ranks by ``subprocess``, such as Lightning's, pass them nothing but the environment. At startup
Python imports a module of this name from the first folder on its path that has one; the one that would have been found
is found next. Only the standard library may be imported here: most of these processes are not ranks, and have no torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["CHILD_SETTINGS", "after_import"]

FOLDER = os.path.dirname(os.path.abspath(__file__))
# The environment variable with the settings of `gradsync run`, for processes that a script starts: as JSON, with the
# name of the module that observes them.
CHILD_SETTINGS = "GRADSYNC_RUN_CHILDREN"


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call ``act(module)`` once the module has been imported: now, if it has been already, else when somebody does
    it."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, once, where all others find it, and acts when it has been executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        found = (each.find_spec(fullname, path, target) for each in [*sys.meta_path] if each is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._act(module)

        # Of this loader alone: each module has its own.
        loader.exec_module = exec_module


def _begin(module: ModuleType) -> None:
    # While gradsync is being imported it is not complete: its own turn comes at its end.
    if module.__name__ == "torch" and "gradsync" in sys.modules:
        return
    settings = json.loads(os.environ[CHILD_SETTINGS])
    try:
        observer = importlib.import_module(settings.pop("module"))
    except ImportError:
        # Another Python, which has no gradsync.
        return
    observer.begin_started(**settings)


def _give_way() -> None:
    """Give way to the module of this name that this process would have without us."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get(CHILD_SETTINGS):
        for _name in ("torch", "gradsync"):
            after_import(_name, _begin)
    _give_way()
