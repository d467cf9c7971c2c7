"""The packages that Lightning comes in, and a strategy class for each of them.

``lightning`` holds the Trainer and Fabric; ``pytorch_lightning`` and ``lightning_fabric`` hold a copy of one each. All
copies have their own base class and registry. Users import one of the packages, before or after gradsync. So the
strategy class for a package is made when that package is imported, and none is imported for nothing.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.tools.run.startup.sitecustomize import after_import

__all__ = ["class_for", "package_in_use", "register_when_imported"]

# How ranks of this machine are started, by what is added to the strategy's name: as for Lightning's "ddp".
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def class_for(kind: type, module: str) -> Any:
    """``kind``, as a subclass of the DDP strategy in a package's ``module`` of strategies."""
    return _class_for(kind, importlib.import_module(module))


@functools.cache
def _class_for(kind: type, module: ModuleType) -> Any:
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (kind, module.DDPStrategy), {**body, "made_for": (kind, module.__name__)})


def package_in_use(modules: Sequence[str]) -> str:
    """The first of these modules that has been imported; if none has, the first that is installed."""
    installed = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not installed:
        raise ConfigurationError(
            f"this needs {' or '.join(name.partition('.')[0] for name in modules)}, and none of them is installed. "
            "Install one: pip install 'gradsync[lightning]'"
        )
    return next((name for name in installed if name in sys.modules), installed[0])


def register_when_imported(kind: type, modules: Sequence[str], registry: str) -> None:
    """Have the ``registry`` of each module know ``kind``, now or when somebody imports the module."""
    package_in_use(modules)
    for name in modules:
        after_import(name, functools.partial(_register, kind, registry))


def _register(kind: type, registry: str, module: ModuleType) -> None:
    for suffix, start_method in START_METHODS.items():
        getattr(module, registry).register(
            f"gradsync{suffix}",
            _class_for(kind, module),
            description=f"gradsync's DistributedDataParallel; ranks are started by {start_method!r}",
            override=True,
            start_method=start_method,
        )
