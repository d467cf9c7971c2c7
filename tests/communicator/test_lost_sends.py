"""A send that Gloo has lost: its receiver was ready and then reset the connection. Nobody waits for it for long."""

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import BaseCommunicator
from gradsync.communicator.peer_link import end_wait
from gradsync.errors import CommunicatorLostError
from tests.communicators import fresh_communicator
from tests.ranks import RankError, RankPool

pytestmark = pytest.mark.timeout(120)

TIMEOUT = 40.0


def reset_when_closed() -> None:
    """Have this process's end reset its connections, as the kernel does where something was not read."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            connection = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:
            continue
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def lose_a_send(name: str) -> tuple[str, float]:
    """Rank 1 finds in one go that rank 0 is ready, and gone."""
    communicator = fresh_communicator(name, TIMEOUT)
    assert isinstance(communicator, BaseCommunicator)
    communicator.all_reduce(torch.ones(3)).wait()
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    tensor = torch.ones(1000)
    if communicator.rank == 0:
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGSTOP)
        communicator.broadcast(tensor, 1)
        time.sleep(0.5)
        # Its input ends with this process, which holds the other end.
        waker = subprocess.Popen(["sh", "-c", f"read line; sleep 0.3; kill -CONT {pids[1]}"], stdin=subprocess.PIPE)
        reset_when_closed()
        assert waker.poll() is None
        os._exit(3)
    # What the watch would say.
    threading.Timer(2.0, communicator.lose, ["rank 0 is gone"]).start()
    began = time.monotonic()
    with pytest.raises(CommunicatorLostError) as raised:
        communicator.broadcast(tensor, 1).wait()
    return str(raised.value), time.monotonic() - began


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["peer-exchange", "group"])
def test_nobody_waits_for_a_send_that_gloo_has_lost(own_ranks: Callable[[int], RankPool], name: str) -> None:
    died, answer = own_ranks(2).run(lose_a_send, name, expect_errors=True)
    assert isinstance(died, RankError)
    assert died.kind == "RankDied"
    assert not isinstance(answer, RankError), answer
    said, seconds = answer
    assert "rank 0" in said
    assert seconds < TIMEOUT / 2, "that was the timeout"


def end_waits() -> list[bool]:
    """Of a send, whose wait then returns at once, and of what is none."""
    group = dist.new_group()
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))  # type: ignore[attr-defined]
    outcome = []
    if dist.get_rank() == 1:
        send, receive = backend.send([torch.ones(3)], 0, 1), backend.recv([torch.ones(3)], 0, 2)
        outcome = [end_wait(send), send.wait(), end_wait(receive), end_wait(None)]
    dist.barrier()
    return outcome


def test_only_the_wait_for_a_send_is_ended(own_ranks: Callable[[int], RankPool]) -> None:
    assert own_ranks(2).run(end_waits)[1] == [True, False, False, False]
