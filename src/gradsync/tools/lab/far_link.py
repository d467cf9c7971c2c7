"""Delay and loss of packets, in user space: kernels without netem have no other way.

Hosts of a far lab have no cable, but two TAP devices each: ``eth0`` on the host, and a port of the bridge. A process
copies frames between the two::

    host0  eth0 ──▶ lost with a probability, or kept for ``delay`` seconds ──▶ port ═══ [ bridge ]
           eth0 ◀────────────────────────── at once ──────────────────────────── port

So each way between two hosts has the delay and the loss once. The process runs in the namespace of the bridge, and ends
with the lab. It is a program that needs no package: ``python far_link.py DELAY LOSS ETH0 PORT [ETH0 PORT …]``, with
descriptors of the devices.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["DelayLine", "open_tap", "start"]

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LARGEST_FRAME, FRAMES_AT_ONCE = 65536, 64


class DelayLine:
    """Frames on their way: each arrives ``delay`` seconds after it was sent, or is lost."""

    def __init__(self, delay: float, loss: float, seed: int = 0) -> None:
        self._delay, self._loss = delay, loss
        self._random = random.Random(seed)
        self._frames: deque[tuple[float, int, bytes]] = deque()

    def send(self, now: float, target: int, frame: bytes) -> None:
        if self._random.random() >= self._loss:
            self._frames.append((now + self._delay, target, frame))

    def arrived(self, now: float) -> list[tuple[int, bytes]]:
        """Take out what has arrived, and the device that it is for."""
        found = []
        while self._frames and self._frames[0][0] <= now:
            found.append(self._frames.popleft()[1:])
        return found

    def until_next(self, now: float) -> float | None:
        """The seconds until the next frame arrives; None if there is none."""
        return max(0.0, self._frames[0][0] - now) if self._frames else None


def open_tap(name: str) -> int:
    """Make a TAP device in the network of this thread. It lasts as long as the descriptor, which is returned."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return descriptor


def start(namespace: str, delay: float, loss: float, pairs: Sequence[tuple[int, int]]) -> None:
    """Start the process for pairs of devices, detached from this one, and close their descriptors here."""
    descriptors = [each for pair in pairs for each in pair]
    program = [sys.executable, "-I", __file__, str(delay), str(loss), *map(str, descriptors)]
    try:
        subprocess.run(
            ["setsid", "--fork", "ip", "netns", "exec", namespace, *program],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    finally:
        for each in descriptors:
            os.close(each)


def forward(delay: float, loss: float, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy frames until the process is ended."""
    line = DelayLine(delay, loss)
    ports, hosts = dict(pairs), {port: host for host, port in pairs}
    while True:
        ready, _, _ = select.select([*ports, *hosts], [], [], line.until_next(time.monotonic()))
        for device in ready:
            for frame in _read(device):
                if device in ports:
                    line.send(time.monotonic(), ports[device], frame)
                else:
                    _write(hosts[device], frame)
        for target, frame in line.arrived(time.monotonic()):
            _write(target, frame)


def _read(device: int) -> list[bytes]:
    frames: list[bytes] = []
    # A device that is down has none.
    with suppress(OSError):
        while len(frames) < FRAMES_AT_ONCE:
            frames.append(os.read(device, LARGEST_FRAME))
    return frames


def _write(device: int, frame: bytes) -> None:
    # Into a device that is down: lost, as on a cable that was pulled.
    with suppress(OSError):
        os.write(device, frame)


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[3:]]
    forward(float(sys.argv[1]), float(sys.argv[2]), list(zip(given[::2], given[1::2], strict=True)))
