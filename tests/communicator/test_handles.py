"""What a handle promises, on every communicator: waiting, asking, calling back, and stages in the order of all ranks.

Like test_communicators.py, one file run over all of them; `ranks` decides which communicator a test meets. What breaks
a communicator is in test_failures.py.
"""

import logging
import threading
import time
from typing import Any

import pytest
import torch

from gradsync.communicator import Handle, InProcessWorld, choose_communicator
from gradsync.communicator import collective as collective_module
from gradsync.communicator.collective import Collective, InlineWork, waited_here
from gradsync.communicator.logs import LOGGER, VARIABLE, configure_logging
from gradsync.errors import ConfigurationError
from tests.communicators import CommunicatorRanks
from tests.processes import eventually
from tests.ranks import Ranks, ThreadRanks, pool_of

pytestmark = pytest.mark.timeout(120)


def test_what_a_thread_has_waited_ends_with_it() -> None:
    """Trainings that start threads for years keep nothing of each, and a number that is given out again is not it."""
    communicator = InProcessWorld(1).communicator(0)
    before = waited_here()
    seen: list[tuple[float, float]] = []

    def wait() -> None:
        first = waited_here()
        # One is alone, and waits all the same.
        collective = Collective(communicator, "all_reduce", "sum", 1, torch.float32)
        collective.work = InlineWork(lambda: time.sleep(0.001))
        collective.wait()
        seen.append((first, waited_here()))

    def held() -> int:
        return sum(len(value) for value in vars(collective_module).values() if isinstance(value, dict | set))

    size = held()
    for _ in range(20):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    assert [first for first, _ in seen] == [0.0] * 20
    assert all(after > 0 for _, after in seen)
    assert (held(), waited_here()) == (size, before)


# -- waiting, asking, calling back ------------------------------------------------------------------------------------


def wait_again() -> list[float]:
    """Twice here, and once on another thread, each time with the result there."""
    communicator = choose_communicator()
    tensor = torch.ones(5)
    handle = communicator.all_reduce(tensor)
    assert isinstance(handle, Handle)
    seen = []

    def look() -> None:
        handle.wait()
        seen.append(float(tensor.sum()))

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    look()
    return seen


def test_a_handle_may_be_waited_for_again_and_elsewhere(ranks: Ranks) -> None:
    assert ranks.run(wait_again) == [[5.0 * ranks.world_size] * 3] * ranks.world_size


def wait_only_elsewhere() -> list[float]:
    communicator = choose_communicator()
    tensors = [torch.full((numel,), 2.0) for numel in (3, 100_000)]
    for tensor in tensors:
        thread = threading.Thread(target=communicator.all_reduce(tensor).wait)
        thread.start()
        thread.join()
    return [float(tensor[-1]) for tensor in tensors]


def test_another_thread_may_wait_alone(ranks: Ranks) -> None:
    assert ranks.run(wait_only_elsewhere) == [[2.0 * ranks.world_size] * 2] * ranks.world_size


def ask_and_be_called() -> dict[str, Any]:
    """Nobody waits: the collective ends by itself, whoever asks learns it, and whoever wants a call gets one."""
    communicator = choose_communicator()
    before = communicator.all_reduce(torch.ones(1))
    before.wait()
    tensor = torch.ones(5)
    if communicator.rank == 0:
        time.sleep(0.02)
    handle = communicator.all_reduce(tensor)
    called = threading.Event()
    found: list[list[float]] = []
    handle.when_done(lambda: (found.append(tensor.tolist()), called.set())[1])
    result = {"called": called.wait(20), "done": eventually(handle.done), "found": found[0]}
    handle.wait()
    at_once: list[int] = []
    handle.when_done(lambda: at_once.append(1))
    return {**result, "at once": eventually(lambda: at_once == [1]), "still done": handle.done()}


def test_it_tells_that_it_is_done(ranks: Ranks) -> None:
    expected = {"called": True, "done": True, "at once": True, "still done": True}
    for result in ranks.run(ask_and_be_called):
        assert result.pop("found") == [float(ranks.world_size)] * 5
        assert result == expected


def call_badly() -> list[float]:
    """What somebody else wants to be told must not harm the collective, or the next one."""
    communicator = choose_communicator()
    tensors = [torch.ones(3), torch.ones(3)]
    for tensor in tensors:
        handle = communicator.all_reduce(tensor)
        handle.when_done(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        handle.wait()
    return [float(tensor.sum()) for tensor in tensors]


def test_a_callback_that_fails_harms_nobody() -> None:
    for ranks in (ThreadRanks(2), CommunicatorRanks(pool_of(2), "shared-memory")):
        assert ranks.run(call_badly) == [[6.0, 6.0]] * 2


def describe() -> list[str]:
    communicator = choose_communicator()
    output = torch.zeros(2 * communicator.world_size, dtype=torch.int64)
    handles = [
        communicator.all_reduce(torch.ones(7)),
        communicator.broadcast(torch.ones(7, dtype=torch.bfloat16), 0),
        communicator.all_gather(output, torch.ones(2, dtype=torch.int64)),
        communicator.reduce_scatter(torch.ones(2, dtype=torch.int64), output, "max"),
        communicator.all_to_all(torch.empty_like(output), output),
    ]
    for handle in handles:
        handle.wait()
    return [handle.describe() for handle in handles]


def test_it_says_what_it_is(ranks: Ranks) -> None:
    total = 2 * ranks.world_size
    for said in ranks.run(describe):
        numbers = [int(text.removeprefix("collective ").partition(" ")[0]) for text in said]
        assert numbers == list(range(numbers[0], numbers[0] + 5))
        assert [text.partition(" (")[2] for text in said] == [
            "all_reduce sum of 7 × torch.float32)",
            "broadcast from 0 of 7 × torch.bfloat16)",
            f"all_gather of {total} × torch.int64)",
            f"reduce_scatter max of {total} × torch.int64)",
            f"all_to_all of {total} × torch.int64)",
        ]


# -- stages -----------------------------------------------------------------------------------------------------------


def chain_stages(numel: int, reverse: bool) -> list[list[float]]:
    """Two chains of two stages each, and collectives between; ranks are slow in different places."""
    communicator = choose_communicator()
    n = communicator.world_size
    handles, results = [], []
    for chain in range(2):
        first, second = torch.full((numel,), float(communicator.rank + chain)), torch.zeros(numel)
        gathered, between = torch.zeros(n * numel), torch.full((numel,), 10.0 + chain)

        def halve(first: torch.Tensor = first, second: torch.Tensor = second) -> Handle:
            time.sleep(0.01 * ((communicator.rank + 1) % n))
            second.copy_(first).add_(communicator.rank)
            return communicator.all_reduce(second)

        def gather(second: torch.Tensor = second, gathered: torch.Tensor = gathered) -> Handle:
            time.sleep(0.01 * communicator.rank)
            handle = communicator.all_gather(gathered, second + communicator.rank)
            handle.wait()
            return communicator.all_reduce(gathered, "max")

        handles.append(communicator.all_reduce(first).then(halve).then(gather))
        handles.append(communicator.all_reduce(between))
        results += [gathered, between]
    for handle in reversed(handles) if reverse else handles:
        handle.wait()
        handle.wait()
        # On a GPU a wait orders streams, and the host goes on.
        assert eventually(handle.done)
    return [[float(row[0]) for row in result.view(-1, numel)] for result in results]


@pytest.mark.parametrize(("numel", "reverse"), [(3, False), (200_000, True)])
def test_stages_have_their_place_in_the_order(ranks: Ranks, numel: int, reverse: bool) -> None:
    n = ranks.world_size
    for result in ranks.run(chain_stages, numel, reverse):
        for chain in range(2):
            first = sum(rank + chain for rank in range(n))
            second = sum(first + rank for rank in range(n))
            assert result[2 * chain] == [float(second + rank) for rank in range(n)]
            assert result[2 * chain + 1] == [n * (10.0 + chain)]


def end_without_a_wait() -> list[float]:
    """A stage that only computes, and one that starts something, with nobody who waits."""
    communicator = choose_communicator()
    tensor, ended = torch.ones(4), threading.Event()

    def add() -> None:
        assert not torch.is_grad_enabled()
        tensor.add_(1.0)

    handle = communicator.all_reduce(tensor).then(add).then(lambda: communicator.all_reduce(tensor))
    handle.when_done(ended.set)
    assert ended.wait(20)
    assert eventually(handle.done)
    assert "stage" in handle.describe()
    found = [float(tensor[0])]
    handle.wait()
    later = torch.ones(1)
    communicator.all_reduce(later).wait()
    return [*found, float(tensor[0]), float(later)]


def test_stages_come_to_their_end_by_themselves(ranks: Ranks) -> None:
    n = float(ranks.world_size)
    assert ranks.run(end_without_a_wait) == [[n * (n + 1), n * (n + 1), n]] * ranks.world_size


def stages_in_a_stage() -> list[float]:
    """Inside a stage everything happens on the spot, stages of stages too; all kinds of collectives."""
    communicator = choose_communicator()
    n = communicator.world_size
    tensor, share = torch.arange(2.0 * n) + communicator.rank, torch.zeros(2)
    whole, mine, other = torch.zeros(2 * n), torch.full((3,), float(communicator.rank)), torch.zeros(1)

    def scatter() -> Handle:
        return communicator.reduce_scatter(share, tensor).then(gather)

    def gather() -> Handle:
        share.div_(n)
        communicator.broadcast(mine, n - 1).wait()
        return communicator.all_gather(whole, share)

    handle = communicator.all_reduce(other).then(scatter)
    communicator.all_reduce(other).wait()
    handle.wait()
    return [*whole.tolist(), *mine.tolist()]


def test_a_stage_may_have_stages(ranks: Ranks) -> None:
    n = ranks.world_size
    expected = [*(float(place) + (n - 1) / 2 for place in range(2 * n)), *[n - 1.0] * 3]
    for result in ranks.run(stages_in_a_stage):
        assert result == pytest.approx(expected)


def many_stages(count: int) -> list[float]:
    communicator = choose_communicator()
    tensors = [torch.full((50,), float(number)) for number in range(count)]
    handles = [
        communicator.all_reduce(tensor).then(lambda tensor=tensor: communicator.all_reduce(tensor))
        for tensor in tensors
    ]
    for number, handle in enumerate(handles):
        if (number + communicator.rank) % 3 == 0:
            handle.wait()
    for handle in handles:
        handle.wait()
    return [float(tensor[0]) for tensor in tensors]


def test_many_stages_on_their_way(ranks: Ranks) -> None:
    n = ranks.world_size
    assert ranks.run(many_stages, 20) == [[float(number * n * n) for number in range(20)]] * n


# -- logs -------------------------------------------------------------------------------------------------------------


def test_every_collective_says_when_it_starts_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    communicator = InProcessWorld(1).communicator(0)
    communicator.all_reduce(torch.ones(1000)).wait()
    assert caplog.messages == []
    with caplog.at_level(logging.DEBUG, "gradsync"):
        communicator = InProcessWorld(1).communicator(0)
        communicator.all_reduce(torch.ones(1000)).then(lambda: communicator.all_reduce(torch.ones(2), "max")).wait()
    assert caplog.messages == [
        "rank 0: start collective 1 (all_reduce sum of 1000 × torch.float32, 4000 bytes)",
        "rank 0: end collective 1",
        "rank 0: start stage 2 after collective 1 (all_reduce sum of 1000 × torch.float32)",
        "rank 0: start collective 2.1 (all_reduce max of 2 × torch.float32, 8 bytes)",
        "rank 0: end collective 2.1",
        "rank 0: end stage 2",
    ]


def test_the_environment_turns_the_log_on(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    handlers, level = list(LOGGER.handlers), LOGGER.level
    monkeypatch.setenv(VARIABLE, " Info ")
    monkeypatch.setenv("RANK", "3")
    try:
        configure_logging()
        configure_logging()
        LOGGER.debug("not this")
        LOGGER.info("but this")
    finally:
        LOGGER.handlers[:] = handlers
        LOGGER.setLevel(level)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("[rank 3] INFO but this")


def test_another_word_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "loud")
    with pytest.raises(ConfigurationError, match=r"GRADSYNC_LOG must be one of debug, .*, got 'loud'"):
        configure_logging()


def test_who_waits_while_a_stage_breaks_the_communicator_gets_the_stages_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The communicator is broken before the thread of the stage has come to its end."""
    communicator = InProcessWorld(1).communicator(0)
    abort = communicator.abort

    def take_long(reason: str) -> None:
        abort(reason)
        time.sleep(0.5)

    def stage() -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(communicator, "abort", take_long)
    handle = communicator.all_reduce(torch.ones(1)).then(stage)
    until = time.monotonic() + 10
    while communicator.failure is None and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(ValueError, match="no luck"):
        handle.wait()
    with pytest.raises(ValueError, match="no luck"):
        handle.wait()
