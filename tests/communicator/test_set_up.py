"""Setting a communicator up: ranks agree on what to set up, and on whether it could be, before anybody uses it.

What differs between ranks, or fails on one of them, is known to all, and the group they came with still works.
"""

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from gradsync.communicator import (
    Communicator,
    HierarchicalCommunicator,
    ProcessGroupCommunicator,
    SharedMemoryCommunicator,
    fit_communicator,
    shared_heap,
)
from gradsync.communicator.rendezvous import ANSWER, Rendezvous, code
from gradsync.errors import ConfigurationError, GradsyncError, MismatchError
from tests.communicator.test_shared_memory import Lines
from tests.ranks import pool_of

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")


def sums_up(communicator: Any) -> bool:
    """Whether a collective, and the next one, give what all ranks brought."""
    tensors = [torch.full((numel,), float(number)) for number, numel in ((1, 3), (2, 100_000))]
    for tensor in tensors:
        communicator.all_reduce(tensor).wait()
    return all(bool((tensor == number * communicator.world_size).all()) for number, tensor in enumerate(tensors, 1))


# -- what the environment says ----------------------------------------------------------------------------------------


def fit_with(values: list[str | None]) -> tuple[str, str, bool]:
    """``GRADSYNC_TRANSPORT`` on every rank; what was raised, and whether the group is still in step."""
    communicator = ProcessGroupCommunicator(dist.new_group())  # type: ignore[arg-type]
    value = values[communicator.rank]
    with pytest.MonkeyPatch.context() as patch:
        if value is None:
            patch.delenv("GRADSYNC_TRANSPORT", raising=False)
        else:
            patch.setenv("GRADSYNC_TRANSPORT", value)
        with pytest.raises(GradsyncError) as raised:
            fit_communicator(communicator, CPU)
    return type(raised.value).__name__, str(raised.value), sums_up(communicator)


@pytest.mark.parametrize("values", [[None, "group"], ["shared-memory", "peer-exchange"], ["auto", "smoke-signals"]])
def test_a_communicator_that_only_one_rank_asks_for_is_refused_on_all(values: list[str | None]) -> None:
    for kind, said, works in pool_of(2).run(fit_with, values):
        assert kind == MismatchError.__name__
        assert f"GRADSYNC_TRANSPORT: rank 0 has {values[0] or 'auto'!r}, rank 1 has {values[1]!r}" in said
        assert works


def test_a_communicator_that_nobody_knows_is_refused_on_all() -> None:
    for kind, said, works in pool_of(2).run(fit_with, ["smoke-signals"] * 2):
        assert kind == ConfigurationError.__name__
        assert "got 'smoke-signals'" in said
        assert works


def change_its_mind() -> str:
    """The second model is wrapped when one rank's environment has changed, and the choice is known to both."""
    communicator = ProcessGroupCommunicator(dist.new_group())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSYNC_TRANSPORT", "group")
        fit_communicator(communicator, CPU)
        if communicator.rank == 1:
            patch.setenv("GRADSYNC_TRANSPORT", "shared-memory")
        with pytest.raises(MismatchError) as raised:
            fit_communicator(communicator, CPU)
    return str(raised.value)


def test_a_known_choice_is_compared_again() -> None:
    for said in pool_of(2).run(change_its_mind):
        assert "rank 0 has 'group', rank 1 has 'shared-memory'" in said


# -- what fails on one rank -------------------------------------------------------------------------------------------


def fail_with(number: int) -> Callable[..., NoReturn]:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def fail_to_start(self: threading.Thread) -> None:
    if self.name.startswith("gradsync"):
        raise RuntimeError("can't start new thread")
    original_start(self)


original_start = threading.Thread.start

FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "listens": lambda patch: patch.setattr(shared_heap.Rendezvous, "_listen", fail_with(errno.EMFILE)),
    "connects": lambda patch: patch.setattr(shared_heap.HostPeers, "_connect", fail_with(errno.EMFILE)),
    "accepts": lambda patch: patch.setattr(shared_heap.Rendezvous, "take", fail_with(errno.EMFILE)),
    "makes": lambda patch: patch.setattr(shared_heap, "_make_memory", fail_with(errno.EMFILE)),
    "receives": lambda patch: patch.setattr("socket.recv_fds", without_descriptors),
    "maps": lambda patch: patch.setattr(shared_heap, "_map", fail_with(errno.ENOMEM)),
    "starts": lambda patch: patch.setattr(threading.Thread, "start", fail_to_start),
    "sets alarms": lambda patch: patch.setattr("gradsync.communicator.background.make_timer", fail_with(errno.EMFILE)),
}


def without_descriptors(connection: Any, nbytes: int, _: int) -> tuple[bytes, list[int], int, None]:
    """As the kernel hands a message over to a process that may not have another descriptor."""
    return connection.recv(nbytes), [], 0, None


def fit_where_one_fails(names: list[str]) -> list[tuple[str, int, bool]]:
    """What was chosen, how often the log said that it is another way, and whether it works."""
    log = Lines()
    seen = []
    for name in names:
        communicator = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=20)))  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch, log.listening():
            patch.setenv("GRADSYNC_TRANSPORT", "auto")
            log.lines.clear()
            if communicator.rank == 1:
                FAULTS[name](patch)
            choice = fit_communicator(communicator, CPU)
        told = sum("gradients travel over sockets" in line for line in log.lines)
        seen.append((str(choice), told, sums_up(choice.communicator)))
    return seen


def test_what_one_rank_cannot_set_up_nobody_waits_for() -> None:
    for seen in pool_of(3).run(fit_where_one_fails, list(FAULTS)):
        for name, (choice, told, works) in zip(FAULTS, seen, strict=True):
            assert choice.startswith("the process group (memory cannot be shared (rank 1 could not "), (name, choice)
            assert told == 1, name
            assert works, name


class FewDescriptors:
    """Room for so many more of them on rank 1."""

    def __init__(self, rank: int, room: int) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        # Free numbers below the highest count, too.
        free = set(range(highest)) - {int(path.name) for path in Path("/proc/self/fd").iterdir()}
        self._fillers = [os.open(os.devnull, os.O_RDONLY) for _ in free] if rank == 1 else []
        limit = highest + 1 + room if rank == 1 else self._limits[0]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, self._limits[1]))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)
        for filler in self._fillers:
            os.close(filler)


def fit_with_few_descriptors(rooms: list[int]) -> list[str]:
    choices = []
    for room in rooms:
        communicator = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=20)))  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRADSYNC_TRANSPORT", "auto")
            with FewDescriptors(communicator.rank, room):
                choice = fit_communicator(communicator, CPU)
        assert sums_up(choice.communicator)
        choices.append(str(choice).partition(" (")[0])
    return choices


@pytest.mark.breadth
def test_descriptors_may_run_out_anywhere() -> None:
    """Listener, sockets, memory of one's own and of the others, timer: whichever is the first that is not to be had."""
    first, second, third = pool_of(3).run(fit_with_few_descriptors, list(range(9)))
    assert first == second == third
    assert first[0] == "the process group"
    assert first[-1] == "shared memory"


def hosts_where_one_fails() -> tuple[str, bool]:
    """Two hosts, and on one of them a rank that cannot map memory: the other host must know."""
    communicator = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=20)))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSYNC_TRANSPORT", "auto")
        patch.setenv("GRADSYNC_HOST", f"host{communicator.rank // 2}")
        if communicator.rank == 3:
            FAULTS["maps"](patch)
        choice = fit_communicator(communicator, CPU)
    assert isinstance(choice.communicator, HierarchicalCommunicator)
    assert not isinstance(choice.communicator.inside, SharedMemoryCommunicator)
    return choice.reason, sums_up(choice.communicator)


def test_a_host_that_cannot_share_memory_is_known_to_the_others() -> None:
    for reason, works in pool_of(4).run(hosts_where_one_fails):
        assert reason == "4 ranks are on 2 hosts that cannot share memory"
        assert works


def allocate_where_one_fails(name: str) -> tuple[list[str], bool, bool]:
    """Memory that is made later: a slab and a large piece, neither of which rank 1 can have."""
    communicator = SharedMemoryCommunicator(ProcessGroupCommunicator(dist.new_group()), timeout=20.0)  # type: ignore[arg-type]
    log = Lines()
    with pytest.MonkeyPatch.context() as patch, log.listening():
        if communicator.rank == 1:
            FAULTS[name](patch)
        tensors = [
            communicator.allocate(numel, torch.float32, CPU) for numel in (60_000, 60_000, 2_000_000, 60_000, 300_000)
        ]
    for tensor in tensors:
        communicator.all_reduce(tensor.fill_(communicator.rank + 1.0)).wait()
    sums = all(bool((tensor == 6.0).all()) for tensor in tensors)
    return log.lines, sums, sums_up(communicator)


@pytest.mark.parametrize("name", ["makes", "receives", "maps"])
def test_memory_that_one_rank_cannot_have_later_is_had_by_none(name: str) -> None:
    for rank, (lines, sums, works) in enumerate(pool_of(3).run(allocate_where_one_fails, name)):
        assert sums
        assert works
        assert len(lines) == (1 if rank == 1 else 0)
        assert all("rank 1 cannot share" in line for line in lines)


def set_up_with_little_patience() -> bool:
    """Rank 1 is late by more than the communicator's own timeout, which is for collectives."""
    communicator = ProcessGroupCommunicator(dist.new_group())  # type: ignore[arg-type]
    share = shared_heap.HostPeers.share

    def share_late(*args: Any) -> Any:
        threading.Event().wait(0.3)
        return share(*args)

    with pytest.MonkeyPatch.context() as patch:
        if communicator.rank == 1:
            patch.setattr(shared_heap.HostPeers, "share", share_late)
        shared: Communicator = SharedMemoryCommunicator(communicator, timeout=0.1)
    dist.barrier()
    return shared.failure is None


def test_setting_up_has_as_much_time_as_the_group() -> None:
    assert pool_of(2).run(set_up_with_little_patience) == [True, True]


# -- who may connect --------------------------------------------------------------------------------------------------


let_in = threading.Lock()
accept = Rendezvous._accept


def accept_later(rendezvous: Rendezvous, listener: socket.socket) -> None:
    with let_in:
        accept(rendezvous, listener)


def call_on(name: bytes, say: Callable[[bytes], bytes], *, user: int | None = None) -> socket.socket:
    """Connect as anybody can, since the name of the socket is in /proc/net/unix, and answer its nonce.

    Nobody must look at it as long as this process is another user's, too.
    """
    assert f"@{name[1:].decode()}" in Path("/proc/net/unix").read_text()
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(10.0)
    with let_in:
        if user is not None:
            os.seteuid(user)
        try:
            caller.connect(name)
        finally:
            if user is not None:
                os.seteuid(0)
    # A listener closes what is another user's, and may do so before the nonce was read.
    with contextlib.suppress(ConnectionError):
        caller.sendall(say(caller.recv(16)))
    return caller


def meet_among_strangers() -> list[str]:
    """They come first, before any rank. What became of each of them."""
    callers: dict[str, socket.socket] = {}

    def listen_to_strangers(*args: Any) -> Rendezvous:
        rendezvous = Rendezvous(*args)
        secret, name, _ = rendezvous.invitation

        def answer(rank: int, secret: bytes) -> Callable[[bytes], bytes]:
            return lambda nonce: ANSWER.pack(rank, bytes(16), code(secret, nonce, rank))

        def knock(who: str, say: Callable[[bytes], bytes], user: int | None = None) -> None:
            callers[who] = call_on(name, say, user=user)

        knock("mute", lambda _: b"")
        knock("garbage", lambda _: os.urandom(ANSWER.size))
        knock("short", lambda nonce: answer(1, secret)(nonce)[:-1])
        knock("knows the name", answer(1, name))
        knock("this rank's number", answer(0, secret))
        knock("no rank's number", answer(7, secret))
        knock("replays", lambda _: answer(1, secret)(bytes(16)))
        if os.geteuid() == 0:
            knock("another user", answer(1, secret), user=65534)
        return rendezvous

    group = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=20)))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 0:
            patch.setattr(Rendezvous, "_accept", accept_later)
            patch.setattr(shared_heap, "Rendezvous", listen_to_strangers)
        communicator = SharedMemoryCommunicator(group)
    assert sums_up(communicator)
    kept = []
    for name, caller in callers.items():
        with caller, contextlib.suppress(ConnectionError):
            if caller.recv(1):
                kept.append(name)
    assert group.rank == 1 or len(callers) >= 7
    return kept


def test_strangers_are_let_go_and_keep_nobody_waiting() -> None:
    assert pool_of(2).run(meet_among_strangers) == [[], []]


def meet_behind_a_full_queue() -> bool:
    """As many strangers as there is room for have come before any rank, and stay."""
    callers: list[socket.socket] = []

    def listen_to_many(*args: Any) -> Rendezvous:
        with pytest.MonkeyPatch.context() as slow:
            slow.setattr(Rendezvous, "_accept", lambda *_: time.sleep(0.01))
            rendezvous = Rendezvous(*args)
            with contextlib.suppress(BlockingIOError):
                while len(callers) < 100:
                    callers.append(socket.socket(socket.AF_UNIX))
                    callers[-1].setblocking(False)
                    callers[-1].connect(rendezvous.invitation.name)
        assert len(callers) < 100, "the queue is not full"
        return rendezvous

    group = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=20)))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "SOMAXCONN", 4)
        if group.rank == 0:
            patch.setattr(shared_heap, "Rendezvous", listen_to_many)
        communicator = SharedMemoryCommunicator(group)
    for caller in callers:
        caller.close()
    return sums_up(communicator)


def test_a_full_queue_keeps_no_rank_out() -> None:
    assert pool_of(2).run(meet_behind_a_full_queue) == [True, True]


def be_another_user() -> str:
    """A rank that another user runs is no peer: the group is used, on all ranks."""
    communicator = ProcessGroupCommunicator(dist.new_group(timeout=timedelta(seconds=20)))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSYNC_TRANSPORT", "auto")
        if communicator.rank == 1:
            patch.setattr("os.geteuid", lambda: 4_000_000_000)
        return str(fit_communicator(communicator, CPU))


def test_ranks_of_several_users_share_no_memory() -> None:
    for choice in pool_of(2).run(be_another_user):
        assert choice.startswith("the process group (memory cannot be shared (rank 1 could not reach the other ranks")
        assert "and this one as 4000000000" in choice
