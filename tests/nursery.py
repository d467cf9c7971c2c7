"""The zygote itself: imports once, then forks whatever it is asked for. Who asks is in tests/zygote.py."""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import random
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["LARGEST_ORDER", "Order", "as_python", "serve"]

# What most processes need; modules of tests are imported when they are first asked for.
IMPORTED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "gradsync.tools.cli.main",
    "gradsync.accelerator",
    "jinja2",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    # A rank imports the modules of tests, and those import these.
    "pytest",
    "hypothesis",
    "torch.testing",
)
LARGEST_ORDER = 1 << 20
MOST_FILES = 16
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be forked. With it come files: where to tell its end, its three standard ones, and more."""

    function: str
    args: tuple[Any, ...]
    variables: dict[str, str]
    folder: str
    path: Sequence[str] = ()
    imports: Sequence[str] = ()


def serve(connection: int, listener: int) -> None:
    """Fork what pytest, its workers and programs ask for, until pytest hangs up."""
    _die_with_parent()
    _Nursery(socket.socket(fileno=connection), socket.socket(fileno=listener)).run()


class _Nursery:
    """Those it has forked and who asked for them."""

    def __init__(self, pytest: socket.socket, listener: socket.socket) -> None:
        self._pytest, self._listener = pytest, listener
        self._path = list(sys.path)
        # Where to tell the end of each, and whom each must not outlive.
        self._statuses: dict[int, int] = {}
        self._askers: dict[socket.socket, set[int]] = {pytest: set()}

    def run(self) -> None:
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._own = (woken, wake)
        while True:
            ready, _, _ = select.select([self._listener, woken, *self._askers], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self._tell_ends()
            if self._listener in ready:
                self._welcome()
            for asker in self._askers.keys() & set(ready):
                if not self._take_order(asker):
                    if asker is self._pytest:
                        return
                    self._lose(asker)

    def _welcome(self) -> None:
        """A worker of pytest, or a program that asks for the process it stands for."""
        asker, _ = self._listener.accept()
        credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] == os.getuid():
            self._askers[asker] = set()
        else:
            asker.close()

    def _lose(self, asker: socket.socket) -> None:
        """Who has asked is gone, and so goes what was forked for it."""
        for pid in self._askers.pop(asker):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        asker.close()

    def _take_order(self, connection: socket.socket) -> bool:
        """Fork what is asked for. Whether there may be more to come."""
        try:
            message, files, _, _ = socket.recv_fds(connection, LARGEST_ORDER, MOST_FILES)
        except ConnectionResetError:
            return False
        if not message:
            return False
        order: Order = pickle.loads(message)
        try:
            sys.path[:] = order.path or self._path
            # Not before somebody asks: many a run of a few tests forks nothing.
            for name in (*IMPORTED, order.function.partition(":")[0], *order.imports):
                importlib.import_module(name)
            # What was imported stays: no collection in a forked process need look at it, and touch its pages.
            gc.freeze()
            threads = _threads()
            assert not threads, f"an import has started threads, which a fork would lose: {threads}"
        except BaseException:
            answer = pickle.dumps(traceback.format_exc())
        else:
            waiting, begun = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(waiting)
                self._forget(files[0])
                os.setsid()
                _die_with_parent()
                os.close(begun)
                _live(order, files[1:])
            os.close(begun)
            # Nobody hears of it before it leads a session: until then a signal to its group would reach nobody.
            os.read(waiting, 1)
            os.close(waiting)
            self._statuses[pid] = os.dup(files[0])
            self._askers[connection].add(pid)
            answer = pickle.dumps(pid)
        with contextlib.suppress(BrokenPipeError):
            connection.send(answer)
        for each in files:
            os.close(each)
        return True

    def _forget(self, status: int) -> None:
        """In a forked process: nothing of the zygote's stays open."""
        signal.set_wakeup_fd(-1)
        for each in (*self._own, status, *self._statuses.values()):
            os.close(each)
        for each in (self._listener, *self._askers):
            each.close()

    def _tell_ends(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            descriptor = self._statuses.pop(pid)
            for pids in self._askers.values():
                pids.discard(pid)
            # The asking process may have been killed.
            with contextlib.suppress(BrokenPipeError):
                os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(descriptor)


def _threads() -> list[str]:
    """Threads beside the first, but for those of an allocator that is prepared for forks: pyarrow's."""
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    return [name for name in names[1:] if not name.startswith("jemalloc")]


# -- a forked process --------------------------------------------------------------------------------------------------


def _live(order: Order, files: list[int]) -> NoReturn:
    """From its first moment to its last."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    standard, passed = files[:3], files[3:]
    for target, source in enumerate(standard):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(order.variables)
    os.chdir(order.folder)
    random.seed()
    module, _, name = order.function.partition(":")
    code = 0
    try:
        getattr(sys.modules[module], name)(*order.args, *passed)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        # As an interpreter does, for those who look there at the end.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        _end()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end() -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # This is left to the teardown of the interpreter, which there is none of.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


_execv = os.execv


def as_python(arguments: Sequence[str]) -> None:
    """What an interpreter makes of its arguments. Ranks that it starts begin with everything imported, too."""
    os.execv = _become  # type: ignore[assignment]
    if arguments[0] in ("-u", "-P"):
        return as_python(arguments[1:])
    kind, *rest = arguments
    sys.argv = list(rest)
    if kind == "-c":
        sys.argv[0] = kind
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv.insert(0, kind)
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
    return None


def _become(path: str, command: Sequence[str]) -> None:
    """In the place of ``os.execv``: a process that was forked to be an interpreter stays what it is."""
    if path != sys.executable:
        _execv(path, command)
    random.seed()
    try:
        as_python(command[1:])
    finally:
        _end()
