"""What an Accelerator saves: all prepared state, to resume; a model, for others to load; any object, once."""

import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradsync.accelerator.helpers import extract_model_from_parallel
from gradsync.accelerator.plugins import ProjectConfiguration
from gradsync.accelerator.process_control import ProcessControl
from gradsync.accelerator.state_saving import Prepared, has_checkpoint, load_prepared, save_prepared
from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint import CheckpointFolder, write_tensors

__all__ = ["Saving"]

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Saving(ProcessControl):
    """Saving and loading in an Accelerator."""

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
        weights = [model.state_dict() for model in self.prepared.models.plain]
        for hook in self._save_hooks.values():
            hook(list(self.prepared.models.prepared), weights, str(folder))
        written = save_prepared(self.prepared, CheckpointFolder(folder, self.communicator), weights=weights)
        self.project_configuration.iteration += 1
        return Path(folder) if naming else written

    def has_state(self, input_dir: str | Path) -> bool:
        """Whether :meth:`save_state` has written a checkpoint there. All processes must call it."""
        return has_checkpoint(self.communicator, input_dir)

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
        plain = [extract_model_from_parallel(model) for model in models]
        for note in load_prepared(self.prepared, self.communicator, folder[0], models=plain):
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


def _unshared(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the further names of a tensor that has several: the format knows each tensor once, models tie them."""
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
