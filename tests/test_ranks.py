"""The harness the other tests stand on."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import is_running, wait_until_gone
from tests.ranks import RankError, RankFailure, RankPool, pool_of
from tests.zygote import address, fork, share

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool of our own: these tests break it, and the shared ones shall not pay for the restarts."""
    pool = RankPool(2)
    yield pool
    pool.close()


def describe(word: str, *, times: int) -> tuple[int, int, str]:
    return dist.get_rank(), dist.get_world_size(), word * times


def sum_of_ranks() -> torch.Tensor:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total


def views_of_one_buffer() -> list[torch.Tensor]:
    return list(torch.zeros(100_000).chunk(100))


def fail_on(rank: int) -> int:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on rank {rank}")
    return dist.get_rank()


def fail_on_one_while_the_other_waits() -> None:
    fail_on(1)
    dist.barrier()


def fail_before_a_collective() -> None:
    dist.all_reduce(torch.ones(3), async_op=True)
    fail_on(1)
    dist.all_reduce(torch.ones(3), async_op=True)


class StubbornError(Exception):
    """Can be pickled, but not loaded."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raise_stubborn() -> None:
    raise StubbornError(1, 2)


def return_a_lambda() -> object:
    return lambda: None


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1000)


def die_on(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def warn() -> None:
    warnings.warn("beware", stacklevel=1)


def start_a_child() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def threads() -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_results_come_in_rank_order(process_ranks: RankPool) -> None:
    size = process_ranks.world_size
    assert process_ranks.run(describe, "ab", times=2) == [(rank, size, "abab") for rank in range(size)]


def test_shared_pools_are_reused(process_ranks: RankPool) -> None:
    size = process_ranks.world_size
    assert [total.item() for total in process_ranks.run(sum_of_ranks)] == [sum(range(size))] * size
    assert not dist.is_initialized(), "the parent is in no group"
    before = process_ranks.pids()
    assert pool_of(process_ranks.world_size) is process_ranks
    process_ranks.run(sum_of_ranks)
    assert process_ranks.pids() == before


def test_ranks_compute_with_one_thread(pool: RankPool) -> None:
    assert pool.run(threads) == [(1, "1")] * 2


def test_views_of_one_buffer_carry_it_once(pool: RankPool) -> None:
    for views in pool.run(views_of_one_buffer):
        assert len({view.untyped_storage().data_ptr() for view in views}) == 1


def test_failing_rank_is_reported_and_the_pool_recovers(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(fail_on, 1)
    message = str(failure.value)
    assert "rank 1 raised ValueError: no luck on rank 1" in message
    assert "in fail_on" in message
    assert "rank 0 returned" in message
    assert "rank 1 was here" in message
    assert pool.pids() == []
    assert pool.run(describe, "a", times=1) == [(0, 2, "a"), (1, 2, "a")]


def test_ranks_left_waiting_show_where(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(fail_on_one_while_the_other_waits)
    message = str(failure.value)
    assert "rank 1 raised ValueError" in message
    # Gloo may notice that its peer is gone, or wait: either way the story says where rank 0 stood.
    assert "in fail_on_one_while_the_other_waits" in message.partition("--- rank 1")[0]


@pytest.mark.breadth
def test_hanging_rank_meets_the_timeout_and_the_pool_recovers(pool: RankPool) -> None:
    pool.run(sum_of_ranks)
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"no answer from ranks \[1\] within 3 s") as failure:
        pool.run(hang_on, 1, timeout=3)
    assert time.monotonic() - start < 10
    assert "in hang_on" in str(failure.value)
    assert pool.run(describe, "a", times=1) == [(0, 2, "a"), (1, 2, "a")]


def test_expected_errors_stand_in_the_place_of_results(pool: RankPool) -> None:
    pool.run(sum_of_ranks)
    before = pool.pids()
    zero, one = pool.run(fail_on, 1, expect_errors=True)
    assert zero == 0
    assert isinstance(one, RankError)
    assert (one.kind, one.message) == ("ValueError", "no luck on rank 1")
    assert isinstance(one.exception, ValueError)
    assert "in fail_on" in one.traceback
    assert pool.pids() == before


def test_ranks_out_of_step_are_replaced(pool: RankPool) -> None:
    pool.run(sum_of_ranks)
    before = pool.pids()
    pool.run(fail_before_a_collective, expect_errors=True)
    assert pool.pids() == []
    assert [total.item() for total in pool.run(sum_of_ranks)] == [1, 1]
    assert not set(pool.pids()) & set(before)


def test_expected_death_is_named(pool: RankPool) -> None:
    zero, one = pool.run(die_on, 1, expect_errors=True)
    assert zero == 0
    assert isinstance(one, RankError)
    assert one.kind == "RankDied"
    assert "-9" in one.message
    assert pool.run(describe, "a", times=1) == [(0, 2, "a"), (1, 2, "a")]


def test_death_between_runs_is_noticed(pool: RankPool) -> None:
    pool.run(sum_of_ranks)
    victim = pool._workers[1].process
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(timeout=30)  # until its last thread has let go of the connection
    assert [total.item() for total in pool.run(sum_of_ranks)] == [1, 1]


@pytest.mark.parametrize(("function", "kind"), [(raise_stubborn, "StubbornError"), (return_a_lambda, None)])
def test_what_cannot_be_sent_back_is_an_error(pool: RankPool, function: Callable[[], object], kind: str | None) -> None:
    for error in pool.run(function, expect_errors=True):
        assert isinstance(error, RankError)
        assert kind is None or (error.kind, error.exception) == (kind, None)


def test_what_cannot_be_sent_harms_nobody(pool: RankPool) -> None:
    pool.run(sum_of_ranks)
    before = pool.pids()
    with pytest.raises(Exception, match="pickle"):
        pool.run(lambda: None)
    pool.run(sum_of_ranks)
    assert pool.pids() == before


def test_warnings_are_errors(pool: RankPool) -> None:
    for error in pool.run(warn, expect_errors=True):
        assert isinstance(error, RankError)
        assert isinstance(error.exception, UserWarning)


@pytest.mark.parametrize("end", [RankPool.close, RankPool.kill])
def test_closing_leaves_no_process_behind(end: Callable[[RankPool], None]) -> None:
    pool = RankPool(2)
    grandchildren = pool.run(start_a_child)
    pids = pool.pids()
    assert all(map(is_running, pids))
    end(pool)
    wait_until_gone(pids)
    wait_until_gone(grandchildren)


@pytest.mark.program
def test_ranks_die_with_their_parent() -> None:
    """Killed in the middle of a run: no handler of the parent's gets to act."""
    script = (
        "from tests.ranks import RankPool; from tests.test_ranks import hang_on, sum_of_ranks;"
        "pool = RankPool(2); pool.run(sum_of_ranks); print(*pool.pids(), flush=True); pool.run(hang_on, 1)"
    )
    command, root = [sys.executable, "-c", script], Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_until_gone(pids)


def have_one_forked(address: str, told: int) -> None:
    """As a worker of pytest does, whose zygote is the main process's."""
    share(address)
    with tempfile.TemporaryFile() as output:
        os.write(told, str(fork("time:sleep", 1000, output=output).pid).encode())
        time.sleep(1000)


def test_a_process_leads_its_session_before_anybody_knows_of_it() -> None:
    """Who kills it does so by its group, which there would not be."""
    with tempfile.TemporaryFile() as output:
        for _ in range(10):
            process = fork("time:sleep", 1000, output=output)
            leads = os.getsid(process.pid) == process.pid
            process.kill_all()
            assert leads


def test_a_process_dies_with_the_worker_that_asked_a_shared_zygote_for_it() -> None:
    before = pool_of(2).run(sum_of_ranks)
    told, theirs = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(told, "rb", buffering=0) as reader:
        worker = fork(f"{__name__}:have_one_forked", address(), output=output, passed=[theirs])
        os.close(theirs)
        pid = int(reader.read(100))
        assert is_running(pid)
        worker.kill_all()
    wait_until_gone([pid])
    pids = pool_of(2).pids()
    assert pool_of(2).run(sum_of_ranks) == before
    assert pool_of(2).pids() == pids, "what others have asked for lives on"
