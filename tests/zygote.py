"""Processes that begin with everything imported: forked from one that has done it once.

Importing torch costs seconds of a core, and a suite of real processes starts hundreds. So each process of pytest has a
*zygote*: it imports, computes nothing, starts no thread, and forks.

    pytest                                    zygote                            forked
    fork("tests.x:function", …)  ── order ──▶ import tests.x, fork   ────────▶  call the function, run exit handlers
    Forked.wait()                ◀─ status ─  wait for it

What a test says of a fresh interpreter (what it imports, what variables do at its start, that its end is clean) needs a
fresh one: subprocess. Tearing all modules down takes a second of a core, too, and is left out here.

A forked process is the leader of a session of its own and dies with its zygote, which dies with pytest. Linux only.
"""

import atexit
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
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

__all__ = ["Forked", "fork", "run_module"]

ROOT = Path(__file__).parents[1]
# What most processes need; modules of tests are imported when they are first asked for.
IMPORTED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "gradsync.cli.main",
    "gradsync.accelerator",
    "jinja2",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
)
LARGEST_ORDER = 1 << 20
MOST_FILES = 16
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What is to be forked. With it come files: where to tell its end, its three standard ones, and more."""

    function: str
    args: tuple[Any, ...]
    variables: dict[str, str]
    folder: str
    path: list[str]
    imports: Sequence[str]


# -- in pytest ---------------------------------------------------------------------------------------------------------


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._read()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_all(self) -> None:
        """End it and all it has started in its session, and wait for it."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def _read(self) -> None:
        text = os.read(self._status, 32)
        os.close(self._status)
        # Nothing: the zygote is gone, and the process with it.
        self.returncode = int(text) if text else -signal.SIGKILL


class _Zygote:
    """This process's end of its zygote."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # As in processes that a user starts: the library sets it too, and it is read when torch is imported.
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, order: _Order, files: Sequence[int]) -> Forked:
        status, theirs = os.pipe()
        try:
            message = pickle.dumps(order)
            assert len(message) <= LARGEST_ORDER
            socket.send_fds(self._socket, [message], [theirs, *files])
        finally:
            os.close(theirs)
        answer = pickle.loads(self._socket.recv(LARGEST_ORDER))
        if isinstance(answer, str):
            os.close(status)
            raise RuntimeError(f"the zygote could not fork {order.function}:\n{answer}")
        return Forked(answer, status)


_zygote: _Zygote | None = None
_lock = threading.Lock()


def fork(
    function: str,
    *args: Any,
    output: IO[Any],
    errors: IO[Any] | None = None,
    variables: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    passed: Sequence[int] = (),
    imports: Sequence[str] = (),
) -> Forked:
    """Call ``function``, as "module:name", in a process of its own: with ``args``, and the numbers that the files
    ``passed`` have there. The zygote imports its module, and those of ``imports``, before."""
    global _zygote
    order = _Order(
        function=function,
        args=args,
        variables=dict(os.environ if variables is None else variables),
        folder=str(folder),
        path=[entry or os.getcwd() for entry in sys.path],
        imports=imports,
    )
    with _lock, Path(os.devnull).open() as nothing:
        if _zygote is None or not _zygote.alive:
            _zygote = _Zygote()
        standard = [nothing.fileno(), output.fileno(), (errors or output).fileno()]
        return _zygote.fork(order, [*standard, *passed])


def run_module(
    name: str,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    timeout: float = 100,
) -> "subprocess.CompletedProcess[str]":
    """``python -m name arguments``, and what it wrote."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = fork(
            f"{__name__}:as_module",
            name,
            list(arguments),
            output=output,
            errors=errors,
            variables=variables,
            folder=folder,
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill_all()
        wrote = []
        for file in (output, errors):
            file.seek(0)
            wrote.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([name, *arguments], code, *wrote)


def as_module(name: str, arguments: list[str]) -> None:
    """What ``python -m`` does. Ranks that it starts begin with everything imported, too."""
    os.execv = _become  # type: ignore[assignment]
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


_execv = os.execv


def _become(path: str, command: Sequence[str]) -> None:
    """In the place of ``os.execv``: a process that was forked to be ``python -c program`` runs the program as it is."""
    if (path, command[1]) != (sys.executable, "-c"):
        _execv(path, command)
    random.seed()
    sys.argv = ["-c", *command[3:]]
    try:
        exec(command[2], {"__name__": "__main__"})
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


# -- in the zygote -----------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Fork what is asked for until pytest hangs up."""
    _die_with_parent()
    for name in IMPORTED:
        importlib.import_module(name)
    connection = socket.socket(fileno=descriptor)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(statuses)
        if connection in ready:
            message, files, _, _ = socket.recv_fds(connection, LARGEST_ORDER, MOST_FILES)
            if not message:
                return
            order: _Order = pickle.loads(message)
            try:
                sys.path[:] = order.path
                for name in (order.function.partition(":")[0], *order.imports):
                    importlib.import_module(name)
                # What was imported stays: no collection in a forked process need look at it, and touch its pages.
                gc.freeze()
                threads = _threads()
                assert not threads, f"an import has started threads, which a fork would lose: {threads}"
            except BaseException:
                connection.send(pickle.dumps(traceback.format_exc()))
            else:
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    for each in (descriptor, woken, wake, files[0], *statuses.values()):
                        os.close(each)
                    connection.detach()
                    _live(order, files[1:])
                statuses[pid] = os.dup(files[0])
                connection.send(pickle.dumps(pid))
            for each in files:
                os.close(each)


def _threads() -> list[str]:
    """Threads beside the first, but for those of an allocator that is prepared for forks: pyarrow's."""
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    return [name for name in names[1:] if not name.startswith("jemalloc")]


def _tell_ends(statuses: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        descriptor = statuses.pop(pid)
        os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(descriptor)


def _live(order: _Order, files: list[int]) -> NoReturn:
    """A forked process, from its first moment to its last."""
    os.setsid()
    _die_with_parent()
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
        traceback.print_exc()
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    # Under its own name, as those who ask know it.
    importlib.import_module("tests.zygote").serve(int(sys.argv[1]))
