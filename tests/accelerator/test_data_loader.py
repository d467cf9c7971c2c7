"""Prepared loaders: who gets which samples, in which order, and who knows what about the end."""

import itertools
import json
import sys
import time
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)

import gradsync
from gradsync.accelerator.data_loader import PreparedDataLoader, prepare_data_loader, skip_first_batches
from gradsync.accelerator.settings import DataLoaderConfiguration
from gradsync.accelerator.windows import GradientState
from gradsync.communicator import choose_communicator
from gradsync.testing import run_ranks
from tests.ranks import RankError, RankPool, Ranks, pool_of

pytestmark = pytest.mark.timeout(120)


def prepare(loader: DataLoader, state: GradientState | None = None, **options: Any) -> PreparedDataLoader:
    return prepare_data_loader(
        loader,
        communicator=choose_communicator(),
        device=torch.device("cpu"),
        gradient_state=state or GradientState(),
        configuration=DataLoaderConfiguration(**options),
    )


@dataclass
class Seen:
    """What a loop body could see at one batch."""

    samples: list[int]
    end: bool
    remainder: int
    padding: bool
    closes: bool


def walk(loader: PreparedDataLoader, window: int = 1) -> list[Seen]:
    return [
        Seen(
            batch.reshape(-1).tolist(),
            loader.end_of_dataloader,
            loader.remainder,
            loader.is_padding,
            loader.closes_window(window),
        )
        for batch in loader
    ]


def samples(loader: Any) -> list[list[int]]:
    return [batch.reshape(-1).tolist() for batch in loader]


class Stream(IterableDataset[int]):
    """0, 1, 2, ... to be shared among workers as torch's documentation says."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        if worker is None:
            return iter(range(self.length))
        return iter(range(worker.id, self.length, worker.num_workers))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


# -- who gets what --------------------------------------------------------------------------------------------------


def expected_shards(n: int, size: int, world: int, *, drop: bool, even: bool, split: bool) -> list[list[list[int]]]:
    """Accelerate's rule, said once more without rounds: plain batches, completed to a multiple, then handed out."""
    everything = list(range(n))
    plain = [everything[start : start + size] for start in range(0, n, size)]
    if drop:
        plain = [batch for batch in plain if len(batch) == size]
    if world == 1:
        return [plain]
    small = size // world if split else size
    whole = small * world
    if even and not drop and plain:
        source = itertools.cycle(everything[:whole])
        row = everything + [next(source) for _ in range(-n % whole)]
    else:
        row = [index for batch in plain for index in batch]
        if drop:
            row = row[: len(row) // whole * whole]
    small_batches = [row[start : start + small] for start in range(0, len(row), small)]
    shards = [small_batches[rank::world] for rank in range(world)]
    if shards[0]:
        shards = [shard or [shards[0][0]] for shard in shards]
    return shards


def shard(
    n: int, size: int, iterable: bool, window: int, drop: bool, even: bool, split: bool
) -> tuple[list[Seen], int, int | None]:
    dataset: Any = SizedStream(n) if iterable else range(n)
    loader = prepare(DataLoader(dataset, size, drop_last=drop), even_batches=even, split_batches=split)
    length = len(loader)
    return walk(loader, window), length, loader.total_batch_size


cases = given(
    n=st.integers(0, 40),
    factor=st.integers(1, 4),
    world=st.integers(1, 4),
    window=st.integers(1, 4),
    drop=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
    iterable=st.booleans(),
)


@cases
@example(n=1, factor=2, world=4, window=2, drop=False, even=True, split=False, iterable=False)
@example(n=3, factor=1, world=4, window=2, drop=False, even=False, split=True, iterable=True)
@example(n=5, factor=2, world=1, window=1, drop=False, even=True, split=False, iterable=True)
@example(n=0, factor=4, world=2, window=1, drop=False, even=False, split=False, iterable=False)
@example(n=0, factor=4, world=2, window=1, drop=False, even=True, split=False, iterable=True)
@example(n=17, factor=2, world=3, window=2, drop=False, even=False, split=False, iterable=False)
def test_law_of_shards(
    n: int, factor: int, world: int, window: int, drop: bool, even: bool, split: bool, iterable: bool
) -> None:
    size = factor * world if split else factor
    results = run_ranks(shard, world, n, size, iterable, window, drop, even, split)
    seen = [result[0] for result in results]
    expected = expected_shards(n, size, world, drop=drop, even=even, split=split)
    assert [[each.samples for each in rank] for rank in seen] == expected

    total = size if split else size * world
    for rank, length, total_batch_size in results:
        assert length == len(rank)
        assert total_batch_size == total
        assert [each.end for each in rank] == [False] * (len(rank) - 1) + [True] * bool(rank)

    # Nothing is lost and nothing repeated, once padding and what completes the last global batch are removed.
    met: Counter[int] = Counter()
    for round_of_ranks in itertools.zip_longest(*seen):
        present = [each for each in round_of_ranks if each is not None]
        row = [index for each in present if not each.padding for index in each.samples]
        remainders = {each.remainder for each in present}
        assert len(remainders) == 1
        if remainders != {-1}:
            assert even
            assert all(each.end for each in present)
            assert len(row) == total
            row = row[: remainders.pop()]
        met.update(row)
    kept = n
    if drop:
        kept = n // size * size // total * total
    assert met == Counter(range(kept))

    counts = [len(rank) for rank in seen]
    if even or drop:
        assert len(set(counts)) == 1
        sizes = {len(each.samples) for rank in seen for each in rank}
        assert len(sizes) <= 1 or world == 1

    # Windows are equal in number, full before the last, and end with the data.
    windows = [sum(each.closes for each in rank) for rank in seen]
    assert windows == [-(-min(counts) // window)] * world
    for rank in seen:
        closing = [number for number, each in enumerate(rank, 1) if each.closes]
        assert closing[:-1] == [window * (number + 1) for number in range(len(closing) - 1)]
        assert closing[-1:] == [len(rank)][: len(rank)]


class Backwards(Sampler[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n - 1, -1, -1))

    def __len__(self) -> int:
        return self.n


class Growing:
    """Batches of 1, 2, 3, ... samples; a batch sampler without a batch size."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.n:
            yield list(range(start, min(self.n, start + size)))
            start, size = start + size, size + 1

    def __len__(self) -> int:
        return len(list(iter(self)))


def custom(what: str, even: bool) -> tuple[list[list[int]], int]:
    loaders: dict[str, Callable[[], DataLoader]] = {
        "sampler": lambda: DataLoader(range(10), 3, sampler=Backwards(10)),
        "batch sampler": lambda: DataLoader(range(10), batch_sampler=Growing(10)),
        "no batches": lambda: DataLoader(range(5), batch_size=None),
        "no batches, stream": lambda: DataLoader(SizedStream(5), batch_size=None),
        "sampler of batches": lambda: DataLoader(
            torch.arange(10), batch_size=None, sampler=BatchSampler(Backwards(10), 3, False)
        ),
    }
    loader = prepare(loaders[what](), even_batches=even)
    return [torch.as_tensor(batch).reshape(-1).tolist() for batch in loader], len(loader)


@pytest.mark.parametrize(
    ("what", "even", "expected"),
    [
        ("sampler", True, [[[9, 8, 7], [3, 2, 1]], [[6, 5, 4], [0, 9, 8]]]),
        ("sampler", False, [[[9, 8, 7], [3, 2, 1]], [[6, 5, 4], [0]]]),
        ("batch sampler", True, [[[0], [3, 4, 5]], [[1, 2], [6, 7, 8, 9]]]),
        ("no batches", True, [[[0], [2], [4]], [[1], [3], [0]]]),
        ("no batches", False, [[[0], [2], [4]], [[1], [3]]]),
        ("no batches, stream", True, [[[0], [2], [4]], [[1], [3], [0]]]),
        ("sampler of batches", True, [[[9, 8, 7], [3, 2, 1]], [[6, 5, 4], [0, 9, 8]]]),
    ],
)
def test_custom_samplers(what: str, even: bool, expected: list[list[list[int]]]) -> None:
    results = run_ranks(custom, 2, what, even)
    assert [batches for batches, _ in results] == expected
    assert [length for _, length in results] == [len(batches) for batches in expected]


def test_split_batches_must_divide() -> None:
    with pytest.raises(gradsync.ConfigurationError, match=r"3 ranks.*batch size is 4"):
        run_ranks(shard, 3, 12, 4, False, 1, False, True, True)
    with pytest.raises(gradsync.ConfigurationError, match=r"2 ranks.*None"):
        run_ranks(lambda: prepare(DataLoader(range(4), batch_size=None), split_batches=True), 2)


# -- order ----------------------------------------------------------------------------------------------------------


def shuffled(make: str, **options: Any) -> list[list[list[int]]]:
    """Two epochs. Every rank's generators are in another state."""
    rank = choose_communicator().rank
    torch.default_generator.manual_seed(100 + rank)
    generator = torch.Generator().manual_seed(rank)
    if make == "global":
        loader = DataLoader(range(12), 2, shuffle=True)
    elif make == "generator":
        loader = DataLoader(range(12), 2, shuffle=True, generator=generator)
    elif make == "subset":
        loader = DataLoader(range(12), 2, sampler=SubsetRandomSampler(range(12)))
    else:
        sampler = BatchSampler(RandomSampler(range(12), generator=generator), 2, False)
        loader = DataLoader(range(12), batch_sampler=sampler)
    prepared = prepare(loader, **options)
    return [samples(prepared), samples(prepared)]


def union(results: list[list[list[list[int]]]], epoch: int) -> list[int]:
    return [index for row in zip(*(rank[epoch] for rank in results), strict=True) for batch in row for index in batch]


@pytest.mark.parametrize("make", ["global", "generator", "subset", "batch sampler"])
def test_ranks_shuffle_alike_whatever_their_generators(ranks: Ranks, make: str) -> None:
    results = ranks.run(shuffled, make)
    first, second = (union(results, epoch)[:12] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def plainly_shuffled(make: str) -> list[int]:
    """Two epochs of the plain loader on rank 0. On several ranks, one without a generator goes on as if it had one with
    the seed that rank 0 draws when the loader is prepared."""
    with torch.random.fork_rng():
        torch.manual_seed(100)
        if make == "drawn":
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
            loader = DataLoader(range(12), 2, sampler=RandomSampler(range(12), generator=generator))
        else:
            generator = torch.Generator().manual_seed(0) if make == "generator" else None
            loader = DataLoader(range(12), 2, shuffle=True, generator=generator)
        return [index for _ in range(2) for batch in samples(loader) for index in batch]


@pytest.mark.parametrize("make", ["global", "generator"])
def test_the_order_is_that_of_the_plain_loader_on_rank_0(process_ranks: RankPool, make: str) -> None:
    results = process_ranks.run(shuffled, make)
    expected = plainly_shuffled("drawn" if make == "global" else make)
    assert union(results, 0)[:12] + union(results, 1)[:12] == expected
    with torch.random.fork_rng():
        alone = run_ranks(shuffled, 1, make)
    assert union(alone, 0) + union(alone, 1) == plainly_shuffled(make)


def resumed_between_epochs(make: str) -> tuple[Any, Any]:
    """The second epoch, and that of a loader elsewhere which has loaded the state after the first."""

    def loader(seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed) if make == "generator" else None
        return prepare(DataLoader(range(12), 2, shuffle=True, generator=generator))

    first, second = loader(1), loader(2)
    samples(first)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    return samples(first), samples(second)


@pytest.mark.parametrize("make", ["global", "generator"])
def test_a_loader_that_was_saved_between_epochs_goes_on_in_its_order(ranks: Ranks, make: str) -> None:
    if ranks.world_size == 1 and make == "global":
        pytest.skip("then the order is drawn from torch's own generator, which a checkpoint saves by itself")
    for uninterrupted, resumed in ranks.run(resumed_between_epochs, make):
        assert resumed == uninterrupted


def test_a_seedable_order_depends_on_seed_and_epoch_alone(thread_ranks: Ranks) -> None:
    results = thread_ranks.run(shuffled, "generator", use_seedable_sampler=True, data_seed=5)
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(5 + epoch)
        assert union(results, epoch)[:12] == torch.randperm(12, generator=generator).tolist()


def draws_left() -> tuple[torch.Tensor, object]:
    """What the global generator and a sampler look like after an epoch, compared with plain iteration."""
    torch.manual_seed(3)
    loader = DataLoader(range(12), 2, shuffle=True)
    samples(prepare(loader))
    return torch.rand(3), loader.sampler.generator


def test_an_epoch_draws_no_more_than_plain_iteration(process_ranks: RankPool) -> None:
    """One number for workers, and one for the order: in the first epoch of plain iteration, and when it is prepared."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        samples(DataLoader(range(12), 2, shuffle=True))
        expected = torch.rand(3)
    for left, generator in process_ranks.run(draws_left):
        assert torch.equal(left, expected)
        assert generator is not None


class Wild(Backwards):
    """Shuffles by something the ranks do not share."""

    def __iter__(self) -> Iterator[int]:
        rank = choose_communicator().rank
        return iter([rank, *(index for index in range(self.n) if index != rank)])


def wild() -> str:
    with pytest.raises(gradsync.MismatchError) as raised:
        samples(prepare(DataLoader(range(12), 2, sampler=Wild(12))))
    return str(raised.value)


def test_samplers_that_disagree_are_found_out(process_ranks: RankPool) -> None:
    for message in process_ranks.run(wild):
        assert "ranks 0 and 1" in message
        assert "generator" in message


class Epochs(Backwards):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_the_epoch_is_passed_on() -> None:
    sampler = Epochs(4)
    loader = run_ranks(lambda: prepare(DataLoader(range(4), 2, sampler=sampler)), 1)[0]
    samples(loader)
    assert (sampler.epochs, loader.iteration) == ([0], 1)
    loader.set_epoch(7)
    samples(loader)
    assert (sampler.epochs, loader.iteration) == ([0, 7, 7], 8)


# -- mismatch ---------------------------------------------------------------------------------------------------------


def different_lengths(iterable: bool) -> None:
    n = 8 + 4 * choose_communicator().rank
    samples(prepare(DataLoader(SizedStream(n), 2) if iterable else DataLoader(range(n), 2)))


@pytest.mark.parametrize("iterable", [False, True])
def test_different_lengths_are_refused_on_every_rank(process_ranks: RankPool, iterable: bool) -> None:
    for answer in process_ranks.run(different_lengths, iterable, expect_errors=True):
        assert isinstance(answer, RankError)
        assert isinstance(answer.exception, gradsync.MismatchError)
        assert "length" in answer.message
        assert ("rank 0 has 8, rank 1 has 12" if iterable else "rank 0 has 4, rank 1 has 6") in answer.message


# -- loops ------------------------------------------------------------------------------------------------------------


def break_and_nest() -> list[Any]:
    state = GradientState()
    outer, inner = (prepare(DataLoader(range(8), 1), state) for _ in range(2))
    log: list[Any] = []
    for number, _ in enumerate(outer):
        assert state.active_dataloader is outer
        if number == 1:
            for _ in inner:
                assert state.active_dataloader is inner
                break
            assert state.active_dataloader is outer
            assert not state.end_of_dataloader
            break
    log.append(state.in_dataloader)
    with pytest.raises(ZeroDivisionError):
        for _ in outer:
            raise ZeroDivisionError
    log.append(state.in_dataloader)
    for batch in outer:
        ends = [(state.end_of_dataloader, inner.end_of_dataloader) for _ in inner]
        assert ends[-1] == (True, True)
        log.append((batch.item(), state.end_of_dataloader))
    assert not outer.end_of_dataloader
    return log


def test_loops_may_break_fail_and_nest(thread_ranks: Ranks) -> None:
    for rank, log in enumerate(thread_ranks.run(break_and_nest)):
        expected = [
            shard[0]
            for shard in expected_shards(8, 1, thread_ranks.world_size, drop=False, even=True, split=False)[rank]
        ]
        assert log == [False, False, *((index, number == len(expected)) for number, index in enumerate(expected, 1))]


def test_it_looks_like_the_loader_it_was_made_from() -> None:
    dataset = torch.arange(6)
    loader = DataLoader(dataset, 2, drop_last=True)
    prepared = run_ranks(lambda: prepare(loader), 1)[0]
    assert isinstance(prepared, DataLoader)
    names = ["dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn", "num_workers", "generator"]
    for name in names:
        assert getattr(prepared, name) is getattr(loader, name), name
    assert prepared.multiprocessing_context is None
    assert prepared.total_dataset_length == 6
    assert not hasattr(prepared, "no_such_thing")


def changed_on_the_sampler(split: bool) -> list[Any]:
    """What a rank gets with ``even_batches`` as it was, changed, and changed back; by the sampler itself, too."""
    loader = prepare(DataLoader(range(10), 4, shuffle=False), split_batches=split)
    sampler = loader.batch_sampler
    seen = []
    for even in (True, False, True):
        sampler.even_batches = even
        assert loader.configuration.even_batches is loader.batch_sampler.even_batches is even
        assert list(sampler) == list(loader.batch_sampler) == samples(loader)
        assert len(sampler) == len(loader.batch_sampler) == len(loader)
        seen.append(samples(loader))
    own = loader.base_dataloader.batch_sampler
    assert sampler.batch_sampler is own
    assert (sampler.sampler, sampler.batch_size, sampler.drop_last) == (own.sampler, 4, False)
    return seen


@pytest.mark.parametrize("split", [False, True])
def test_even_batches_may_be_set_on_the_sampler_of_a_prepared_loader(split: bool) -> None:
    results = run_ranks(changed_on_the_sampler, 2, split)
    for rank, (before, uneven, after) in enumerate(results):
        expected = [expected_shards(10, 4, 2, drop=False, even=even, split=split)[rank] for even in (True, False, True)]
        assert [before, uneven, after] == expected


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize("put", [True, False])
def test_batches_go_to_the_device(put: bool) -> None:
    loader = prepare_data_loader(
        DataLoader(range(4), 2, collate_fn=lambda items: {"x": torch.tensor(items), "y": "text"}),
        communicator=run_ranks(choose_communicator, 1)[0],
        device=torch.device("meta"),
        gradient_state=GradientState(),
        configuration=DataLoaderConfiguration(non_blocking=True),
        put_on_device=put,
    )
    batch = next(iter(loader))
    assert batch["x"].device == torch.device("meta" if put else "cpu")
    assert batch["y"] == "text"


# -- workers ----------------------------------------------------------------------------------------------------------


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.initial_seed() % 2**62])


def worker_seeds(seed: int) -> list[int]:
    torch.manual_seed(seed)
    loader = prepare(DataLoader(Noise(), 2, num_workers=1))
    return sorted({pair[1] for batch in loader for pair in batch.tolist()})


def test_workers_of_different_ranks_have_different_seeds() -> None:
    """They are repeatable, and those of rank 0 are what they were without ranks."""
    first = pool_of(4).run(worker_seeds, 1)
    assert len({seed for (seed,) in first}) == 4
    assert pool_of(4).run(worker_seeds, 1) == first
    assert pool_of(4).run(worker_seeds, 2) != first
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert [next(iter(DataLoader(Noise(), 2, num_workers=1)))[0, 1].item()] == first[0]


def check_dataset(worker: int) -> None:
    """As users do who split a stream in worker_init_fn."""
    information = get_worker_info()
    assert isinstance(information.dataset, Stream)
    information.dataset.length += 2 * worker


def stream_with_workers() -> tuple[list[Seen], list[Seen]]:
    even = prepare(DataLoader(Stream(19), 2, num_workers=2, persistent_workers=True))
    uneven = prepare(DataLoader(Stream(19), 2, num_workers=2, worker_init_fn=check_dataset), even_batches=False)
    list(even)
    return walk(even), walk(uneven, window=2)


def test_streams_are_read_by_workers() -> None:
    """Worker 0 has 0, 2, ..., 18, worker 1 has 1, 3, ..., 17, and where its dataset is prolonged also 19."""
    even, uneven = zip(*pool_of(2).run(stream_with_workers), strict=True)
    assert {len(rank) for rank in even} == {6}
    met: Counter[int] = Counter()
    for seen in zip(*even, strict=True):
        row = [index for each in seen for index in each.samples]
        assert len({each.remainder for each in seen}) == 1
        met.update(row if seen[0].remainder < 0 else row[: seen[0].remainder])
    assert met == Counter(range(19))

    # Ten samples are three rounds a worker, and rank 1 has no part in the third.
    assert [len(rank) for rank in uneven] == [6, 4]
    assert Counter(index for rank in uneven for seen in rank for index in seen.samples) == Counter(range(20))
    assert not any(seen.padding for rank in uneven for seen in rank)
    assert [[number for number, seen in enumerate(rank, 1) if seen.closes] for rank in uneven] == [[2, 6], [2, 4]]


class Lopsided(IterableDataset[int]):
    """Two samples in worker 0, ten in worker 1."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(2) if get_worker_info().id == 0 else range(2, 12))


def lopsided() -> list[bool]:
    return [seen.closes for seen in walk(prepare(DataLoader(Lopsided(), 2, num_workers=2), even_batches=False))]


def test_windows_are_aligned_although_a_worker_ends_early() -> None:
    """Rank 1 has no part in the first round of all, and two batches. So the second window of rank 0 has three."""
    assert pool_of(2).run(lopsided) == [[True, False, False, True], [True, True]]


# -- positions --------------------------------------------------------------------------------------------------------


def interrupted(kind: str, taken: int) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[list[int]]]:
    """The rest of an epoch, and the next; and both once more from a saved position, by a new loader."""

    def make(seed: int) -> PreparedDataLoader:
        rank = choose_communicator().rank
        generator = torch.Generator().manual_seed(seed + rank) if kind == "generator" else None
        dataset: Any = Stream(22) if kind == "stream" else range(22)
        shuffle = None if kind == "stream" else True
        return prepare(
            DataLoader(dataset, 2, shuffle=shuffle, generator=generator), use_seedable_sampler=kind == "seedable"
        )

    original = make(10)
    list(original)
    iterator = iter(original)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(original.state_dict()))
    rest = samples(iterator)
    following = samples(original) if kind != "global" else []
    resumed = make(20)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    if rest:
        resumed.set_epoch(state["epoch"])  # as loops do that call it always
    again = samples(resumed) if rest else []
    return rest, again, following, samples(resumed) if kind != "global" else []


@pytest.mark.parametrize("kind", ["global", "generator", "seedable", "stream"])
def test_a_saved_position_continues_with_the_next_batch(thread_ranks: Ranks, kind: str) -> None:
    for rest, again, following, following_again in thread_ranks.run(interrupted, kind, 2):
        assert rest
        assert rest == again
        assert following == following_again


@pytest.mark.parametrize("kind", ["generator", "seedable"])
def test_a_position_at_the_end_continues_with_the_next_epoch(kind: str) -> None:
    for rest, _, following, following_again in run_ranks(interrupted, 2, kind, 6):
        assert rest == []
        assert following
        assert following == following_again


def saved_at_the_last_batch(dispatches: bool) -> tuple[list[list[int]], list[list[int]]]:
    """The next epoch of a loader that shuffles without a generator, and the same by a new loader."""

    def make() -> PreparedDataLoader:
        return prepare(DataLoader(range(12), 2, shuffle=True), dispatch_batches=dispatches)

    original = make()
    states = [original.state_dict() for _ in original]
    before = torch.get_rng_state()
    following = samples(original)
    resumed = make()
    resumed.load_state_dict(states[-1])
    torch.set_rng_state(before)
    return following, samples(resumed)


def test_a_checkpoint_at_the_last_batch_loads_where_no_generator_makes_the_order(process_ranks: RankPool) -> None:
    for following, again in [
        *run_ranks(saved_at_the_last_batch, 1, False),
        *process_ranks.run(saved_at_the_last_batch, True),
    ]:
        assert following
        assert following == again


def iterated_inside_itself() -> tuple[list[Any], list[Any]]:
    def walk_twice(loader: Any) -> list[Any]:
        torch.manual_seed(0)
        return [(batch.tolist(), samples(loader)) for batch in loader]

    plain = DataLoader(range(6), 2, shuffle=True)
    return walk_twice(plain), walk_twice(prepare(plain))


def test_a_loader_iterated_inside_itself_shuffles_anew_as_a_plain_one() -> None:
    ((plain, ours),) = run_ranks(iterated_inside_itself, 1)
    assert ours == plain


def saved_where_one_rank_has_ended(iterable: bool) -> tuple[bool, list[Seen], int]:
    dataset: Any = Stream(9) if iterable else range(9)
    loader = prepare(DataLoader(dataset, 2), even_batches=False)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    iterator.close()
    loader.load_state_dict(state)
    return state["ended"], walk(loader), loader.iteration


@pytest.mark.parametrize("iterable", [False, True])
def test_an_epoch_goes_on_until_all_ranks_have_ended(iterable: bool) -> None:
    """Rank 0 has a third batch, rank 1 has not: it must take part in the window nevertheless."""
    results = run_ranks(saved_where_one_rank_has_ended, 2, iterable)
    assert [ended for ended, _, _ in results] == [False, True]
    assert [(only.samples, only.padding, only.closes) for _, (only,), _ in results] == [
        ([8], False, True),
        ([0, 1], True, True),
    ]
    assert [iteration for _, _, iteration in results] == [1, 1]


def after_break() -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    loader = prepare(DataLoader(range(12), 2))
    for _ in loader:
        break
    state = loader.state_dict()
    from_start = samples(loader)
    loader.load_state_dict(state)
    return from_start, samples(loader), samples(loader)


def test_a_loop_after_a_break_starts_over_unless_resumed(thread_ranks: Ranks) -> None:
    for from_start, resumed, next_epoch in thread_ranks.run(after_break):
        assert resumed == from_start[1:]
        assert next_epoch == from_start


def skip(batches: int, even: bool, iterable: bool) -> tuple[list[Seen], list[list[int]], int]:
    dataset: Any = SizedStream(9) if iterable else range(9)
    loader = skip_first_batches(prepare(DataLoader(dataset, 2), even_batches=even), batches)
    length = len(loader)
    return walk(loader, window=2), samples(loader), length


@pytest.mark.parametrize("iterable", [False, True])
def test_first_batches_are_skipped_in_the_first_epoch(iterable: bool) -> None:
    """Five batches of nine samples: rank 0 has three of them and rank 1 two."""
    for rank, (first, second, length) in enumerate(run_ranks(skip, 2, 1, True, iterable)):
        assert [seen.samples for seen in first] == second[1:]
        assert second == expected_shards(9, 2, 2, drop=False, even=True, split=False)[rank]
        assert length == len(first)
        assert first[-1].end
    for rank, (first, _, _) in enumerate(run_ranks(skip, 2, 2, False, iterable)):
        assert [(seen.samples, seen.padding, seen.closes) for seen in first] == [
            ([8], False, True) if rank == 0 else ([0, 1], True, True)
        ]
    for first, _, _ in run_ranks(skip, 2, 3, False, iterable):
        assert first == []


class Touched(Dataset[int]):
    def __init__(self) -> None:
        self.touched: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.touched.append(index)
        return index


def test_plain_loaders_are_skipped_without_reading() -> None:
    dataset = Touched()
    loader = skip_first_batches(DataLoader(dataset, 2), 3)
    assert isinstance(loader, DataLoader)
    assert samples(loader) == [[6, 7]]
    assert dataset.touched == [6, 7]
    assert len(samples(loader)) == 4


def test_torchdata_is_asked_for_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(gradsync.ConfigurationError, match="pip install torchdata"):
        run_ranks(lambda: prepare(DataLoader(range(4)), use_stateful_dataloader=True), 1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call
def test_torchdatas_loader_deals_the_same_batches() -> None:
    pytest.importorskip("torchdata")

    def batches(stateful: bool) -> list[list[int]]:
        return samples(prepare(DataLoader(range(10), 2), use_stateful_dataloader=stateful))

    assert run_ranks(batches, 2, True) == run_ranks(batches, 2, False)


# -- dispatch ---------------------------------------------------------------------------------------------------------


def several_kinds(items: list[int]) -> Any:
    return {
        "x": torch.tensor(items),
        "half": torch.tensor(items, dtype=torch.bfloat16).reshape(-1, 1),
        "flag": torch.tensor([item % 2 == 0 for item in items]),
        "text": [f"sample {item}" for item in items],
        "pair": Pair(torch.tensor(items, dtype=torch.float64), (1.5, None)),
        4: torch.tensor(7),
    }


def dispatched(n: int, even: bool, drop: bool, split: bool) -> tuple[list[Seen], bool, int]:
    """Ranks other than 0 have another dataset, which must not matter."""
    rank = choose_communicator().rank
    dataset = range(n) if rank == 0 else range(1000, 1000 + n)
    loader = prepare(
        DataLoader(dataset, 4, drop_last=drop, collate_fn=several_kinds),
        dispatch_batches=True,
        even_batches=even,
        split_batches=split,
    )
    seen, consistent, length = [], True, len(loader)
    for batch in loader:
        row = batch["x"].tolist()
        consistent = (
            consistent
            and batch["half"].dtype == torch.bfloat16
            and batch["half"].reshape(-1).tolist() == row
            and batch["flag"].tolist() == [item % 2 == 0 for item in row]
            and batch["text"] == [f"sample {item}" for item in row]
            and type(batch["pair"]) is Pair
            and batch["pair"].left.tolist() == row
            and batch["pair"].right == (1.5, None)
            and batch[4].item() == 7
        )
        seen.append(Seen(row, loader.end_of_dataloader, loader.remainder, loader.is_padding, loader.closes_window(2)))
    return seen, consistent, length


@pytest.mark.parametrize(
    ("n", "even", "drop", "split", "expected", "remainder"),
    [
        (16, True, False, False, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]], -1),
        (11, True, False, False, [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10, 0]]], 3),
        (11, False, False, False, [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10]]], -1),
        (11, True, True, False, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], -1),
        (7, True, False, True, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]], 3),
        (1, True, False, False, [[[0]], [[0]]], 1),
        (1, False, False, False, [[[0]], [[0]]], -1),
    ],
)
def test_rank_0_reads_for_all(n: int, even: bool, drop: bool, split: bool, expected: Any, remainder: int) -> None:
    results = run_ranks(dispatched, 2, n, even, drop, split)
    for rank, (seen, consistent, length) in enumerate(results):
        assert [each.samples for each in seen] == expected[rank]
        assert consistent
        assert [each.end for each in seen] == [False] * (len(seen) - 1) + [True]
        assert [each.remainder for each in seen] == [-1] * (len(seen) - 1) + [remainder]
        assert [each.padding for each in seen] == [rank == 1 and n == 1 and not even] * len(seen)
        assert length == len(seen)
    assert len({sum(each.closes for each in seen) for seen, _, _ in results}) == 1


def test_dispatch_crosses_processes(process_ranks: RankPool) -> None:
    results = process_ranks.run(dispatched, 16 * process_ranks.world_size, True, False, False)
    assert all(consistent for _, consistent, _ in results)
    row = [
        index for seen in zip(*(rank[0] for rank in results), strict=True) for each in seen for index in each.samples
    ]
    assert row == list(range(16 * process_ranks.world_size))


def two_columns(items: list[int]) -> Any:
    """As torch's own collate does it: samples that are pairs of texts become a pair of columns."""
    names, colours = ([f"{kind} {item}" for item in items] for kind in ("name", "colour"))
    return UserDict(
        text=[tuple(names), colours, ("three", "of", "them")], tags={"all": ["a", "b", None]}, x=torch.tensor(items)
    )


def dispatched_texts(even: bool) -> list[Any]:
    loader = prepare(DataLoader(range(5), 2, collate_fn=two_columns), dispatch_batches=True, even_batches=even)
    return list(loader)


@pytest.mark.parametrize("even", [True, False])
def test_columns_are_cut_and_constants_passed_on(even: bool) -> None:
    expected = [[[0, 1], [4]], [[2, 3], [0]] if even else [[2, 3]]]
    for rank, batches in enumerate(run_ranks(dispatched_texts, 2, even)):
        assert [batch.pop("x").tolist() for batch in batches] == expected[rank]
        for batch, items in zip(batches, expected[rank], strict=True):
            assert batch == {key: value for key, value in two_columns(items).items() if key != "x"}


class Opaque:
    pass


def opaque(items: list[int]) -> Any:
    return {"x": torch.tensor(items), "what": Opaque()}


def failing(items: list[int]) -> Any:
    raise ZeroDivisionError("no such batch")


def dispatch_badly(collate: Callable[[list[int]], Any]) -> None:
    list(prepare(DataLoader(range(8), 2, collate_fn=collate), dispatch_batches=True))


def test_what_cannot_be_dispatched_is_refused_on_every_rank(process_ranks: RankPool) -> None:
    started = time.monotonic()
    for answer in process_ranks.run(dispatch_badly, opaque, expect_errors=True):
        assert isinstance(answer, RankError)
        assert isinstance(answer.exception, gradsync.ConfigurationError)
        assert "batch['what'] is a tests.accelerator.test_data_loader.Opaque" in answer.message
    kinds = [answer.kind for answer in process_ranks.run(dispatch_badly, failing, expect_errors=True)]
    assert kinds == ["ZeroDivisionError", *["PeerFailedError"] * (process_ranks.world_size - 1)]
    assert time.monotonic() - started < 20


def dispatched_stream(skipped: int) -> tuple[list[list[int]], list[list[int]]]:
    loader = prepare(DataLoader(Stream(12), 2), dispatch_batches=True)
    return samples(loader), samples(skip_first_batches(loader, skipped))


def test_streams_are_dispatched_and_skipped() -> None:
    for rank, (everything, rest) in enumerate(run_ranks(dispatched_stream, 3, 1)):
        assert everything == [[2 * rank, 2 * rank + 1], [6 + 2 * rank, 7 + 2 * rank]]
        assert rest == everything[1:]
