"""What an Accelerator saves: all prepared state, to resume or to send to ranks that lag behind; a model; any object.

Models, optimizers, schedulers and the scaler are written once; every rank writes its positions in the data, its random
numbers and what an unfinished window has accumulated. Objects are identified by the order in which they were prepared.
"""

import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradsync.accelerator.data_loader import PreparedDataLoader
from gradsync.accelerator.models import Precision, PreparedModels, extract_model_from_parallel
from gradsync.accelerator.optimizer import PreparedOptimizer, PreparedScheduler
from gradsync.accelerator.settings import ProjectConfiguration
from gradsync.accelerator.windows import ModelWindows
from gradsync.accelerator.world import ProcessControl
from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint import CheckpointFolder, Loaded, rng_state, set_rng_state, write_tensors
from gradsync.communicator import Communicator
from gradsync.core.engine.blocks import load_window, save_window
from gradsync.optim.local_steps import LocalSteps
from gradsync.parallel.state_transfer import state_of_rank_0

__all__ = ["Prepared", "Saving", "heal", "restore_prepared", "save_prepared"]

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


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
    local: list[LocalSteps] = field(default_factory=list)

    def synchronize(self) -> None:
        """Make models that take local steps equal on all ranks. Collective if there are any."""
        for each in self.local:
            each.synchronize()

    def clear(self) -> None:
        """Let go of everything."""
        for each in self.local:
            each.close()
        self.models.clear()
        self.windows.forget()
        for kind in (self.optimizers, self.schedulers, self.loaders, self.others, self.local):
            kind.clear()

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
    engines = prepared.models.synchronizers
    prepared.synchronize()
    local = [each.state_dict() for each in prepared.local]
    kept = [each.pop("reduction") for each in local]
    shared = {**shared_state(prepared), "local": local, "engines": [engine.state_dict() for engine in engines]}
    if weights is not None:
        shared["models"] = list(weights)
    own = {
        "rng": rng_state(),
        "loaders": [loader.state_dict() for loader in prepared.loaders],
        "windows": [save_window(each.engine) for each in engines],
        "counts": prepared.windows.counts(engines),
        # With local steps, every rank has a state of its own in its inner optimizer, too.
        "local": kept,
        "optimizers": [each.state_dict() for each in prepared.optimizers] if local else [],
    }
    if step is None:
        step = max(checkpoints.steps(), default=-1) + 1
    return checkpoints.save(step, shared=shared, own=own, facts=facts or {})


def shared_state(prepared: Prepared) -> dict[str, Any]:
    """What is the same on all ranks, except the engines. Collective with sharding."""
    scaler, state = prepared.precision.scaler, dict[str, Any]()
    for name, objects in prepared.replicated.items():
        state[name] = [
            each.shared_state() if isinstance(each, PreparedOptimizer) else each.state_dict() for each in objects
        ]
    return {**state, "scaler": None if scaler is None else scaler.state_dict()}


def restore_prepared(
    prepared: Prepared, loaded: Loaded, world_size: int, *, models: Sequence[Any] | None = None
) -> bool:
    """Bring everything into the state of ``loaded``; whether that includes what is a rank's own.

    It does not if another number of ranks wrote it.
    """
    shared = loaded.shared
    if "models" not in shared:
        raise ConfigurationError(
            f"{loaded.path} was written by an earlier gradsync, in another form. Continue with that one, or start over"
        )
    load_shared_state(prepared, shared, f"the checkpoint {loaded.path.name}", models=models)
    _load_local(prepared, shared["local"], loaded.own)
    if loaded.own is None or loaded.world_size != world_size:
        return False
    _load_own(prepared, loaded.own, shared["engines"])
    return True


def load_shared_state(
    prepared: Prepared, shared: dict[str, Any], source: str, *, models: Sequence[Any] | None = None
) -> None:
    """Bring everything into the state that :func:`shared_state` returned; errors name it ``source``."""
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


def _load_local(prepared: Prepared, states: Sequence[dict[str, Any]], own: dict[str, Any] | None) -> None:
    _require_count("local steps", states, prepared.local)
    held_back = [{}] * len(states) if own is None else own["local"]
    for each, state, reduction in zip(prepared.local, states, held_back, strict=True):
        each.load_state_dict(state | {"reduction": reduction})
    for optimizer, state in zip(prepared.optimizers, (own or {}).get("optimizers", ()), strict=False):
        optimizer.load_state_dict(state)


def _load_own(prepared: Prepared, own: dict[str, Any], states: Sequence[Any]) -> None:
    _require_count("loaders", own["loaders"], prepared.loaders)
    engines = prepared.models.synchronizers
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


# -- over the communicator --------------------------------------------------------------------------------------------


def heal(prepared: Prepared, communicator: Communicator, lagging: Sequence[int]) -> None:
    """Copy all prepared state of rank 0 to the ``lagging`` ranks. Collective."""
    lags = communicator.rank in lagging
    state = state_of_rank_0(communicator, lambda: shared_state(prepared), keep=lags)
    if lags:
        load_shared_state(prepared, state, "the state of rank 0")


# -- the methods of the Accelerator -----------------------------------------------------------------------------------


class Saving(ProcessControl):
    """Mixin of the Accelerator: saving and loading."""

    prepared: Prepared
    project_configuration: ProjectConfiguration
    _save_hooks: "OrderedDict[int, Callable[..., None]]"
    _load_hooks: "OrderedDict[int, Callable[..., None]]"

    @property
    def project_dir(self) -> str | None:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with ``automatic_checkpoint_naming``."""
        return self.project_configuration.iteration

    # -- everything ----------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | Path | None = None, safe_serialization: bool = True, **_: Any) -> Path:
        """Write everything prepared into ``output_dir``: also in the middle of a window, also in an epoch.

        An older checkpoint there stays until the new one is whole. All processes must call it. Files are safetensors
        and JSON in any case. With ``automatic_checkpoint_naming`` it goes to ``project_dir/checkpoints/checkpoint_n``.
        """
        naming = self.project_configuration.automatic_checkpoint_naming
        folder = self._next_folder() if naming else output_dir
        if folder is None:
            raise ConfigurationError("save_state() needs output_dir, or automatic_checkpoint_naming in project_config")
        self.prepared.synchronize()
        weights = [model.state_dict() for model in self.prepared.models.plain]
        for hook in self._save_hooks.values():
            hook(list(self.prepared.models.prepared), weights, str(folder))
        written = save_prepared(self.prepared, CheckpointFolder(folder, self.communicator), weights=weights)
        self.project_configuration.iteration += 1
        return Path(folder) if naming else written

    def has_state(self, input_dir: str | Path) -> bool:
        """Whether :meth:`save_state` has written a checkpoint there. All processes must call it."""
        # Good or damaged. Rank 0 looks, so that all get the same answer.
        found = torch.zeros(1, dtype=torch.int32, device=self.communicator.device)
        if self.is_main_process:
            found.fill_(int(bool(CheckpointFolder(input_dir, self.communicator).steps())))
        self.communicator.broadcast(found, 0).wait()
        return bool(found.item())

    def load_state(self, input_dir: str | Path | None = None, load_kwargs: Any = None, **_: Any) -> None:
        """Resume from :meth:`save_state`, with the same objects prepared in the same order.

        A damaged checkpoint is noticed, and the one before it taken; the main process says so. Without ``input_dir`` it
        is the newest that ``automatic_checkpoint_naming`` has named.
        """
        folder = self._named_folders()[-1:] if input_dir is None else [Path(input_dir).expanduser()]
        if not folder:
            raise ConfigurationError("load_state() needs input_dir, or a checkpoint of automatic_checkpoint_naming")
        models = list(self.prepared.models.prepared)
        for hook in self._load_hooks.values():
            hook(models, str(folder[0]))
        loaded = CheckpointFolder(folder[0], self.communicator).load()
        if loaded is None:
            raise ConfigurationError(
                f"there is no checkpoint in {folder[0]}. Write one with accelerator.save_state({str(folder[0])!r})"
            )
        plain = [extract_model_from_parallel(model) for model in models]
        if not restore_prepared(self.prepared, loaded, self.num_processes, models=plain):
            loaded.notes.append(
                f"the checkpoint was written by {loaded.world_size} ranks and is read by {self.num_processes}: random "
                "numbers, positions in the data and unfinished windows are not restored"
            )
        for note in loaded.notes:
            self.print(note)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before :meth:`save_state` writes. It may take weights away."""
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before :meth:`load_state` reads. It may take models away."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these too. They need ``state_dict`` and ``load_state_dict``."""
        for each in objects:
            if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
                raise ConfigurationError(
                    f"{type(each).__name__} cannot be saved: it needs state_dict() and load_state_dict()"
                )
        self.prepared.others.extend(objects)

    def _named_folders(self) -> list[Path]:
        """The checkpoints with automatic names, oldest first."""
        if self.project_dir is None:
            return []
        found = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
        numbered = [(int(match[1]), path) for path in found if (match := re.fullmatch(r"checkpoint_(\d+)", path.name))]
        return [path for _, path in sorted(numbered)]

    def _next_folder(self) -> Path:
        if self.project_dir is None:
            raise ConfigurationError("automatic_checkpoint_naming needs a project_dir to write into")
        folders, limit = self._named_folders(), self.project_configuration.total_limit
        folder = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        # Looked up by all before anything changes.
        self.wait_for_everyone()
        if folder in folders:
            raise ConfigurationError(
                f"{folder} exists already. Set accelerator.project_configuration.iteration to the number to go on with"
            )
        if limit is not None and self.is_main_process:
            for old in folders[: max(0, len(folders) + 1 - limit)]:
                shutil.rmtree(old)
        return folder

    # -- single things -------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's ``state_dict()``; without the wrapper's prefix unless ``unwrap`` is False."""
        return (extract_model_from_parallel(model) if unwrap else model).state_dict()

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object once: by the main process, or by one a node with ``save_on_each_node``.

        With ``torch.save``, or a dict of tensors as a safetensors file.
        """
        if not (self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process):
            return
        if safe_serialization:
            write_tensors(Path(f), _unshared(obj))
        else:
            torch.save(obj, f)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights as the Hugging Face hub has them: one file, or several and an index."""
        folder = Path(save_directory)
        if folder.is_file():
            raise ConfigurationError(f"save_directory must be a folder, and {folder} is a file")
        folder.mkdir(parents=True, exist_ok=True)
        self.prepared.synchronize()
        stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
        state = _unshared(self.get_state_dict(model)) if safe_serialization else self.get_state_dict(model)
        shards = _shards(state, _bytes_of(max_shard_size))
        names = [f"{stem}-{number:05}-of-{len(shards):05}.{ending}" for number in range(1, len(shards) + 1)]
        names = names if len(shards) > 1 else [f"{stem}.{ending}"]
        if self.is_main_process:
            for old in [*folder.glob(f"{stem}-*-of-*.{ending}"), *folder.glob(f"{stem}.{ending}*")]:
                old.unlink()
        self.wait_for_everyone()
        for name, shard in zip(names, shards, strict=True):
            self.save(shard, folder / name, safe_serialization=safe_serialization)
        if len(shards) > 1 and self.is_main_process:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": sum(map(_size_of, state.values()))}, "weight_map": places}
            (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


# -- files of a model -------------------------------------------------------------------------------------------------


def _unshared(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with one name a tensor, if it has several: the format knows each tensor once, models tie them."""
    found: dict[Any, str] = {}
    for name, tensor in state.items():
        found.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name, name)
    return {name: state[name].contiguous() for name in found.values()}


def _shards(state: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + _size_of(tensor) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += _size_of(tensor)
    return shards


def _size_of(tensor: Any) -> int:
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else 0


def _bytes_of(size: int | str) -> int:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", size.strip().upper())
    if match is None:
        raise ConfigurationError(f"max_shard_size must be a number of bytes or a text such as '10GB', got {size!r}")
    return int(float(match[1]) * UNITS[match[2]])
