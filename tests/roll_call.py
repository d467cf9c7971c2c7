"""Says who takes part, in the place of torchft's lighthouse, where that cannot be installed.

A server with a connection for each rank. All who ask get one answer when everybody of the last answer who is still
connected has asked, and whoever else has by then. A connection that ends is a rank that is lost, at once.
"""

import dataclasses
import json
import selectors
import socket
import threading
import time
import uuid
from typing import Any

from gradsync.health.elastic import Elastic, ElasticMember, MemberStatus

JOIN_SECONDS = 5.0
ADDRESS = "GRADSYNC_TEST_ROLL_CALL"


class RollCall:
    """The server, in a thread, until :meth:`close`."""

    def __init__(self, listener: socket.socket | None = None) -> None:
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        host, self.port = self._listener.getsockname()[:2]
        self.address = f"{host}:{self.port}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._asking: dict[socket.socket, dict[str, Any]] = {}
        self._known: dict[socket.socket, bytes] = {}
        self._last: set[socket.socket] = set()
        self._since = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        for line in (self._listener, *self._known):
            line.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.05):
                self._hear(key.fileobj)  # type: ignore[arg-type]
            if self._asking and self._is_complete():
                answer = json.dumps(list(self._asking.values())).encode() + b"\n"
                self._last = set(self._asking)
                self._asking = {}
                for line in self._last:
                    try:
                        line.sendall(answer)
                    except OSError:
                        self._forget(line)

    def _is_complete(self) -> bool:
        if self._last:
            return all(line in self._asking for line in self._last if line in self._known) and (
                bool(self._last & set(self._asking)) or time.monotonic() - self._since > JOIN_SECONDS
            )
        return set(self._asking) == set(self._known) or time.monotonic() - self._since > JOIN_SECONDS

    def _hear(self, line: socket.socket) -> None:
        if line is self._listener:
            new, _ = line.accept()
            self._known[new] = b""
            self._selector.register(new, selectors.EVENT_READ)
            return
        try:
            said = line.recv(1 << 16)
        except OSError:
            said = b""
        if not said:
            self._forget(line)
            return
        self._known[line] += said
        while b"\n" in self._known[line]:
            message, _, self._known[line] = self._known[line].partition(b"\n")
            if not self._asking:
                self._since = time.monotonic()
            self._asking[line] = json.loads(message)

    def _forget(self, line: socket.socket) -> None:
        if line in self._known:
            self._selector.unregister(line)
            line.close()
            del self._known[line]
        self._asking.pop(line, None)


class RollCallMembership:
    """A rank's line to a :class:`RollCall`."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.identity = uuid.uuid4().hex
        self._line = socket.create_connection((host, port))
        self._heard = b""

    def ask(self, status: MemberStatus, timeout: float) -> list[ElasticMember]:
        told = {"identity": self.identity, "status": dataclasses.asdict(status)}
        self._line.sendall(json.dumps(told).encode() + b"\n")
        self._line.settimeout(timeout)
        while b"\n" not in self._heard:
            said = self._line.recv(1 << 16)
            if not said:
                raise TimeoutError("the roll call has ended")
            self._heard += said
        answer, _, self._heard = self._heard.partition(b"\n")
        return [
            ElasticMember(identity=each["identity"], status=MemberStatus.read(each["status"]))
            for each in json.loads(answer)
        ]

    def own_address(self) -> str:
        return str(self._line.getsockname()[0])

    def close(self) -> None:
        self._line.close()


def join_roll_call(port: int, host: str = "127.0.0.1") -> Any:
    """For ``Elastic(join=…)``."""

    def join(_: Elastic) -> RollCallMembership:
        return RollCallMembership(port, host)

    return join
