"""Processes that begin with everything imported: forked from one that has done it once.

Importing torch costs seconds of a core, and a suite of real processes starts hundreds. So pytest has a *zygote*, which
its workers share: it imports, computes nothing, starts no thread, and forks.

    pytest                                    zygote                            forked
    fork("tests.x:function", …)  ── order ──▶ import tests.x, fork   ────────▶  call the function, run exit handlers
    Forked.wait()                ◀─ status ─  wait for it

A launcher that knows only programs (mpirun, torchrun) starts `program()`: it takes the arguments of an interpreter, has
the zygote fork one, and passes on files, variables and signals, and its end.

What a test says of a fresh interpreter (what it imports, what variables do at its start, that its end is clean) needs a
fresh one: subprocess. Tearing all modules down takes a second of a core, too, and is left out here.

A forked process leads a session of its own, and dies with the process that asked for it and with the zygote, which dies
with pytest. Linux only. The other end is tests/nursery.py.
"""

import contextlib
import importlib
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.nursery import LARGEST_ORDER, Order

__all__ = ["Forked", "address", "fork", "program", "run_python", "share"]

ROOT = Path(__file__).parents[1]
# Who reads them: tests/forking_python.
ZYGOTE, INTERPRETER = "GRADSYNC_TESTS_ZYGOTE", "GRADSYNC_TESTS_PYTHON"


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
    """This process's end of a zygote: its own, or one that it was told of."""

    def __init__(self, connection: socket.socket, address: str, process: "subprocess.Popen[bytes] | None") -> None:
        self._socket, self.address, self._process = connection, address, process

    @classmethod
    def start(cls) -> "_Zygote":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # As in processes that a user starts: the library sets it too, and it is read when torch is imported.
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        address = f"gradsync-tests-{secrets.token_hex(8)}"
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + address)
            listener.listen()
            files = [theirs.fileno(), listener.fileno()]
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, "serve", *map(str, files)],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                start_new_session=True,
            )
        return cls(ours, address, process)

    @classmethod
    def join(cls, address: str) -> "_Zygote":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + address)
        except OSError:
            connection.close()
            raise
        return cls(connection, address, None)

    @property
    def alive(self) -> bool:
        """Unasked it says nothing. What there is to read is its end, or meant for somebody who was interrupted."""
        return not select.select([self._socket], [], [], 0)[0]

    def leave(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait()

    def fork(self, order: Order, files: Sequence[int]) -> Forked:
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
_shared: str | None = None
_lock = threading.Lock()


def address() -> str:
    """Where others may ask this process's zygote, too."""
    with _lock:
        return _living().address


def share(address: str) -> None:
    """Have this process's forks come from the zygote at that address. They die with this process all the same."""
    global _shared
    _shared = address


def _living() -> _Zygote:
    global _zygote
    if _zygote is not None and not _zygote.alive:
        _zygote.leave()
        _zygote = None
    if _zygote is None and _shared is not None:
        with contextlib.suppress(OSError):
            _zygote = _Zygote.join(_shared)
    if _zygote is None:
        _zygote = _Zygote.start()
    return _zygote


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
    order = Order(
        function=function,
        args=args,
        variables=dict(os.environ if variables is None else variables),
        folder=str(folder),
        path=[entry or os.getcwd() for entry in sys.path],
        imports=imports,
    )
    with _lock, Path(os.devnull).open() as nothing:
        standard = [nothing.fileno(), output.fileno(), (errors or output).fileno()]
        return _living().fork(order, [*standard, *passed])


def program() -> tuple[str, dict[str, str]]:
    """An executable that takes the arguments of an interpreter, and the variables it needs."""
    with _lock:
        zygote = _living()
    return str(ROOT / "tests" / "forking_python"), {ZYGOTE: zygote.address, INTERPRETER: sys.executable}


def run_python(
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    timeout: float = 100,
) -> "subprocess.CompletedProcess[str]":
    """``python arguments``, and what it wrote."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = fork(
            "tests.nursery:as_python", arguments, output=output, errors=errors, variables=variables, folder=folder
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill_all()
        wrote = []
        for file in (output, errors):
            file.seek(0)
            wrote.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(arguments, code, *wrote)


def _stand_in(arguments: list[str]) -> NoReturn:
    """What `tests/forking_python` does: it is to its parent what the forked process would be."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as zygote:
        zygote.connect("\0" + os.environ[ZYGOTE])
        status, theirs = os.pipe()
        order = Order(
            function="tests.nursery:as_python", args=(arguments,), variables=dict(os.environ), folder=os.getcwd()
        )
        socket.send_fds(zygote, [pickle.dumps(order)], [theirs, 0, 1, 2])
        os.close(theirs)
        pid = pickle.loads(zygote.recv(LARGEST_ORDER))
        if isinstance(pid, str):
            sys.exit(pid)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = Forked(pid, status).wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    # Under their own names, as those who ask know them.
    if sys.argv[1] == "serve":
        importlib.import_module("tests.nursery").serve(*map(int, sys.argv[2:]))
    else:
        importlib.import_module("tests.zygote")._stand_in(sys.argv[2:])
