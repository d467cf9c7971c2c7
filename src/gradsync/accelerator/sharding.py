"""Decides which rank gets which samples of a loader, and in which order.

Samples are distributed in *rounds*. A round is one global batch: with ``split_batches`` one batch of the loader,
otherwise the next ``world_size`` of them. Every rank sees every round and takes its part of it, so it also knows the
other ranks' parts. That knowledge accompanies the batch as a :class:`RoundShare`, and the ranks need not ask each other
how many batches they have.

Batch samplers are split by their indices in the main process, iterable datasets by their elements, in the workers if
there are any.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple, TypeVar

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from gradsync.accelerator.settings import DataLoaderConfiguration
from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator

__all__ = [
    "CollateShare",
    "Lookahead",
    "PrepareWorker",
    "RankBatchSampler",
    "RoundShare",
    "ShardedBatchSampler",
    "ShardedDataset",
    "ShardedIterable",
    "ShardingPlan",
    "SkipOnce",
    "length_or_none",
    "plan_for",
]

T = TypeVar("T")


class RoundShare(NamedTuple):
    """This rank's part of a round, and the others'.

    ``common``: every rank has a part. ``partial``: this rank has one, and at least one other has none. ``absent``: this
    rank has none; the batch repeats the beginning, in case there is nothing else to use.

    ``remainder`` is the number of real samples in the round if it was completed with samples from the beginning, or -1.
    """

    kind: Literal["common", "partial", "absent"]
    remainder: int = -1


@dataclass(frozen=True)
class ShardingPlan:
    """The sharding rule of one loader. ``batch_size`` is None if batches have no fixed size."""

    rank: int
    world_size: int
    batch_size: int | None
    drop_last: bool
    split: bool
    even: bool

    @property
    def group(self) -> int:
        """Batches of the loader in a round."""
        return 1 if self.split else self.world_size

    @property
    def part(self) -> int:
        """Samples per rank in a full round; batches, where their size is not known."""
        if self.batch_size is None:
            return 1
        return self.batch_size // self.world_size if self.split else self.batch_size

    def take(self, units: list[T], first: list[T], part: int) -> tuple[RoundShare, list[T]] | None:
        """This rank's part of the round ``units``; None if the round is dropped. ``first`` is the first round."""
        whole = part * self.world_size
        mine = slice(part * self.rank, part * (self.rank + 1))
        if len(units) >= whole:
            return RoundShare("common"), units[mine]
        if self.drop_last:
            return None
        if self.even and self.world_size > 1:
            completed = units + list(islice(cycle(first), whole - len(units)))
            return RoundShare("common", len(units)), completed[mine]
        if len(units) > part * (self.world_size - 1):
            return RoundShare("common"), units[mine]
        return (RoundShare("partial"), units[mine]) if units[mine] else (RoundShare("absent"), first[:part])

    def count(self, full_rounds: int, rest: int, part: int) -> int:
        """This rank's batches in ``full_rounds`` and one of ``rest`` more units. Nobody is left with none."""
        if self.drop_last or not rest:
            return full_rounds
        if self.even:
            return full_rounds + 1
        return max(1, full_rounds + (rest > part * self.rank))


def plan_for(
    loader: DataLoader[Any], communicator: Communicator, configuration: DataLoaderConfiguration
) -> ShardingPlan:
    """The rule for ``loader`` on this rank."""
    stream = isinstance(loader.dataset, IterableDataset)
    # A batch sampler may also be passed as the sampler of a loader with batch_size=None.
    batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    batch_size = loader.batch_size if stream else getattr(batches, "batch_size", None)
    batch_size = batch_size if isinstance(batch_size, int) and batch_size > 0 else None
    drop_last = loader.drop_last if stream else bool(getattr(batches, "drop_last", False))
    world_size, split = communicator.world_size, configuration.split_batches and communicator.world_size > 1
    if split and (batch_size is None or batch_size % world_size):
        raise ConfigurationError(
            f"split_batches=True divides every batch among {world_size} ranks, but the loader's batch size is "
            f"{batch_size}. Use a multiple of {world_size}, or pass split_batches=False"
        )
    return ShardingPlan(communicator.rank, world_size, batch_size, drop_last, split, configuration.even_batches)


# -- batch samplers ----------------------------------------------------------------------------------------------------


class ShardedBatchSampler(Sampler[Any]):
    """This rank's batches of another batch sampler, each with its share: the keys for :class:`ShardedDataset`.

    ``source`` may also yield single indices (a loader with ``batch_size=None``); each then counts as a batch. Batches
    without a common size go to one rank whole. ``check`` is called with the first round.

    An iteration yields what is left in ``rest``, :meth:`rounds` of which some may have been taken.
    """

    def __init__(self, source: Iterable[Any], plan: ShardingPlan, check: Callable[[list[Any]], None]) -> None:
        self.source = source
        self.plan = plan
        self.check = check
        self.rest: Iterator[tuple[RoundShare, Any]] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.rest

    def forget(self) -> None:
        """Drop what is left: an iterator keeps its source's order alive, and cannot be pickled."""
        self.rest = iter(())

    def length(self) -> int:
        """This rank's batches."""
        batches, plan = len(self.source), self.plan  # type: ignore[arg-type]
        if not plan.split:
            return plan.count(*divmod(batches, plan.world_size), 1)
        # Only torch's own batch sampler is known to make its last batch of what is left.
        samples = length_or_none(self.source.sampler) if type(self.source) is BatchSampler else None
        tail = 0 if samples is None else samples % (plan.batch_size or 1)
        return plan.count(batches - 1, tail, plan.part) if tail and not plan.drop_last else batches

    def rounds(self) -> Iterator[tuple[RoundShare, Any]]:
        """The indices of this rank's part of each round."""
        stream, group = iter(self.source), self.plan.group
        first = batches = list(islice(stream, group))
        self.check(first)
        while batches:
            if (outcome := self._take(batches, first)) is not None:
                yield outcome
            batches = list(islice(stream, group))

    def _take(self, batches: list[Any], first: list[Any]) -> tuple[RoundShare, Any] | None:
        plan = self.plan
        if plan.world_size > 1 and (plan.split or (self._regular(batches) and self._regular(first))):
            # The samples of a round in a row: a batch each, and what is missing is missing at the end.
            samples = _flat(batches)
            part = max(plan.part, -(-len(samples) // plan.world_size)) if plan.split else plan.part
            return plan.take(samples, _flat(first), part)
        outcome = plan.take(batches, first, 1)
        if outcome is None:
            return None
        share, own = outcome
        real = sum(len(batch) if isinstance(batch, Sized) else 1 for batch in batches)
        return (share if share.remainder < 0 else RoundShare(share.kind, real)), own[0]

    def _regular(self, batches: list[Any]) -> bool:
        size = self.plan.batch_size
        return size is not None and all(len(batch) == size for batch in batches[:-1]) and len(batches[-1]) <= size


class RankBatchSampler(BatchSampler):
    """This rank's batches of another batch sampler, by their indices, with the names of Accelerate's class for it.

    Other attributes are looked up in ``batch_sampler``. Setting ``even_batches`` changes the loader that ``change``
    belongs to, from its next epoch on. All ranks must do that.
    """

    def __init__(self, batch_sampler: Any, plan: ShardingPlan, change: Callable[[bool], None]) -> None:
        self.batch_sampler = batch_sampler
        self._sharded = ShardedBatchSampler(batch_sampler, plan, lambda first: None)
        self._change = change

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return (indices for share, indices in self._sharded.rounds() if share.kind != "absent")

    def __len__(self) -> int:
        return self._sharded.length()

    @property
    def even_batches(self) -> bool:
        return self._sharded.plan.even

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._change(even)
        self._sharded.plan = replace(self._sharded.plan, even=even)


class SkipOnce(Sampler[Any]):
    """A sampler or batch sampler that skips its first elements, the first time it is iterated."""

    def __init__(self, source: Any, count: int) -> None:
        self.source = source
        self.count = count

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not set yet
            raise AttributeError(name)
        return getattr(self.source, name)

    def __iter__(self) -> Iterator[Any]:
        skipped, self.count = self.count, 0
        return islice(iter(self.source), skipped, None)

    def __len__(self) -> int:
        return max(0, len(self.source) - self.count)


def _flat(batches: Sequence[Iterable[Any]]) -> list[Any]:
    return [index for batch in batches for index in batch]


@dataclass(frozen=True)
class ShardedDataset(Dataset[Any]):
    """The elements of a map-style dataset for a batch of :class:`ShardedBatchSampler`; passes the share through."""

    source: Any
    batched: bool

    def __getitem__(self, key: tuple[RoundShare, Any]) -> tuple[RoundShare, list[Any]]:
        share, index = key
        if not self.batched:
            return share, [self.source[index]]
        # As torch does it, for datasets that are faster by the batch.
        several = getattr(self.source, "__getitems__", None)
        return share, several(index) if callable(several) else [self.source[each] for each in index]


# -- iterable datasets -------------------------------------------------------------------------------------------------


class ShardedIterable(IterableDataset[Any]):
    """This rank's part of each round of a stream, one list of elements per round.

    Every rank reads the whole stream, and keeps one round of it and the first one. A worker splits the stream that it
    sees: if the dataset is split among workers by ``get_worker_info``, every element appears once, as without ranks.
    """

    def __init__(self, source: IterableDataset[Any], plan: ShardingPlan) -> None:
        self.source = source
        self.plan = plan

    def __iter__(self) -> Iterator[tuple[RoundShare, list[Any]]]:
        plan, stream = self.plan, iter(self.source)
        first: list[Any] = []
        while elements := list(islice(stream, plan.part * plan.world_size)):
            first = first or elements
            if (outcome := plan.take(elements, first, plan.part)) is not None:
                yield outcome

    def length(self) -> int:
        """This rank's batches. As with torch's loader a guess, where workers have a stream each."""
        plan = self.plan
        return plan.count(*divmod(len(self.source), plan.part * plan.world_size), plan.part)  # type: ignore[arg-type]


@dataclass(frozen=True)
class CollateShare:
    """The user's ``collate_fn`` for the elements of a share; passes the share through."""

    collate: Callable[[Any], Any]
    batched: bool

    def __call__(self, item: tuple[RoundShare, list[Any]]) -> tuple[RoundShare, Any]:
        share, elements = item
        return share, self.collate(elements if self.batched else elements[0])


@dataclass(frozen=True)
class PrepareWorker:
    """The user's ``worker_init_fn``, which sees the user's dataset in ``get_worker_info()`` and not ours."""

    initialize: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        information = get_worker_info()
        if information is not None and isinstance(information.dataset, ShardedDataset | ShardedIterable):
            # It is frozen. What the worker reads from is kept elsewhere, so nothing else changes.
            object.__setattr__(information, "dataset", information.dataset.source)
        if self.initialize is not None:
            self.initialize(worker)


# -- reading ahead -----------------------------------------------------------------------------------------------------


class Lookahead:
    """An iterator over this rank's batches after the first ``start``, which knows what follows the current one.

    Ranks have different numbers of batches only where rounds have no part for the last ranks. The last rank has as many
    batches as there are ``common`` rounds, and no rank has fewer. So another ``common`` round means that every rank has
    a batch after this one. Usually that is the next batch; otherwise :meth:`look` reads ahead for it, past at most one
    ``partial`` round per worker.
    """

    def __init__(self, rounds: Iterator[tuple[RoundShare, Any]], start: int) -> None:
        self.position = 0
        self.share = RoundShare("common")
        self._rounds, self._start = rounds, start
        self._waiting: deque[tuple[RoundShare, Any]] = deque()
        self._spare: tuple[RoundShare, Any] | None = None
        self._seen = self._own = self._common = 0
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._waiting and not self._ended:
            self._read()
        if not self._waiting and not self.position and self._spare is not None:
            self._waiting.append(self._spare)
        self._spare = None
        if not self._waiting:
            raise StopIteration
        self.position += 1
        self.share, batch = self._waiting.popleft()
        return batch

    def look(self) -> None:
        """Read until the end is known, or that every rank has another batch."""
        while not self._ended and self._common <= self._start + self.position:
            self._read()

    @property
    def at_end(self) -> bool:
        return self._ended and not self._waiting

    def closes_window(self, size: int) -> bool:
        return self.at_end or (self.position % size == 0 and self._start + self.position < self._common)

    def _read(self) -> None:
        item = next(self._rounds, None)
        if item is None:
            self._ended = True
            return
        kind = item[0].kind
        self._seen += 1
        self._common += kind == "common"
        self._own += kind != "absent"
        if kind == "absent":
            if self._seen > self._start and self._spare is None and not self.position:
                self._spare = item
        elif self._own > self._start:
            self._waiting.append(item)


def length_or_none(sized: Any) -> int | None:
    """The length, or None for what has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
