"""Windows of samples by number: a number always gives the same samples, at any time, place and number of ranks.

This is what an elastic accelerator makes of a prepared loader. It has no position that could be lost with a rank:
window 7 is window 7, and every rank that takes part takes a share of it. ::

    loader = accelerator.prepare(DataLoader(dataset, batch_size=8, shuffle=True))
    for attempt in accelerator.elastic.attempts(1000):
        with attempt as step:
            for inputs, targets in accelerator.window(loader.window(step), model):
                …

A window may reach into the next epoch, so that no sample is ever left out.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from gradsync.accelerator.operations import send_to_device
from gradsync.accelerator.world import ProcessControl
from gradsync.base.errors import ConfigurationError, MisuseError

__all__ = ["NumberedWindows", "permutation", "share_of"]

LOGGER = logging.getLogger("gradsync")


class NumberedWindows:
    """The windows of ``loader``, each with ``size`` samples over all current ranks. Batches of it are micro-batches.

    ``seed`` determines the order in a loader that shuffles: it differs from epoch to epoch and is the same on all
    ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], ranks: ProcessControl, *, size: int, seed: int = 0, put_on_device: bool = True
    ) -> None:
        _refuse_what_has_no_numbers(loader)
        self.loader = loader
        self.size = size
        self._ranks = ranks
        self._seed = seed
        self._put_on_device = put_on_device
        self._is_shuffled = isinstance(loader.sampler, RandomSampler)
        self._orders: dict[int, Tensor] = {}
        if loader.num_workers:
            LOGGER.warning(
                "a window that is asked for by number is read when it is asked for: num_workers=%d has no effect",
                loader.num_workers,
            )

    def __iter__(self) -> NoReturn:
        raise MisuseError(
            "where ranks come and go, samples are taken by the number of their window: "
            "for batch in accelerator.window(loader.window(step), model)"
        )

    @property
    def windows_per_epoch(self) -> float:
        """How many windows an epoch has, which is not an integer in general."""
        return self._samples / self.size

    @property
    def _samples(self) -> int:
        return len(self.loader.dataset)  # type: ignore[arg-type]

    def window(self, number: int) -> Iterator[Any]:
        """This rank's batches of window ``number``, counted from 0, as they are read. None where there are too many
        ranks."""
        share = share_of(self.size, self._ranks.process_index, self._ranks.num_processes)
        places = range(number * self.size + share.start, number * self.size + share.stop)
        batch_size = int(self.loader.batch_size or 1)
        for begin in range(places.start, places.stop, batch_size):
            yield self._batch(range(begin, min(begin + batch_size, places.stop)))

    def _batch(self, places: range) -> Any:
        indices = [self._index(place) for place in places]
        dataset: Any = self.loader.dataset
        read: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
        batch = self.loader.collate_fn(read(indices) if read else [dataset[index] for index in indices])
        return send_to_device(batch, self._ranks.device) if self._put_on_device else batch

    def _index(self, place: int) -> int:
        """Which sample is at a place in the stream of all epochs."""
        epoch, place = divmod(place, self._samples)
        if not self._is_shuffled:
            return place
        if epoch not in self._orders:
            # A window touches two at most, unless epochs are shorter than windows.
            self._orders = {each: order for each, order in self._orders.items() if each == epoch - 1}
            self._orders[epoch] = permutation(self._samples, self._seed, epoch)
        return int(self._orders[epoch][place])


def permutation(count: int, seed: int, epoch: int) -> Tensor:
    """The order of ``count`` samples in an epoch."""
    # Hashed: neighbouring seeds and epochs must not share permutations, as seed + epoch would.
    digest = hashlib.sha256(f"{seed},{epoch}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randperm(count, generator=generator, device="cpu")


def share_of(count: int, rank: int, world_size: int) -> range:
    """A rank's contiguous part of ``count`` things; parts differ by one at most."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def _refuse_what_has_no_numbers(loader: DataLoader[Any]) -> None:
    remedy = "Take the samples of a window by its number yourself: accelerator.elastic.attempts() gives it"
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            f"{type(loader.dataset).__name__} has no numbers for its samples, so ranks that come and go cannot share "
            f"them out again. {remedy}"
        )
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        what = "a batch_sampler" if loader.batch_size is None else f"a {type(loader.sampler).__name__}"
        raise ConfigurationError(
            f"{what} deals samples to the ranks it was made for, and elastic ranks come and go. Pass batch_size= and "
            f"shuffle= to the loader instead. {remedy}"
        )
    if isinstance(loader.sampler, RandomSampler) and (loader.sampler.replacement or loader.sampler._num_samples):
        raise ConfigurationError(
            f"a sampler with replacement, or with num_samples, has no epochs that ranks could share out. {remedy}"
        )
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise ConfigurationError("the dataset of the loader is empty, so there is nothing to share out")
