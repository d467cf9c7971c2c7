"""Puts gradsync's classes in place of torch's and Accelerate's, before a script looks them up.

torch's class means the same to everybody, so ours takes over its names. Accelerate's class is also what libraries such
as Transformers build on, through many names that only Accelerate has. So ``accelerate.Accelerator`` is ours for the
script and any other code that is not installed, and Accelerate's own for installed libraries; that one wraps models in
torch's class by name, which is ours.

Accelerate need not be installed, and is not imported before the script asks for it.
"""

import functools
import os
import site
import sys
import sysconfig
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch import nn

from gradsync.accelerator import Accelerator
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.tools.run.startup.importing import after_import

__all__ = ["after_import", "is_library", "replace_accelerator", "replace_data_parallel"]

# Where Accelerate's class can be looked up.
PLACES = ("accelerate", "accelerate.accelerator")
NAME = "Accelerator"
# Wherever they are: of another Python than this one, by PYTHONPATH or a .pth.
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


def replace_data_parallel() -> None:
    """``torch.nn.parallel.DistributedDataParallel`` is gradsync's from now on."""
    places: tuple[Any, ...] = (nn.parallel, nn.parallel.distributed)
    for place in places:
        place.DistributedDataParallel = DistributedDataParallel


def replace_accelerator() -> None:
    """``accelerate.Accelerator`` is gradsync's for the script, as soon as somebody imports Accelerate."""
    for place in PLACES:
        after_import(place, _show_ours)


class _Shown(ModuleType):
    """A module of Accelerate's that shows a different class to code that is not installed."""

    @property
    def Accelerator(self) -> Any:  # noqa: N802 (the name of a class)
        own = vars(self)[NAME]
        if own is not vars(self)["_accelerates_own"]:
            # Somebody has put another one there, and wants that.
            return own
        return own if _is_installed(sys._getframe(1).f_code) else Accelerator

    @Accelerator.setter
    def Accelerator(self, value: Any) -> None:  # noqa: N802
        vars(self)[NAME] = value


def _show_ours(module: ModuleType) -> None:
    own = vars(module).get(NAME)
    # A module of the same name that is not Accelerate has nothing to replace.
    if own is not None and type(module) is ModuleType:
        vars(module)["_accelerates_own"] = own
        module.__class__ = _Shown


def _is_installed(code: CodeType) -> bool:
    return is_library(code.co_filename)


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package: to this Python's, or to another's that PYTHONPATH or a ``.pth``
    names; or to one in a folder that ``pip install --target`` has filled. Links are followed, and not."""
    return any(map(_is_library, {os.path.abspath(file), os.path.realpath(file)}))


def _is_library(path: str) -> bool:
    if path.startswith(_LIBRARIES) or not PACKAGE_FOLDERS.isdisjoint(Path(path).parent.parts):
        return True
    roots = [os.path.abspath(each) for each in sys.path if each]
    around = [each for each in roots if path.startswith(os.path.join(each, ""))]
    return bool(around) and next(Path(max(around, key=len)).glob("*.dist-info/RECORD"), None) is not None


def _libraries() -> tuple[str, ...]:
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


_LIBRARIES = _libraries()
