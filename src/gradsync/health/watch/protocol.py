"""The watch's protocol, separate from the communicator: short JSON frames on connections that never block.

A frame is four bytes of length and a JSON object; nothing is pickled. A line is a connection between the *hub*, which
is rank 0 of the group, and another rank. Both ends have authenticated: see gradsync.communicator.rendezvous.
"""

import errno
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

__all__ = ["HUB", "Frames", "Line", "ProtocolError", "pack"]

Message = dict[str, Any]

# The rank that all others are connected with.
HUB = 0
LARGEST = 64 * 1024
READ_BYTES = 64 * 1024
# What is held for an end that does not read; beats are left out long before.
MOST_HELD = 1 << 20
# Errors of a line whose other end may well live: the way to it is broken.
BROKEN_WAYS = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}

_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """Raised where the data received is not a frame."""


def pack(message: Mapping[str, Any]) -> bytes:
    """The frame that carries ``message``."""
    text = json.dumps(message, separators=(",", ":")).encode()
    if len(text) > LARGEST:
        raise ProtocolError(f"a frame has at most {LARGEST} bytes, this one {len(text)}")
    return _LENGTH.pack(len(text)) + text


class Frames:
    """Collects bytes as they arrive, and returns frames once they are complete."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._held += data
        messages = []
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            # Before it has come: nobody makes this rank hold what it does not want.
            if length > LARGEST:
                raise ProtocolError(f"a frame of {length} bytes, where {LARGEST} are allowed")
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


class Line:
    """A connection that never blocks.

    ``end`` says how it ended: ``closed`` or ``reset`` by the other end, ``broken`` on the way, ``off`` where the other
    end no longer has a watch.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.end = ""
        self._frames = Frames()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send ``message``, now or when the other end reads again."""
        self.send_frame(pack(message))

    def send_frame(self, frame: bytes, *, unless_busy: bool = False) -> None:
        """Send a packed message; ``unless_busy``, not if others are still unsent."""
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
            self._record_end(error)

    def receive(self) -> list[Message]:
        """The messages received. Sets ``end`` if no more will arrive."""
        try:
            data = self.connection.recv(READ_BYTES)
            if data:
                return self._frames.feed(data)
            self.end = "closed"
        except BlockingIOError:
            pass
        except ProtocolError:
            # Not a sign that the other end is gone, nor that this one is: it may be of another version.
            self.send({"off": True})
            self.end = "off"
        except OSError as error:
            self._record_end(error)
        return []

    def close(self) -> None:
        self.connection.close()

    def _record_end(self, error: OSError) -> None:
        # What was sent before may still lie here to be read: a broken pipe is noted, a reading finds the end itself.
        if error.errno in BROKEN_WAYS:
            self.end = "broken"
        elif error.errno != errno.EPIPE:
            self.end = "reset"
        self._unsent.clear()
