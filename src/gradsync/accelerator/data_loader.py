"""A prepared loader: distributes another loader's batches among the ranks, and knows which batch is its last.

Each rank gets the samples that it would get from Hugging Face Accelerate. The differences are:

- Iterable datasets are read by every rank unless ``dispatch_batches=True`` is passed (Accelerate dispatches them by
  default): all ranks must see the same stream. If the dataset has a ``generator``, the ranks start an epoch with rank
  0's.
- ``even_batches=False`` holds for iterable and dispatched loaders too.
- With ``batch_size=None`` every item of the sampler or stream counts as a batch, and goes to one rank whole.

Order. It is Accelerate's order, with as many random numbers, drawn at the same times. A sampler that shuffles without a
``generator`` gets one when its loader is prepared for several ranks, with a seed drawn then, and keeps it. At the start
of an epoch all ranks take the state of rank 0's generator. So a ``RandomSampler`` with its own generator has the same
order as the plain loader on rank 0, on any number of ranks. Samplers that shuffle by other means than their
``generator`` must shuffle alike on all ranks; the first batches are compared. All ranks must start an epoch together:
that involves a few small collectives.

End. The loader reads one batch ahead. Where ranks have different numbers of batches (``even_batches=False``), all of
them still have the same number of accumulation windows: see :meth:`PreparedDataLoader.closes_window`.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gradsync.accelerator.dispatching import dispatch
from gradsync.accelerator.epoch_order import EpochOrder, EpochPosition, require_same_order
from gradsync.accelerator.operations import send_to_device
from gradsync.accelerator.settings import DataLoaderConfiguration
from gradsync.accelerator.sharding import (
    CollateShare,
    Lookahead,
    PrepareWorker,
    RankBatchSampler,
    RoundShare,
    ShardedBatchSampler,
    ShardedDataset,
    ShardedIterable,
    ShardingPlan,
    SkipOnce,
    length_or_none,
    plan_for,
)
from gradsync.accelerator.windows import GradientState
from gradsync.base.errors import ConfigurationError, NoProcessGroupError
from gradsync.communicator import Communicator, InProcessWorld, choose_communicator

__all__ = ["PreparedDataLoader", "prepare_data_loader", "skip_first_batches"]

LOGGER = logging.getLogger("gradsync")

# Settings that the inner loader has from the one that was prepared.
CARRIED_OVER = "num_workers pin_memory timeout multiprocessing_context prefetch_factor persistent_workers in_order"


class PreparedDataLoader(DataLoader[Any]):
    """What :func:`~gradsync.accelerator.data_loader.prepare_data_loader` returns.

    It is a ``DataLoader`` for ``isinstance``, but uses none of torch's code for it: any attribute that it does not
    define itself is looked up in ``base_dataloader``, the loader that was prepared (``dataset``, ``batch_size``,
    ``collate_fn``...). Batches come from an inner loader, built like that one over this rank's share.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        communicator: Communicator | None = None,
        *,
        device: torch.device | None = None,
        gradient_state: GradientState | None = None,
        configuration: DataLoaderConfiguration | None = None,
    ) -> None:
        self.base_dataloader = loader
        # Made of a plain loader, to be iterated as it is or to be prepared.
        self.alone = communicator is None
        self.communicator = communicator = communicator or InProcessWorld(1).communicator(0)
        self.device = device
        self.gradient_state = gradient_state or GradientState()
        self.configuration = configuration = configuration or DataLoaderConfiguration()
        self.iteration = 0
        self._dispatches = bool(configuration.dispatch_batches) and communicator.world_size > 1
        self._plan = plan_for(loader, communicator, configuration)
        seed = torch.initial_seed() if configuration.data_seed is None else configuration.data_seed
        self._order = EpochOrder(
            loader,
            communicator,
            seed=seed if configuration.use_seedable_sampler else None,
            only_rank_0=self._dispatches,
        )
        self._inside, self._sharded = self._build_inside()
        self._skip = 0
        self._resume: EpochPosition | None = None
        self._position: EpochPosition | None = None
        self._current: Lookahead | None = None
        self._warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it: elsewhere it is distributed among the ranks found there, and continues at the same batch."""
        made = (self.base_dataloader, self.device, self.configuration, self.alone)
        return (_distributed_again, made, (self.state_dict(), self._order.seed, self._skip))

    def __setstate__(self, state: Any) -> None:
        position, self._order.seed, self._skip = state
        self.load_state_dict(position)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # not set yet
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def _build_inside(self) -> tuple[DataLoader[Any], ShardedBatchSampler | ShardedIterable]:
        loader, plan = self.base_dataloader, self._plan
        if self._dispatches:  # rank 0 reads everything
            plan = ShardingPlan(0, 1, plan.batch_size, plan.drop_last, split=False, even=False)
        options: dict[str, Any] = {name: getattr(loader, name) for name in CARRIED_OVER.split()}
        batched = loader.batch_sampler is not None
        options |= {"generator": self._order.worker_seeds, "collate_fn": CollateShare(loader.collate_fn, batched)}
        options |= {"worker_init_fn": PrepareWorker(loader.worker_init_fn), "batch_size": None}
        create = _stateful_loader() if self.configuration.use_stateful_dataloader else DataLoader
        if isinstance(loader.dataset, IterableDataset):
            stream = ShardedIterable(loader.dataset, plan)
            return create(stream, **options), stream
        check = partial(require_same_order, self.communicator) if plan.world_size > 1 else lambda first: None
        source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler = ShardedBatchSampler(source, plan, check)
        return create(ShardedDataset(loader.dataset, batched), sampler=sampler, **options), sampler

    # -- what it knows ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """This rank's batches; of a loader that skips its first batches, those left in its first epoch."""
        if not self._dispatches:
            return max(0, self._sharded.length() - self._skip)
        batches, group = len(self.base_dataloader), self._plan.group
        return max(0, (batches // group if self._plan.drop_last else -(-batches // group)) - self._skip)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is this rank's last. (On equal counts, every rank's.)"""
        return self._current is not None and self._current.at_end

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The loader's own; where several ranks go through it, with this rank's share of its batches."""
        own = self.base_dataloader.batch_sampler
        if own is None or self.communicator.world_size == 1 or self.distributes_streams:
            return own
        return RankBatchSampler(own, self._plan, self.set_even_batches)

    @property
    def distributes_streams(self) -> bool:
        """Whether elements are distributed as they come, and not by their indices."""
        return self._dispatches or isinstance(self.base_dataloader.dataset, IterableDataset)

    @property
    def uneven(self) -> bool:
        """Whether ranks may have different numbers of batches, or batches of different sizes."""
        return self._plan.world_size > 1 and not self._plan.even

    @contextlib.contextmanager
    def evening(self, even: bool) -> Iterator[None]:
        """Another setting of ``even_batches`` for a while. Iterations under way are not affected."""
        outer = self.configuration, self._plan, self._inside, self._sharded
        self.set_even_batches(even)
        try:
            yield
        finally:
            self.configuration, self._plan, self._inside, self._sharded = outer

    def set_even_batches(self, even: bool) -> None:
        """Change ``even_batches`` from the next iteration on."""
        self.configuration = replace(self.configuration, even_batches=even)
        self._plan = plan_for(self.base_dataloader, self.communicator, self.configuration)
        self._inside, self._sharded = self._build_inside()

    @property
    def is_padding(self) -> bool:
        """Whether the current batch only keeps this rank in step: it has none of its own where others have one."""
        return self._current is not None and self._current.share.kind == "absent"

    @property
    def remainder(self) -> int:
        """Real samples in the current global batch if it was completed from the beginning, else -1.

        Only an epoch's last global batch is ever completed; of an iterable dataset with workers, each worker's last.
        """
        return self._current.share.remainder if self._current is not None else -1

    def closes_window(self, size: int) -> bool:
        """Whether a window of ``size`` micro-batches ends with the current batch.

        It does after every ``size`` batches and at the end. Where some rank has fewer batches than another, the last
        window begins on all ranks at the same batch, the last multiple of ``size`` that every rank goes beyond, and
        each rank puts all it has left into it. So all ranks have equally many windows.

        That needs one fact: does every rank have a batch after this one? The next one shows it (:class:`RoundShare`).
        """
        return self._current is not None and self._current.closes_window(size)

    @property
    def total_batch_size(self) -> int | None:
        """Samples in a global batch; None if the loader's batches have no common size."""
        size = self._plan.batch_size
        return size if size is None or self._plan.split else size * self._plan.world_size

    @property
    def total_dataset_length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    # -- epochs ----------------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch on batch sampler, sampler and dataset, where they have one. A position loaded for another is
        lost."""
        if self._resume is not None and self._resume.epoch != epoch:
            self._resume = None
        self.iteration = epoch
        for each in [*self._order.samplers, self.dataset]:
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Plain values that say which batch comes next, in which order. What workers draw is not part of it."""
        return asdict(self._resume or self._position or EpochPosition(self.iteration, generator=self._order.states()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where the loader stood that gave ``state``. On every rank, with that rank's."""
        self._resume = EpochPosition(**state)
        self.iteration = self._resume.epoch
        if self._resume.seed is None:  # between two epochs: of the next nothing has been drawn
            self._order.set_states(self._resume.generator)

    def skipping(self, batches: int) -> "PreparedDataLoader":
        """The loader without its first batches; see :func:`~gradsync.accelerator.data_loader.skip_first_batches`."""
        loader = PreparedDataLoader(
            self.base_dataloader,
            None if self.alone else self.communicator,
            device=self.device,
            gradient_state=self.gradient_state,
            configuration=self.configuration,
        )
        loader.iteration, loader._order.seed, loader._skip = self.iteration, self._order.seed, batches
        if self._resume is not None:
            loader._resume = replace(self._resume, batches=batches, ended=False)
        return loader

    # -- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.gradient_state.enter_dataloader(self)
        try:
            position = self._begin()
            with self._order.applied(position):
                yield from self._hand_out(Lookahead(self._source(position.batches), position.batches), position)
        finally:
            self._current = None
            if isinstance(self._sharded, ShardedBatchSampler):
                self._sharded.forget()
            self.gradient_state.leave_dataloader(self)

    def _hand_out(self, ahead: Lookahead, position: EpochPosition) -> Iterator[Any]:
        self._position = position
        for batch in ahead:
            # Moved before the next one is read: meanwhile it may travel.
            if self.device is not None:
                batch = send_to_device(batch, self.device, self.configuration.non_blocking)
            ahead.look()
            self._current = ahead
            self._warn_if_completed(ahead.share)
            self._position = replace(position, batches=position.batches + ahead.position, ended=ahead.at_end)
            if ahead.at_end:  # where the next epoch will start
                self._position = replace(self._position, generator=self._order.states())
            yield batch
        self._position = None
        self._skip = 0
        self.iteration = position.epoch + 1

    def _warn_if_completed(self, share: RoundShare) -> None:
        """Log, once, that Accelerate, which dispatches streams by default, would complete this batch by less."""
        if self._warned or share.remainder < 0 or self.communicator.rank > 0:
            return
        if self.configuration.dispatch_batches is None and isinstance(self.base_dataloader.dataset, IterableDataset):
            self._warned = True
            LOGGER.warning(
                "the last batches of an iterable dataset have %d samples of %d ranks, and are made full with its first "
                "ones. Accelerate dispatches such a dataset by default, and adds no more than all ranks need to have "
                "equally many. DataLoaderConfiguration(dispatch_batches=True) does as Accelerate (said once)",
                share.remainder,
                self.communicator.world_size,
            )

    def _source(self, start: int) -> Iterator[tuple[RoundShare, Any]]:
        """All rounds of this epoch. The first ``start`` that this rank has a part in may come without their batch."""
        if not self._dispatches:
            return self._read(start)
        plan, skipped = self._plan, start * self._plan.group
        batches = (batch for _, batch in islice(self._read(skipped), skipped, None))
        rounds = dispatch(batches, self.communicator, group=self._plan.group, drop_last=plan.drop_last, even=plan.even)
        return chain(repeat((RoundShare("common"), None), start), rounds)

    def _read(self, skip: int) -> Iterator[tuple[RoundShare, Any]]:
        if isinstance(self._sharded, ShardedBatchSampler):
            rounds = self._sharded.rounds()
            # Of these the indices are enough.
            yield from ((share, None) for share, _ in islice(rounds, skip))
            self._sharded.rest = rounds
        yield from self._inside

    def _begin(self) -> EpochPosition:
        """Agree with the other ranks on where the epoch starts and in which order."""
        resumed, self._resume = self._resume, None
        wanted = resumed or EpochPosition(self.iteration, self._skip)
        self.set_epoch(wanted.epoch)
        length = length_or_none(self._sharded.source)
        position = self._order.agree(
            wanted, resumes=resumed is not None, length=length, batch_size=self._plan.batch_size
        )
        if not position.ended:
            return position
        # On all ranks: what comes next is the next epoch.
        self._skip, self.iteration = 0, position.epoch + 1
        return self._begin()


def _distributed_again(
    loader: DataLoader[Any], device: torch.device | None, configuration: DataLoaderConfiguration, alone: bool
) -> PreparedDataLoader:
    communicator = None
    if not alone:
        try:
            communicator = choose_communicator()
        except NoProcessGroupError:
            communicator = InProcessWorld(1).communicator(0)
    return PreparedDataLoader(loader, communicator, device=device, configuration=configuration)


def _stateful_loader() -> Any:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            "use_stateful_dataloader=True needs torchdata's StatefulDataLoader, which is not installed here. Run "
            "`pip install torchdata`, or leave it: a prepared loader has state_dict() and load_state_dict() without it"
        ) from error
    return StatefulDataLoader


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    communicator: Communicator,
    device: torch.device | None,
    gradient_state: GradientState,
    configuration: DataLoaderConfiguration,
    put_on_device: bool = True,
) -> PreparedDataLoader:
    """``loader`` as this rank is to iterate it. A loader that is prepared already is returned as it is."""
    if isinstance(loader, PreparedDataLoader):
        if not loader.alone and loader.communicator.world_size == communicator.world_size:
            return loader
        if not loader.alone:
            raise ConfigurationError(
                f"this loader was prepared for {loader.communicator.world_size} ranks by another accelerator, and "
                f"cannot be prepared for {communicator.world_size} by this one. Prepare the loader it was made from"
            )
        loader = _without_first(loader)
    return PreparedDataLoader(
        loader,
        communicator,
        device=device if put_on_device else None,
        gradient_state=gradient_state,
        configuration=configuration,
    )


def skip_first_batches(loader: DataLoader[Any], num_batches: int = 0) -> PreparedDataLoader:
    """The loader without its first batches in its first epoch; of a prepared loader, without the first of this rank.

    Skipped batches of a map-style dataset are not read. The order is that of ``loader``, also if it was resumed by
    ``load_state_dict``: then ``num_batches`` takes the place of the loaded position.
    """
    if num_batches < 0:
        raise ConfigurationError(f"num_batches must be at least 0, got {num_batches}")
    if not isinstance(loader, PreparedDataLoader):
        loader = PreparedDataLoader(loader)
    return loader.skipping(num_batches)


def _without_first(prepared: PreparedDataLoader) -> DataLoader[Any]:
    """The loader that ``prepared`` was made from; its first epoch begins behind the batches that are to be skipped."""
    loader, batches = prepared.base_dataloader, prepared._skip
    if not batches:
        return loader
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "skip_first_batches of a stream cannot be prepared: only the outcome knows whose batches they were. "
            "Prepare the loader first, and call skip_first_batches on what prepare() returned"
        )
    names = f"{CARRIED_OVER} collate_fn worker_init_fn generator"
    options: dict[str, Any] = {name: getattr(loader, name) for name in names.split()}
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, None, sampler=SkipOnce(loader.sampler, batches), **options)
    return DataLoader(loader.dataset, batch_sampler=SkipOnce(loader.batch_sampler, batches), **options)
