"""``save_state`` and ``load_state``: everything prepared, as a checkpoint that is verified when it is loaded.

Models, optimizers, schedulers and the scaler are written once; positions in the data, random numbers and what an
unfinished window has accumulated are written by every rank. Objects are told apart by the order of their preparation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradsync.accelerator.data_loader import PreparedDataLoader
from gradsync.accelerator.model_windows import ModelWindows
from gradsync.accelerator.optimizer import PreparedOptimizer
from gradsync.accelerator.precision import Precision
from gradsync.accelerator.preparation import PreparedModels
from gradsync.accelerator.scheduler import PreparedScheduler
from gradsync.checkpoint import CheckpointFolder, rng_state, set_rng_state
from gradsync.communicator import Communicator
from gradsync.errors import ConfigurationError

__all__ = ["Prepared", "has_checkpoint", "load_prepared", "save_prepared"]


@dataclass(kw_only=True)
class Prepared:
    """Everything an accelerator has prepared, and what users have registered beside."""

    models: PreparedModels
    precision: Precision
    windows: ModelWindows
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedDataLoader] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)


def save_prepared(prepared: Prepared, communicator: Communicator, folder: str | Path, *, keep: int = 2) -> Path:
    """Write a checkpoint into ``folder``, beside older ones; returns where. Collective."""
    checkpoints = CheckpointFolder(folder, communicator, keep=keep)
    scaler = prepared.precision.scaler
    handles = prepared.models.handles
    shared = {
        "models": [model.state_dict() for model in prepared.models.plain],
        "engines": [handle.synchronizer.state_dict() for handle in handles],
        "optimizers": [optimizer.state_dict() for optimizer in prepared.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
        "others": [other.state_dict() for other in prepared.others],
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    own = {
        "rng": rng_state(),
        "loaders": [loader.state_dict() for loader in prepared.loaders],
        "windows": [handle.synchronizer.window_state() for handle in handles],
        "counts": prepared.windows.counts([handle.synchronizer for handle in handles]),
    }
    steps = checkpoints.steps()
    return checkpoints.save(steps[-1] + 1 if steps else 0, shared=shared, own=own, facts={})


def has_checkpoint(communicator: Communicator, folder: str | Path) -> bool:
    """Whether there is one, good or damaged. Rank 0 looks, so that all get the same answer. Collective."""
    found = torch.zeros(1, dtype=torch.int32, device=communicator.device)
    if communicator.rank == 0:
        found.fill_(int(bool(CheckpointFolder(folder, communicator).steps())))
    communicator.broadcast(found, 0).wait()
    return bool(found.item())


def load_prepared(prepared: Prepared, communicator: Communicator, folder: str | Path) -> list[str]:
    """Bring everything into the state of the newest good checkpoint; returns what there is to say. Collective."""
    loaded = CheckpointFolder(folder, communicator).load()
    if loaded is None:
        raise ConfigurationError(
            f"there is no checkpoint in {folder}. Write one with accelerator.save_state({folder!r})"
        )
    shared, notes = loaded.shared, list(loaded.notes)
    _require_count("models", shared["models"], prepared.models.plain)
    for name in ("optimizers", "schedulers", "others"):
        _require_count(name, shared[name], getattr(prepared, name))
    for model, state in zip(prepared.models.plain, shared["models"], strict=True):
        model.load_state_dict(state)
    for name in ("optimizers", "schedulers", "others"):
        for target, state in zip(getattr(prepared, name), shared[name], strict=True):
            target.load_state_dict(state)
    if prepared.precision.scaler is not None and shared["scaler"] is not None:
        prepared.precision.scaler.load_state_dict(shared["scaler"])
    if loaded.own is None or loaded.world_size != communicator.world_size:
        notes.append(
            f"the checkpoint was written by {loaded.world_size} ranks and is read by {communicator.world_size}: random "
            "numbers, positions in the data and unfinished windows are not restored"
        )
        return notes
    _load_own(prepared, loaded.own, shared["engines"])
    return notes


def _load_own(prepared: Prepared, own: dict[str, Any], engines: Sequence[Any]) -> None:
    _require_count("loaders", own["loaders"], prepared.loaders)
    for handle, engine, window in zip(prepared.models.handles, engines, own["windows"], strict=True):
        handle.synchronizer.load_state_dict(engine)
        handle.synchronizer.load_window_state(window)
    for loader, state in zip(prepared.loaders, own["loaders"], strict=True):
        loader.load_state_dict(state)
    synchronizers = [handle.synchronizer for handle in prepared.models.handles]
    prepared.windows.load_counts(synchronizers, own["counts"])
    set_rng_state(own["rng"])


def _require_count(name: str, saved: Sequence[Any], here: Sequence[Any]) -> None:
    if len(saved) != len(here):
        raise ConfigurationError(
            f"the checkpoint holds {len(saved)} {name} and this accelerator has prepared {len(here)}. Prepare the same "
            "objects, in the same order, before you load"
        )
