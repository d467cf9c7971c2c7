"""Reports an uncaught exception to the other ranks as soon as it leaves the script, not when the process exits.

A long time may lie between the two: threads that are joined, exit handlers, uploads. ``sys.excepthook`` runs before all
of these, and a hook installed earlier is still called. This cannot report:

- an exception still in flight, through ``finally`` or ``with``: nobody knows yet that it will not be caught;
- one in a process whose launcher catches it, such as a spawned child of torch.multiprocessing: it is reported at exit;
- SystemExit: no hook is called for it; all that is known at exit is the last call of ``sys.exit``.
"""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from gradsync.health.watch.exit_causes import note_exits

__all__ = ["tell_uncaught"]

_is_installed = False


def tell_uncaught(in_main: Callable[[BaseException], None], in_thread: Callable[[BaseException, int], None]) -> None:
    """Call ``in_main`` with an exception that ends the script, and ``in_thread`` with one that ends a thread, and the
    number of the thread. Once per process."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    note_exits()
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
