"""Why a process ends: calls of ``sys.exit``, and exceptions that nobody catches, reported as soon as they are known.

Python does not report a SystemExit: no hook is called for it, and nothing of it remains when ``atexit`` handlers run.
So calls of ``sys.exit`` are recorded as they are made. Whether one was caught again is unknown, and not claimed.

An uncaught exception is reported when it leaves the script. A long time may lie between that and the end of the
process: threads that are joined, exit handlers, uploads. ``sys.excepthook`` runs before all of these, and a hook
installed earlier is still called. This cannot report:

- an exception still in flight, through ``finally`` or ``with``: nobody knows yet that it will not be caught;
- one in a process whose launcher catches it, such as a spawned child of torch.multiprocessing: it is reported at exit;
- SystemExit: all that is known of it at exit is the last call of ``sys.exit``.
"""

import functools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

__all__ = [
    "ENDED",
    "EXITED",
    "exit_call",
    "exit_status",
    "exit_words",
    "forget_exit",
    "patch_sys_exit",
    "record_exit",
    "recorded_exit",
    "report_uncaught",
]

ENDED, EXITED = "has ended its script", "called sys.exit("
MOST_LETTERS = 100
# Of libraries: who ended the process is the line of the script that called them.
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
OURS = str(Path(__file__).resolve().parents[2])
LIBRARIES = tuple(os.path.join(folder, "") for folder in (OURS, sysconfig.get_path("stdlib")))

_recorded: list[str] = []


def exit_status(error: SystemExit) -> int:
    """The exit status that Python makes of the argument of ``sys.exit``: text is printed, and stands for 1."""
    code = error.code or 0 if error.code is None or isinstance(error.code, int) else 1
    # What does not fit into a C long stands for -1.
    return (code if -(1 << 63) <= code < 1 << 63 else -1) & 0xFF


def exit_words(error: SystemExit) -> str:
    """The message that a rank has ended, for the others and the launcher: by which call, if it failed."""
    call = exit_call(error)
    return f"called {call}" if exit_status(error) else f"{ENDED} by {call}"


def exit_call(error: SystemExit) -> str:
    """The call in words: ``sys.exit(3) in line 12 of train.py``."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _call_in_words(error.code, reversed(frames))


def patch_sys_exit() -> None:
    """Record calls of ``sys.exit`` in the main thread from now on: in a different thread they only end that one."""
    before = sys.exit

    @functools.wraps(before)
    def recording_exit(*args: object) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            record_exit(_call_in_words(args[0] if args else None, _callers(sys._getframe(1))))
        before(*args)  # type: ignore[arg-type]

    sys.exit = recording_exit


def record_exit(call: str) -> None:
    _recorded[:] = [call]


def recorded_exit() -> str:
    """The last call of ``sys.exit``: it may have been caught."""
    return _recorded[0] if _recorded else ""


def forget_exit() -> None:
    """Forget the parent's call of ``sys.exit`` in a forked child."""
    _recorded.clear()


def _callers(frame: FrameType | None) -> Iterable[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _call_in_words(code: object, frames: Iterable[tuple[str, int]]) -> str:
    """The call of ``sys.exit`` in words, by its argument ``code`` and the ``frames`` it came from, innermost first."""
    argument = "" if code is None else repr(code)
    argument = argument if len(argument) <= MOST_LETTERS else f"{argument[:MOST_LETTERS]}…"
    known = list(frames)
    file, line = next((each for each in known if not _is_library(each[0])), known[0] if known else ("", 0))
    return f"sys.exit({argument})" + (f" in line {line} of {file}" if file else "")


def _is_library(file: str) -> bool:
    path = os.path.abspath(file)
    # <frozen runpy> and the like have no file.
    return file.startswith("<") or path.startswith(LIBRARIES) or not PACKAGE_FOLDERS.isdisjoint(path.split(os.sep))


_is_installed = False


def report_uncaught(in_main: Callable[[BaseException], None], in_thread: Callable[[BaseException, int], None]) -> None:
    """Report exceptions that nobody catches. Installed once per process.

    ``in_main`` is called with one that ends the script, ``in_thread`` with one that ends a thread, and its number.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    patch_sys_exit()
    before, before_in_thread = sys.excepthook, threading.excepthook

    # With the names of the one before: others look at these to know whose hook it is.
    @functools.wraps(before)
    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        try:
            in_main(error)
        finally:
            before(kind, error, trace)

    def thread_hook(args: Any) -> None:
        try:
            if args.exc_value is not None:
                in_thread(args.exc_value, threading.get_ident())
        finally:
            before_in_thread(args)

    sys.excepthook, threading.excepthook = hook, thread_hook
