"""Runs a script in this process as Python itself would: as ``__main__``, with its arguments and its folder.

[Note: not runpy] ``runpy.run_path`` removes ``__main__`` again when the script ends, and work that the script has left
to do then (threads, ``atexit``, what it has pickled by name) no longer finds it. So the module stays here.
"""

import functools
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from gradsync.base.errors import ConfigurationError

__all__ = ["Script", "leave_as_python_would", "traceback_of"]

FAILED, INTERRUPTED = 1, 130
OURS = __name__.rpartition(".")[0] + "."


@dataclass(frozen=True, kw_only=True)
class Script:
    """A file, or a module by its name, with the arguments that are its own."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def __str__(self) -> str:
        return f"-m {self.target}" if self.is_module else self.target

    @property
    def words(self) -> list[str]:
        """What stands on a command line."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def require(self) -> None:
        """Raise if there is nothing to run. Nothing of it is imported: of a module only the package is looked for."""
        if self.is_module:
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            if importlib.util.find_spec(self.target.partition(".")[0]) is None:
                raise ConfigurationError(f"there is no module {self.target} here, nor among what is installed")
        elif os.path.isdir(self.target):
            raise ConfigurationError(f"{self.target} is a folder; name the script in it, or use -m with a package")
        elif not os.path.isfile(self.target):
            raise ConfigurationError(
                f"there is no script {self.target} (looked for in {os.getcwd()}). Options of gradsync run come before "
                "the script, those of the script after it"
            )

    def load(self) -> Callable[[], None]:
        """Make this process the script's. What is returned runs it to its end; what it raises comes out as it is."""
        main = ModuleType("__main__")
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            self._begin_path_with(os.getcwd())
            spec, code = _module_to_run(self.target)
            vars(main).update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader, __file__=spec.origin)
            sys.argv[0] = spec.origin or self.target
        else:
            path = os.path.abspath(self.target)
            self._begin_path_with(os.path.dirname(os.path.realpath(path)))
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            vars(main).update(__file__=path)
        vars(main).update(__builtins__=__builtins__)
        sys.modules["__main__"] = main
        _kept.append(main)
        return functools.partial(exec, code, vars(main))

    def _begin_path_with(self, folder: str) -> None:
        # With -P nothing of ours stands in front, and nothing is wanted there.
        if not sys.flags.safe_path:
            sys.path[0] = folder


# [Note: not runpy]
_kept: list[ModuleType] = []


def _module_to_run(name: str) -> tuple[ModuleSpec, CodeType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(name) if hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise ConfigurationError(f"there is no module {name} that could be run")
    return spec, code


def leave_as_python_would(error: BaseException) -> NoReturn:
    """End this process with the words and the exit code that Python has for what a script raised."""
    if isinstance(error, SystemExit):
        raise error
    sys.stdout.flush()
    own = traceback_of(error)
    sys.excepthook(type(error), error.with_traceback(own), own)
    sys.stderr.flush()
    raise SystemExit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED)


def traceback_of(error: BaseException) -> TracebackType | None:
    """The script's own part of it."""
    own = without_our_frames(error.__traceback__)
    # Of a script that could not be compiled, and has not begun, the error says where.
    return None if isinstance(error, SyntaxError) and own is error.__traceback__ else own


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """From where the script begins, and without what watches it further down. All of it if no script has begun, or if
    what watches it is where the error comes from."""
    whole = trace
    while trace is not None and not any(trace.tb_frame.f_globals is vars(each) for each in _kept):
        trace = trace.tb_next
    begin = last = trace
    while last is not None:
        following = last.tb_next
        while following is not None and following.tb_next is not None and _is_ours(following):
            following = following.tb_next
        last.tb_next = following
        last = following
    return whole if begin is None else begin


def _is_ours(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith(OURS)
