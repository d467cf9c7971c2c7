"""Starts ranks the way torchft expects: a lighthouse, and every rank a replica group under its own torchrun.

torchrun restarts its rank. ``python -m gradsync.tools.bench.faults.replicas SETTINGS``.

When one rank has reached the end, all have, or are on their way in and no longer needed.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

from gradsync.health.elastic import LIGHTHOUSE, Elastic, Lighthouse
from gradsync.tools.bench.faults.contenders import ELASTIC_PROGRAM, REPLICA, RESTARTS
from gradsync.tools.bench.faults.judging import RANKS

__all__ = ["main"]

HOST = "127.0.0.1"
GRACE_SECONDS, POLL_SECONDS = 5.0, 0.1


def main(settings: str) -> int:
    # As gradsync's elastic ranks have it: it takes ranks for lost sooner than that of torchft's example.
    lighthouse = Lighthouse(HOST, min_ranks=1, join_seconds=Elastic().timeout)
    replicas = [_start(rank, lighthouse.address, settings) for rank in range(RANKS)]
    signal.signal(signal.SIGTERM, _leave)
    try:
        _wait(replicas)
    finally:
        _end(replicas)
        lighthouse.close()
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _start(rank: int, lighthouse: str, settings: str) -> "subprocess.Popen[bytes]":
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--local-addr={HOST}", "--nproc-per-node=1"]
    command = [sys.executable, *torchrun, f"--max-restarts={RESTARTS}", "-m", ELASTIC_PROGRAM, settings]
    return subprocess.Popen(command, env={**os.environ, LIGHTHOUSE: lighthouse, REPLICA: str(rank)})


def _wait(replicas: "list[subprocess.Popen[bytes]]") -> None:
    """Until all have ended, or a little longer than the first that came to the end."""
    finished: float | None = None
    while any(each.poll() is None for each in replicas):
        time.sleep(POLL_SECONDS)
        if any(each.poll() == 0 for each in replicas):
            finished = finished or time.monotonic()
        if finished is not None and time.monotonic() - finished > GRACE_SECONDS:
            return


def _end(replicas: "list[subprocess.Popen[bytes]]") -> None:
    for each in replicas:
        each.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for each in replicas:
        with suppress(subprocess.TimeoutExpired):
            each.wait(max(0.0, deadline - time.monotonic()))
        if each.poll() is None:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
