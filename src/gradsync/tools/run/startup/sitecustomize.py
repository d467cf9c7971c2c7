"""Runs in every Python that an observed script starts by itself, and observes it as soon as it has imported torch.

Launchers that start ranks by ``subprocess``, such as Lightning's, pass them nothing but the environment. At startup
Python imports a module of this name from the first folder on its path that has one; the one that would have been found
is found next. Only the standard library may be imported here: most of these processes are not ranks, and have no torch.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

__all__: list = []  # type: ignore[type-arg]

FOLDER = os.path.dirname(os.path.abspath(__file__))
# Of gradsync.tools.run.children.
VARIABLE = "GRADSYNC_RUN_CHILDREN"


def _give_way():  # type: ignore[no-untyped-def]
    """To the module of this name that this process would have without us."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch():  # type: ignore[no-untyped-def]
    path = os.path.join(FOLDER, "importing.py")
    spec = importlib.util.spec_from_file_location("_gradsync_importing", path)
    importing = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(importing)  # type: ignore[union-attr]

    def begin(module):  # type: ignore[no-untyped-def]
        # While gradsync is being imported it is not complete: its own turn comes at its end.
        if module.__name__ == "torch" and "gradsync" in sys.modules:
            return
        try:
            children = importlib.import_module("gradsync.tools.run.children")
        except ImportError:
            # Another Python, which has no gradsync.
            return
        children.begin_started(os.environ[VARIABLE])

    for name in ("torch", "gradsync"):
        importing.after_import(name, begin)


if __name__ == "sitecustomize":
    if os.environ.get(VARIABLE):
        _watch()
    _give_way()
