"""Data loaders for all ranks: prepares a loader, and skips its first batches."""

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gradsync.accelerator.gradient_state import GradientState
from gradsync.accelerator.plugins import DataLoaderConfiguration
from gradsync.accelerator.prepared_loader import CARRIED_OVER, PreparedDataLoader
from gradsync.accelerator.sharding import SkipOnce
from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, InProcessWorld

__all__ = ["PreparedDataLoader", "prepare_data_loader", "skip_first_batches"]


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
        communicator=communicator,
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
        loader = PreparedDataLoader(
            loader,
            communicator=InProcessWorld(1).communicator(0),
            device=None,
            gradient_state=GradientState(),
            configuration=DataLoaderConfiguration(),
        )
        loader.alone = True
    return loader.skipping(num_batches)


def _without_first(prepared: PreparedDataLoader) -> DataLoader[Any]:
    """The loader that ``prepared`` was made from; its first epoch begins behind the batches that are to be skipped."""
    loader, batches = prepared.base_dataloader, prepared.skipped
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
