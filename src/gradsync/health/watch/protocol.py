"""The watch's protocol, separate from the communicator: short JSON frames on connections that start with
authentication.

A frame is four bytes of length and a JSON object; nothing is pickled. A line is a connection between the *hub*, which
is rank 0 of the group, and another rank. Both know a secret that the ranks have exchanged over their group and that
never crosses the line itself: each end proves that it knows the secret, with a code over a nonce that the other drew.

::

    hub    {"nonce": a}                                  every connection gets a nonce
    rank   {"rank": 2, "nonce": b, "proof": code(a, 2)}  and answers with its own, and a code over both
    hub    {"proof": code(b, "hub")}                     now they are connected

Until then an unauthenticated peer may say little, and not for long.
"""

import errno
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

__all__ = ["HUB", "SECRET_BYTES", "Frames", "Handshake", "Line", "ProtocolError", "code", "join", "pack"]

Message = dict[str, Any]

# The rank that all others are connected with.
HUB = 0
LARGEST = 64 * 1024
LARGEST_OF_STRANGERS = 512
NONCE_BYTES = 16
SECRET_BYTES = 32
READ_BYTES = 64 * 1024
# What is held for an end that does not read; beats are left out long before.
MOST_HELD = 1 << 20
# Errors of a line whose other end may well live: the way to it is broken.
BROKEN_WAYS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}

_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The data received is not a frame, or its sender does not know the secret."""


def pack(message: Mapping[str, Any]) -> bytes:
    """The frame of ``message``."""
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > LARGEST:
        raise ProtocolError(f"a frame has at most {LARGEST} bytes, this one {len(text)}")
    return _LENGTH.pack(len(text)) + text


class Frames:
    """Collects bytes as they arrive, and returns frames once they are complete."""

    def __init__(self, largest: int = LARGEST) -> None:
        self.largest = largest
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._held += data
        messages = []
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            # Before it has come: nobody makes this rank hold what it does not want.
            if length > self.largest:
                raise ProtocolError(f"a frame of {length} bytes, where {self.largest} are allowed")
            if len(self._held) < _LENGTH.size + length:
                break
            text = bytes(self._held[_LENGTH.size : _LENGTH.size + length])
            del self._held[: _LENGTH.size + length]
            messages.append(_read(text))
        return messages


def _read(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame that is no JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame with {type(message).__name__}, where an object is expected")
    return message


def code(secret: bytes, nonce: str, name: object) -> str:
    """A code that only a process that knows ``secret`` can compute."""
    return hmac.new(secret, f"{nonce} {name}".encode(), "sha256").hexdigest()


class Line:
    """A connection that never blocks.

    ``end`` says how it ended: ``closed`` or ``reset`` by the other end, ``broken`` on the way, ``off`` where the other
    end no longer has a watch.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.end = ""
        self.frames = Frames()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Mapping[str, Any], *, unless_busy: bool = False) -> None:
        """Send ``message``, now or when the other end reads again; never mind if it does not matter any more then."""
        self.send_frame(pack(message), unless_busy=unless_busy)

    def send_frame(self, frame: bytes, *, unless_busy: bool = False) -> None:
        if self.end or (self._unsent and unless_busy) or len(self._unsent) > MOST_HELD:
            return
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._note(error)

    def receive(self) -> list[Message]:
        """The messages received. Sets ``end`` if no more will arrive."""
        try:
            data = self.connection.recv(READ_BYTES)
            if data:
                return self.frames.feed(data)
            self.end = "closed"
        except BlockingIOError:
            pass
        except ProtocolError:
            # Not a sign that the other end is gone, nor that this one is: it may be of another version.
            self.send({"off": True})
            self.end = "off"
        except OSError as error:
            self._note(error)
        return []

    def close(self) -> None:
        self.connection.close()

    def _note(self, error: OSError) -> None:
        # What was sent before may still lie here to be read: a broken pipe is noted, a reading finds the end itself.
        if error.errno in BROKEN_WAYS:
            self.end = "broken"
        elif error.errno != errno.EPIPE:
            self.end = "reset"
        self._unsent.clear()


class Handshake:
    """The hub's side of a newly opened line: admits a peer that proves to be one of the ``missing`` ranks."""

    def __init__(self, line: Line, secret: bytes, missing: set[int]) -> None:
        self.line, self._secret, self._missing = line, secret, missing
        line.frames.largest = LARGEST_OF_STRANGERS
        self._nonce = secrets.token_hex(NONCE_BYTES)
        line.send({"nonce": self._nonce})

    def hear(self) -> int | None:
        """The rank at the other end, once it has authenticated. Raises ProtocolError if it fails to."""
        messages = self.line.receive()
        if self.line.end:
            raise ProtocolError("it has gone")
        if not messages:
            return None
        rank, nonce, proof = (messages[0].get(key) for key in ("rank", "nonce", "proof"))
        if type(rank) is not int or rank not in self._missing or not isinstance(nonce, str):
            raise ProtocolError("nobody who is missing")
        if not isinstance(proof, str) or not _same(proof, code(self._secret, self._nonce, rank)):
            raise ProtocolError("it does not know the secret")
        self._missing.remove(rank)
        self.line.frames.largest = LARGEST
        self.line.send({"proof": code(self._secret, nonce, "hub")})
        return rank


def join(connection: socket.socket, rank: int, secret: bytes, seconds: float) -> Line:
    """A rank's side: prove who it is, and see that the other end is the hub. Waits as long as that, for each byte."""
    connection.settimeout(seconds)
    theirs = str(_next(connection).get("nonce"))
    mine = secrets.token_hex(NONCE_BYTES)
    connection.sendall(pack({"rank": rank, "nonce": mine, "proof": code(secret, theirs, rank)}))
    proof = _next(connection).get("proof")
    if not isinstance(proof, str) or not _same(proof, code(secret, mine, "hub")):
        raise ProtocolError("who listens there is not the hub")
    return Line(connection)


def _next(connection: socket.socket) -> Message:
    frames = Frames(LARGEST_OF_STRANGERS)
    # Byte by byte: what comes behind the frame is the line's.
    while data := connection.recv(1):
        for message in frames.feed(data):
            return message
    raise ProtocolError("the hub has hung up")


def _same(shown: str, expected: str) -> bool:
    return secrets.compare_digest(shown.encode(), expected.encode())
