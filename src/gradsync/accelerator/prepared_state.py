"""All prepared state of an accelerator: written to verified checkpoints, loaded, or sent to ranks that lag behind.

Models, optimizers, schedulers and the scaler are written once; every rank writes its positions in the data, its random
numbers and what an unfinished window has accumulated. Objects are identified by the order in which they were prepared.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradsync.accelerator.data_loader import PreparedDataLoader
from gradsync.accelerator.models import Precision, PreparedModels
from gradsync.accelerator.optimizer import PreparedOptimizer, PreparedScheduler
from gradsync.accelerator.windows import ModelWindows
from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint import CheckpointFolder, Loaded, rng_state, set_rng_state
from gradsync.checkpoint.tree import decode, encode
from gradsync.communicator import Communicator
from gradsync.core.engine.blocks import load_window, save_window
from gradsync.parallel.replica import broadcast_tensors, in_batches

__all__ = ["Prepared", "has_checkpoint", "heal", "load_prepared", "restore_prepared", "save_prepared"]

HEALTHY = 0


@dataclass(kw_only=True)
class Prepared:
    """Everything an accelerator has prepared, and the objects that users have registered."""

    models: PreparedModels
    precision: Precision
    windows: ModelWindows
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[PreparedDataLoader] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Let go of everything."""
        self.models.clear()
        self.windows.forget()
        for each in (self.optimizers, self.schedulers, self.loaders, self.others):
            each.clear()

    @property
    def replicated(self) -> dict[str, Sequence[Any]]:
        """What has the same state on all ranks, in the order in which it is loaded."""
        names = ("optimizers", "schedulers", "others")
        return {"models": self.models.plain} | {name: getattr(self, name) for name in names}


def save_prepared(
    prepared: Prepared,
    checkpoints: CheckpointFolder,
    *,
    step: int | None = None,
    facts: dict[str, Any] | None = None,
    weights: Sequence[Any] | None = None,
) -> Path:
    """Write a checkpoint, of the step after the newest one unless ``step`` says another; returns where. Collective.

    ``weights`` stand for the states of the models.
    """
    engines = [each.synchronizer for each in prepared.models.attachments]
    shared = {
        **shared_state(prepared),
        "engines": [engine.state_dict() for engine in engines],
        **({} if weights is None else {"models": list(weights)}),
    }
    own = {
        "rng": rng_state(),
        "loaders": [loader.state_dict() for loader in prepared.loaders],
        "windows": [save_window(each.engine) for each in engines],
        "counts": prepared.windows.counts(engines),
    }
    if step is None:
        step = max(checkpoints.steps(), default=-1) + 1
    return checkpoints.save(step, shared=shared, own=own, facts=facts or {})


def shared_state(prepared: Prepared) -> dict[str, Any]:
    """What is the same on all ranks, but for the engines, which are theirs together. Collective with sharding."""
    scaler = prepared.precision.scaler
    return {
        **{name: [_shared_state(each) for each in objects] for name, objects in prepared.replicated.items()},
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def _shared_state(each: Any) -> Any:
    return each.shared_state() if isinstance(each, PreparedOptimizer) else each.state_dict()


def has_checkpoint(communicator: Communicator, folder: str | Path) -> bool:
    """Whether there is one, good or damaged. Rank 0 looks, so that all get the same answer. Collective."""
    found = torch.zeros(1, dtype=torch.int32, device=communicator.device)
    if communicator.rank == 0:
        found.fill_(int(bool(CheckpointFolder(folder, communicator).steps())))
    communicator.broadcast(found, 0).wait()
    return bool(found.item())


def load_prepared(
    prepared: Prepared, communicator: Communicator, folder: str | Path, *, models: Sequence[Any] | None = None
) -> list[str]:
    """Load the newest good checkpoint into all prepared objects; returns the messages to show. Collective.

    ``models`` stand for those that were prepared.
    """
    loaded = CheckpointFolder(folder, communicator).load()
    if loaded is None:
        raise ConfigurationError(
            f"there is no checkpoint in {folder}. Write one with accelerator.save_state({folder!r})"
        )
    if restore_prepared(prepared, loaded, communicator.world_size, models=models):
        return loaded.notes
    return [
        *loaded.notes,
        f"the checkpoint was written by {loaded.world_size} ranks and is read by {communicator.world_size}: random "
        "numbers, positions in the data and unfinished windows are not restored",
    ]


def restore_prepared(
    prepared: Prepared, loaded: Loaded, world_size: int, *, models: Sequence[Any] | None = None
) -> bool:
    """Bring everything into the state of ``loaded``; whether that includes what is a rank's own.

    It does not if another number of ranks wrote it.
    """
    shared = loaded.shared
    if "models" not in shared:
        raise ConfigurationError(
            f"{loaded.path} was written by an earlier gradsync, in another form. Go on with that one, or begin anew"
        )
    load_shared_state(prepared, shared, f"the checkpoint {loaded.path.name}", models=models)
    if loaded.own is None or loaded.world_size != world_size:
        return False
    _load_own(prepared, loaded.own, shared["engines"])
    return True


def load_shared_state(
    prepared: Prepared, shared: dict[str, Any], source: str, *, models: Sequence[Any] | None = None
) -> None:
    """Bring everything into the state that :func:`shared_state` told, and errors say that ``source`` holds."""
    replicated = prepared.replicated | ({} if models is None else {"models": models})
    for name, objects in replicated.items():
        _require_count(name, shared[name], objects)
    for name, objects in replicated.items():
        for target, state in zip(objects, shared[name], strict=True):
            try:
                target.load_state_dict(state)
            except RuntimeError as error:
                reason = str(error).splitlines()[-1].strip()
                raise ConfigurationError(f"{source} holds other {name}: {reason}") from error
    if prepared.precision.scaler is not None and shared["scaler"] is not None:
        prepared.precision.scaler.load_state_dict(shared["scaler"])


def _load_own(prepared: Prepared, own: dict[str, Any], states: Sequence[Any]) -> None:
    _require_count("loaders", own["loaders"], prepared.loaders)
    engines = [each.synchronizer for each in prepared.models.attachments]
    for engine, state, window in zip(engines, states, own["windows"], strict=True):
        # The layout of the buckets, which decides in which order numbers are added up.
        engine.load_state_dict(state)
        load_window(engine.engine, window)
    for loader, state in zip(prepared.loaders, own["loaders"], strict=True):
        loader.load_state_dict(state)
    prepared.windows.load_counts(engines, own["counts"])
    set_rng_state(own["rng"])


def _require_count(name: str, saved: Sequence[Any], here: Sequence[Any]) -> None:
    if len(saved) != len(here):
        raise ConfigurationError(
            f"the checkpoint holds {len(saved)} {name} and this accelerator has prepared {len(here)}. Prepare the same "
            "objects, in the same order, before you load"
        )


# -- over the communicator, unpickled ---------------------------------------------------------------------------------


def heal(prepared: Prepared, communicator: Communicator, lagging: Sequence[int]) -> None:
    """Copy all prepared state of rank 0 to the ``lagging`` ranks. Collective."""
    is_source, lags = communicator.rank == HEALTHY, communicator.rank in lagging
    structure, tensors = encode(shared_state(prepared)) if is_source else (None, {})
    told = json.dumps([structure, [_described(*item) for item in tensors.items()]]) if is_source else ""
    structure, described = json.loads(_from_source(told.encode(), communicator))
    received: dict[str, torch.Tensor] = {}
    for batch in in_batches(described, lambda one: int(one["bytes"])):
        pieces = [(tensors[one["name"]] if is_source else _room_for(one, communicator)).contiguous() for one in batch]
        broadcast_tensors(pieces, communicator, HEALTHY)
        if lags:
            received.update({one["name"]: piece for one, piece in zip(batch, pieces, strict=True)})
    if lags:
        load_shared_state(prepared, decode(structure, received), "the state of rank 0")


def _described(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": tensor.device.type,
        "bytes": tensor.nbytes,
    }


def _room_for(described: dict[str, Any], communicator: Communicator) -> torch.Tensor:
    index = communicator.device.index if described["device"] == communicator.device.type else None
    device = torch.device(described["device"], index) if index is not None else torch.device(described["device"])
    return torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device=device)


def _from_source(message: bytes, communicator: Communicator) -> bytes:
    size = torch.tensor([len(message)], dtype=torch.int64, device=communicator.device)
    communicator.broadcast(size, HEALTHY).wait()
    letters = torch.zeros(int(size), dtype=torch.uint8, device=communicator.device)
    if communicator.rank == HEALTHY:
        letters.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    communicator.broadcast(letters, HEALTHY).wait()
    return bytes(letters.cpu().numpy().data)
