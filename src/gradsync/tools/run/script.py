"""Runs a script in this process as Python itself would, observed from first line to last, and accounts for it.

[Note: not runpy] ``runpy.run_path`` removes ``__main__`` again when the script ends, and work that the script has left
to do then (threads, ``atexit``, what it has pickled by name) no longer finds it. So the module stays here.
"""

import functools
import importlib.util
import io
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from gradsync.base.environment import ProcessEnvironment, read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.health.watch import say_goodbye
from gradsync.health.watch.exit_causes import exit_status
from gradsync.observe.recording import close_recorders
from gradsync.observe.recording.attach import VARIABLE
from gradsync.tools.run.account import Account, account_path, find_accounts, read_account, write_account
from gradsync.tools.run.running import ChildSettings, begin_with_children, warn_if_ranks_are_started

__all__ = ["UserScript", "all_accounts", "common_folder", "end_rank", "run_rank", "traceback_of"]

FAILED, INTERRUPTED = 1, 130
OURS = __name__.rpartition(".")[0] + "."
# Ranks end at about the same time; what one of them does after the others is not worth more.
SECONDS_FOR_OTHERS = 5.0
TICK = 0.05


@dataclass(frozen=True, kw_only=True)
class UserScript:
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


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback of ``error``, only the script's own part of it."""
    own = _without_our_frames(error.__traceback__)
    # Of a script that could not be compiled, and has not begun, the error says where.
    return None if isinstance(error, SyntaxError) and own is error.__traceback__ else own


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The trace from where the script begins, without what watches it below. All of it if no script has begun, or if
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


def run_rank(
    script: UserScript,
    *,
    keep: bool,
    folder: Path,
    on_end: Callable[[BaseException | None], object] = lambda ended: None,
) -> tuple[Account | None, BaseException | None]:
    """Run the script here. Returns what was counted and written to ``folder``, and how the script ended.

    ``on_end`` is called with that before any other rank can hear of it. There is no account of a script that raised:
    its own words are to be the last.
    """
    # Of gradsync's wrappers, and of processes that the script starts; where the user wants none, or elsewhere, there.
    os.environ.setdefault(VARIABLE, str(folder))
    settings = ChildSettings(keep=keep, folder=folder)
    running = begin_with_children(settings)
    if read_environment().launcher != "none":
        warn_if_ranks_are_started()
    # What an earlier run has left must not be taken for this one's.
    account_path(folder, running.account().rank).unlink(missing_ok=True)
    ended: BaseException | None = None
    try:
        script_to_run = script.load()
    except ConfigurationError:
        raise
    except BaseException as error:
        on_end(error)
        return None, error
    try:
        script_to_run()
    except (SystemExit, KeyboardInterrupt) as error:
        ended = error
        on_end(error)
        if isinstance(error, SystemExit) and exit_status(error):
            # What is left to do, such as threads to be joined, may take long.
            say_goodbye(error)
    except BaseException as error:
        on_end(error)
        # Others wait for this rank: they get the error, and not only that it has ended.
        say_goodbye(error)
        # Now, and not at the end of the process, when the folder may be gone.
        close_recorders()
        return None, error
    else:
        on_end(None)
    account = running.account()
    # A process that only starts others has nothing to add; the first of them has the same number.
    if account.wrappers or not account_path(folder, account.rank).exists():
        write_account(folder, account)
    close_recorders()
    return account, ended


def end_rank(ended: BaseException | None) -> NoReturn:
    """End this process with the words and the exit code that Python has for what the script raised, if it did."""
    if ended is None or isinstance(ended, SystemExit):
        raise ended or SystemExit(0)
    sys.stdout.flush()
    own = traceback_of(ended)
    sys.excepthook(type(ended), ended.with_traceback(own), own)
    sys.stderr.flush()
    raise SystemExit(INTERRUPTED if isinstance(ended, KeyboardInterrupt) else FAILED)


@contextmanager
def common_folder(place: ProcessEnvironment) -> Iterator[Path]:
    """A folder for all ranks that one launcher has started on this machine: it is the parent of each. Rank 0 removes it
    when it has read what is there; so does a rank that fails, which ends all of them."""
    name = f"gradsync-run-{os.getuid()}-{os.getppid()}-{place.master_port}"
    folder = Path(tempfile.gettempdir()) / name
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(f"{folder} belongs to somebody else: name a folder of your own with --record")
    mine = folder / f"began-{place.rank}"
    mine.touch()
    failed = True
    try:
        yield folder
        failed = False
    finally:
        # What this rank began in is gone if rank 0 has not waited for it: then this rank has made the folder again.
        if failed or place.rank == 0 or not mine.exists():
            shutil.rmtree(folder, ignore_errors=True)


def all_accounts(folder: Path, ranks: int) -> list[Account]:
    """The accounts of at least ``ranks`` ranks, which all write to the folder; without ranks that are late."""
    deadline = time.monotonic() + SECONDS_FOR_OTHERS
    while len(find_accounts(folder)) < ranks and time.monotonic() < deadline:
        time.sleep(TICK)
    return [read_account(path) for path in find_accounts(folder)]
