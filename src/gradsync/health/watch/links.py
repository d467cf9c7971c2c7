"""Measures how fast the links to other hosts carry this process's data, from the kernel's counters of its connections.

For each connection the kernel counts the bytes that have arrived, and the time during which there was data to send. On
a slow link that time grows with the bytes; on a fast one it does not, however long the sender waits for its next data.
So each end learns the speed of its own link, although all ranks of a ring wait alike. It does not matter whose sockets
they are: Gloo's, or those of anything else that sends gradients.
"""

import contextlib
import os
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["LinkMeter", "Sent", "read_links"]

# In the kernel's struct tcp_info: tcpi_bytes_acked; tcpi_busy_time and tcpi_rwnd_limited, in microseconds.
INFO_BYTES = 256
ACKED, BUSY = struct.Struct("@Q"), struct.Struct("@QQ")
ACKED_AT, BUSY_AT = 120, 168
# A measurement takes this many windows, within limits.
WINDOWS = 5
MOST_SECONDS = 5.0
MOST_LINKS = 256
MOST_BYTES = 1 << 64
MOST_LETTERS = 64


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes sent from one address to another, and the seconds during which there was data to send."""

    source: str
    target: str
    size: int
    seconds: float

    def as_data(self) -> list[Any]:
        return [self.source, self.target, self.size, self.seconds]

    @classmethod
    def read(cls, data: Any) -> "list[Sent]":
        """What a list of :meth:`as_data` has become; without what is nothing of the kind."""
        found = []
        for each in data[:MOST_LINKS] if isinstance(data, list) else ():
            if not isinstance(each, list) or len(each) != 4:
                continue
            source, target, size, seconds = each
            is_named = all(isinstance(name, str) and len(name) <= MOST_LETTERS for name in (source, target))
            is_counted = type(size) is int and type(seconds) in (int, float)
            if is_named and is_counted and 0 <= size < MOST_BYTES and 0 <= seconds < 1e9:
                found.append(cls(source=source, target=target, size=size, seconds=float(seconds)))
        return found


def read_links() -> dict[tuple[str, str], tuple[int, float]]:
    """Bytes and seconds so far, by the addresses of this host and of another one. None where nobody tells."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    # With a timeout for all new sockets Python would make others' own connections non-blocking by looking at them.
    if sys.platform != "linux" or socket.getdefaulttimeout() is not None:
        return found
    for name in os.listdir("/proc/self/fd"):
        # It may be closed at this very moment, or be no connection.
        with contextlib.suppress(OSError, struct.error):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                source, target = copy.getsockname()[0], copy.getpeername()[0]
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
            (acked,), (busy, limited) = ACKED.unpack_from(info, ACKED_AT), BUSY.unpack_from(info, BUSY_AT)
            if source != target:
                size, seconds = found.get((source, target), (0, 0.0))
                # While the other end takes no more it is not the link that is slow.
                found[source, target] = size + acked, seconds + max(0, busy - limited) / 1e6
    return found


class LinkMeter:
    """Measures links over some windows, on request."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], tuple[int, float]] | None = None
        self._windows, self._until = 0, 0.0

    def begin(self, windows: int, now: float) -> None:
        """In the window of that number."""
        self._before, self._windows, self._until = read_links(), windows + WINDOWS, now + MOST_SECONDS

    def result(self, windows: int, now: float) -> list[Sent] | None:
        """None as long as there is none, or nobody has asked."""
        if self._before is None or (windows < self._windows and now < self._until):
            return None
        before, self._before = self._before, None
        return [
            Sent(source=source, target=target, size=size - old[0], seconds=round(seconds - old[1], 6))
            for (source, target), (size, seconds) in read_links().items()
            # Connections may have been closed meanwhile.
            if (old := before.get((source, target), (0, 0.0)))[0] <= size and old[1] <= seconds
        ]
