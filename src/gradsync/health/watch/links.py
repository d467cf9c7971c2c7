"""Measures how fast the links to other hosts carry this process's data, and finds the host whose link is slow.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from gradsync.base.files import from_json_or

__all__ = ["LinkMeter", "Sent", "SlowLink", "find_slow_link", "read_links", "read_sent"]

# In the kernel's struct tcp_info: tcpi_bytes_acked; tcpi_busy_time and tcpi_rwnd_limited, in microseconds.
INFO_BYTES = 256
ACKED, BUSY = struct.Struct("@Q"), struct.Struct("@QQ")
ACKED_AT, BUSY_AT = 120, 168
# A measurement takes this many windows, within limits.
WINDOWS = 5
MOST_SECONDS = 5.0
MOST_LINKS = 256


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes sent from one address to another, and the seconds during which there was data to send."""

    source: str
    target: str
    size: int
    seconds: float


def read_sent(data: object) -> list[Sent]:
    """Read what another rank has sent of its links; nothing if it is something else."""
    sent = from_json_or(tuple[Sent, ...], data, ())
    return [each for each in sent[:MOST_LINKS] if each.size >= 0 and each.seconds >= 0]


def read_links() -> dict[tuple[str, str], tuple[int, float]]:
    """Read how many bytes went from each address of this host to another host's, and in how many seconds, so far.

    Empty if there are no counts.
    """
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
        """Begin to measure, in the window of that number."""
        self._before, self._windows, self._until = read_links(), windows + WINDOWS, now + MOST_SECONDS

    def result(self, windows: int, now: float) -> list[Sent] | None:
        """What was sent over each link since the beginning; None as long as that is not known, or nobody has asked."""
        if self._before is None or (windows < self._windows and now < self._until):
            return None
        before, self._before = self._before, None
        return [
            Sent(source=source, target=target, size=size - old[0], seconds=round(seconds - old[1], 6))
            for (source, target), (size, seconds) in read_links().items()
            # Connections may have been closed meanwhile.
            if (old := before.get((source, target), (0, 0.0)))[0] <= size and old[1] <= seconds
        ]


# Less says nothing of a link: some packets, which wait for nobody.
LEAST_BYTES = 128 * 1024
# The kernel counts whole ticks of its clock.
LEAST_SECONDS = 1e-3
# Slow are those that no quick one is near to.
TIMES_SLOWER = 2.0


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A slow link from one host to another; ``target`` is empty if all links of a host are slow.

    Speeds are in bytes a second; ``others`` is the speed of the slowest of the other links.
    """

    source: str
    target: str
    rate: float
    others: float


def find_slow_link(sent: Iterable[Sent], hosts: Mapping[str, str]) -> SlowLink | None:
    """The link, or the host with slow links, that explains slow communication; ``hosts`` are names by addresses.

    None where all are about as fast, or neither a host nor a link explains it.
    """
    rates = _rates(sent, hosts)
    ordered = sorted(rates.values())
    gaps = [(quick / slow, slow, quick) for slow, quick in pairwise(ordered)]
    gap, rate, others = max(gaps, default=(0.0, 0.0, 0.0))
    if gap < TIMES_SLOWER:
        return None
    slow = {link for link, each in rates.items() if each <= rate}
    if len(slow) == 1:
        ((source, target),) = slow
        return SlowLink(source=source, target=target, rate=rate, others=others)
    # A host's link is in all that are slow, and in none that is not.
    guilty = [
        host for host in {host for link in slow for host in link} if {link for link in rates if host in link} == slow
    ]
    return SlowLink(source=guilty[0], target="", rate=rate, others=others) if len(guilty) == 1 else None


def _rates(sent: Iterable[Sent], hosts: Mapping[str, str]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for each in sent:
        link = hosts.get(each.source, each.source), hosts.get(each.target, each.target)
        size, seconds = sums.get(link, (0, 0.0))
        sums[link] = size + each.size, seconds + each.seconds
    return {
        link: size / max(seconds, LEAST_SECONDS)
        for link, (size, seconds) in sums.items()
        if size >= LEAST_BYTES and link[0] != link[1]
    }
