"""The watch over real ranks: who is killed, stopped, cut off or leaves is named by all others; a pause is no harm."""

import hashlib
import json
import linecache
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

import gradsync
from gradsync.communicator import SharedMemoryCommunicator
from gradsync.errors import CommunicatorLostError, ConfigurationError
from gradsync.health.watch import detector, dump, set_up
from gradsync.lab import fork_ranks
from gradsync.tools.cli.main import app
from tests.processes import eventually
from tests.ranks import RankError, RankPool, pool_of
from tests.scripts import free_port
from tests.zygote import fork

pytestmark = pytest.mark.timeout(120)

STEPS = 12


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Ranks of their own: some do not survive their test."""
    pools = {size: RankPool(size) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


class Heard(logging.Handler):
    """What the logger says on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("gradsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Training:
    """A model whose gradients travel in several buckets, over a group of its own."""

    def __init__(self, transport: str, timeout: float = 60.0) -> None:
        os.environ["GRADSYNC_TRANSPORT"] = transport
        torch.manual_seed(0)
        self.group = dist.new_group(timeout=timedelta(seconds=timeout))
        layers = [nn.Linear(64, 64) for _ in range(4)]
        self.model = gradsync.DistributedDataParallel(
            nn.Sequential(*layers), process_group=self.group, bucket_cap_mb=0.02
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(dist.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 64)).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())
        return hashlib.sha256(parameters).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of a process."""

    pid: int
    code: int
    output: str


def run_processes(function: Callable[..., None], size: int, *arguments: object, **variables: str) -> list[Ended]:
    """Ranks that are processes of their own: each runs the function with its rank, their number and a free port."""
    port, variables = free_port(), os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables
    name = f"{function.__module__}:{function.__name__}"
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(size)]
        ranks = [
            fork(name, rank, size, port, *arguments, output=file, variables=variables)
            for rank, file in enumerate(files)
        ]
        for rank in ranks:
            stack.callback(rank.kill_all)
        codes = [rank.wait(90) for rank in ranks]
        said = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in files]
    return [Ended(pid=rank.pid, code=code, output=text) for rank, code, text in zip(ranks, codes, said, strict=True)]


# -- ranks that end ---------------------------------------------------------------------------------------------------


def train_until_one_ends(transport: str, victim: int, seconds: float, number: int) -> NoReturn:
    """At any moment the victim is killed, or ends its process itself."""
    training = Training(transport)
    training.step()
    if dist.get_rank() == victim:
        end = (lambda: os._exit(3)) if number == 0 else (lambda: os.kill(os.getpid(), number))
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
    while True:
        training.step()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(0, marks=pytest.mark.breadth)], ids=["killed", "_exit"]
)
@pytest.mark.parametrize(
    ("size", "transport"), [(2, "auto"), (3, "group"), pytest.param(3, "peer-exchange", marks=pytest.mark.breadth)]
)
def test_a_rank_that_ends_at_any_moment_is_named_by_all_others(
    pools: dict[int, RankPool], size: int, transport: str, number: int
) -> None:
    pool, chance = pools[size], random.Random()
    pool.run(os.getpid)
    pids, victim, seconds = pool.pids(), chance.randrange(size), chance.uniform(0.0, 0.3)
    answers = pool.run(train_until_one_ends, transport, victim, seconds, number, expect_errors=True)
    for rank, answer in enumerate(answers):
        assert isinstance(answer, RankError)
        if rank == victim:
            assert answer.kind == "RankDied"
            continue
        said = f"after {seconds} s: {answer}"
        assert answer.kind == CommunicatorLostError.__name__, said
        assert f"rank {victim} (process {pids[victim]} on " in answer.message, said
        assert "in window " in answer.message, said
        assert "Start all ranks again" in answer.message, said


def train_as_a_script(rank: int, size: int, port: int, how: str) -> None:
    """Rank 1 leaves the loop early, by the end of its script or by an error in it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    training = Training("auto")
    for number in range(STEPS):
        training.step()
        if rank == 1 and number == 5:
            if how == "raises":
                raise ValueError("no luck")
            if how == "ends":
                return
            sys.exit(3)


EXIT_LINE = next(
    line
    for _, _, line in train_as_a_script.__code__.co_lines()
    if line and "sys.exit(3)" in linecache.getline(__file__, line)
)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "raised ValueError: no luck"),
        ("ends", "has ended its script at "),
        ("exits", f"has ended its script, after sys.exit(3) in line {EXIT_LINE} of {__file__}, at "),
    ],
)
def test_a_script_that_leaves_its_loop_is_named_with_the_reason(how: str, told: str) -> None:
    first, second = run_processes(train_as_a_script, 2, how)
    assert f"CommunicatorLostError: rank 1 (process {second.pid} on " in first.output
    assert told in first.output
    assert ", in window " in first.output


def end_early() -> None:
    """Rank 1 has nothing more to do, and ends by os._exit, as what was forked does. Rank 0 hears its goodbye."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training = Training("auto")
    training.step()
    if dist.get_rank() == 0:
        (agent,) = set_up.agents()
        assert eventually(lambda: 1 in agent._detector.exits)
        assert agent._detector.exits[1].words == "has ended its script"


def end_early_as(rank: int, port: int) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update(meeting, RANK=str(rank))
    end_early()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_rank_that_has_done_its_work_says_goodbye() -> None:
    fork_ranks(None, end_early, ranks=2, timeout=60.0)
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=end_early_as, args=(rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


# -- ranks that stop --------------------------------------------------------------------------------------------------


def stop_for(seconds: float) -> None:
    """Stop this process, and have it go on after so many seconds."""
    with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_the_slow_one() -> list[str]:
    detector.SLOW_SECONDS = 1.5
    heard, training = Heard(), Training("auto")
    os.environ["GRADSYNC_WATCH"] = "stacks"
    talking = Training("auto")
    del os.environ["GRADSYNC_WATCH"]
    training.step()
    if dist.get_rank() == 1:
        time.sleep(4.0)
    for each in (talking, training):
        each.step()
    return heard.lines


def test_a_slow_rank_is_warned_about_with_what_it_does(pools: dict[int, RankPool]) -> None:
    first, second, third = pools[3].run(wait_for_the_slow_one)
    assert second == third == [], "one line, on one rank"
    (line,) = [line for line in first if "Its stack" in line][:1]
    assert "keeps others waiting for" in line
    assert "rank 0 and rank 2 wait in collective " in line
    assert "and it is in window 1, idle (no backward runs)" in line
    assert "wait_for_the_slow_one" in line


# -- while memory is shared -------------------------------------------------------------------------------------------


def share_memory(victim: int, happens: Callable[[], None]) -> list[str]:
    """As when buckets are made anew: more than fits into what is shared already."""
    detector.SLOW_SECONDS = 1.5
    heard, training = Heard(), Training("auto")
    training.step()
    if dist.get_rank() == victim:
        happens()
    communicator = training.model.communicator
    assert isinstance(communicator, SharedMemoryCommunicator)
    assert communicator.allocate(1 << 20, torch.float32, torch.device("cpu")).numel() == 1 << 20
    training.step()
    return heard.lines


def stop_a_while() -> None:
    stop_for(4.0)


def exit_at_once() -> None:
    os._exit(3)


@pytest.mark.parametrize("victim", [0, 2])
def test_who_keeps_others_from_sharing_memory_is_warned_about(pools: dict[int, RankPool], victim: int) -> None:
    said = pools[3].run(share_memory, victim, stop_a_while)
    first = said[1 if victim == 0 else 0]
    assert first, said
    assert f"rank {victim} (process {pools[3].pids()[victim]} on " in first[0]
    assert " in an allocation (shared memory of 1048576 × torch.float32)" in first[0]


def test_who_ends_before_it_has_shared_its_memory_is_named(pools: dict[int, RankPool]) -> None:
    pools[3].run(os.getpid)
    pid = pools[3].pids()[1]
    answers = pools[3].run(share_memory, 1, exit_at_once, expect_errors=True)
    for answer in (answers[0], answers[2]):
        assert isinstance(answer, RankError)
        assert answer.kind == CommunicatorLostError.__name__
        assert f"rank 1 (process {pid} on " in answer.message
        assert "has ended without a word" in answer.message
        assert "Start all ranks again" in answer.message


# -- set-up -----------------------------------------------------------------------------------------------------------


def wrap_under(mode: str) -> tuple[int, str]:
    """Rank 1 wants something else than the others."""
    if dist.get_rank() == 1:
        os.environ["GRADSYNC_WATCH"] = mode
    try:
        training = Training("auto")
        training.step()
        return sum(agent._group() is training.group for agent in set_up.agents()), ""
    except ConfigurationError as error:
        return -1, str(error)
    finally:
        os.environ.pop("GRADSYNC_WATCH", None)


def test_ranks_agree_on_whether_there_is_a_watch() -> None:
    assert pool_of(2).run(wrap_under, "off") == [(0, ""), (0, "")]
    assert pool_of(2).run(wrap_under, "on") == [(1, ""), (1, "")]
    for count, said in pool_of(2).run(wrap_under, "maybe"):
        assert count == -1
        assert "GRADSYNC_WATCH must be one of on, off, stacks, got 'maybe' on rank 1" in said


def without_sockets() -> tuple[int, list[str]]:
    heard = Heard()

    def no_door(*_: Any, **__: Any) -> NoReturn:
        raise OSError(24, "Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(set_up, "enter" if dist.get_rank() == 1 else "nothing", no_door, raising=False)
        training = Training("auto")
    training.step()
    return sum(agent._group() is training.group for agent in set_up.agents()), heard.lines


def test_without_sockets_training_goes_on_without_a_watch() -> None:
    (first, lines), (second, others) = pool_of(2).run(without_sockets)
    assert first == second == 0
    assert others == []
    (line,) = lines
    assert "there is no watch over the ranks" in line
    assert "rank 1 could not reach the watch of rank 0: [Errno 24] Too many open files" in line


def share_a_watch_and_lose_it() -> tuple[int, int, bool]:
    """Two models over one group have one watch, which ends with the group."""
    before = threading.active_count()
    first = Training("auto")
    agents = len(set_up.agents())
    other = gradsync.DistributedDataParallel(nn.Linear(4, 4), process_group=first.group)
    other(torch.ones(1, 4)).sum().backward()
    shared = len(set_up.agents())
    (agent,) = [agent for agent in set_up.agents() if agent._group() is first.group]
    dist.barrier()
    dist.destroy_process_group(first.group)
    agent._thread.join(20)
    return agents, shared, not agent._thread.is_alive() and threading.active_count() >= before


def test_models_share_a_watch_which_ends_with_their_group(pools: dict[int, RankPool]) -> None:
    for agents, shared, ended in pools[2].run(share_a_watch_and_lose_it):
        assert agents == shared
        assert ended


def fork_a_child() -> list[str]:
    """A worker of a DataLoader outlives its rank's connection, and holds no copy of it."""
    training = Training("auto")
    training.step()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(len(set_up.agents()))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    training.step()
    return ["clean" if code == 0 else f"the child ended with {code}"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_no_watch_and_disturbs_none(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(fork_a_child) == [["clean"], ["clean"]]


# -- dumps ------------------------------------------------------------------------------------------------------------


def dump_while_one_sleeps(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    # It was imported before the variable was set.
    dump.listen_for_requests(set_up.agents)
    Path(os.environ["GRADSYNC_DUMP"], f"process-{rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    training = Training("auto")
    training.step()
    if rank == 1:
        # Rank 0 waits in its next window by then; it is asked, and passes that on.
        folder = Path(os.environ["GRADSYNC_DUMP"])
        time.sleep(1.5)
        os.kill(int((folder / "process-0").read_text()), signal.SIGUSR1)
        eventually(lambda: all((folder / f"rank-{each}.json").exists() for each in range(size)))
    training.step()


def test_ranks_write_where_they_stand_when_one_is_asked(tmp_path: Path) -> None:
    ranks = run_processes(dump_while_one_sleeps, 2, GRADSYNC_DUMP=str(tmp_path))
    assert [rank.code for rank in ranks] == [0, 0], ranks
    first = json.loads((tmp_path / "rank-0.json").read_text())
    assert first["process"] == ranks[0].pid
    assert "synchronizing: gradients are on their way to all ranks" in first["models"][0]
    assert "Bucket(bucket 0: '3.bias'" in first["models"][0]
    assert any("dump_while_one_sleeps" in line for stack in first["stacks"].values() for line in stack)
    said = CliRunner().invoke(app, ["explain", str(tmp_path)]).output
    assert "rank 0 waits for rank 1 in collective " in said
    assert "dump_while_one_sleeps" in said
