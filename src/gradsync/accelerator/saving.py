"""What an Accelerator writes: all prepared state, to resume; a model, for others to load; any object; trackers' runs.

``log_with`` takes Accelerate's trackers (TensorBoard, wandb, …), which need the ``accelerate`` package. Its objects ask
its ``PartialState``, one per process, which rank this is. By itself it would read a launcher's variables and might
create a process group; so :func:`register_accelerator` tells it. That also serves ``accelerate.logging.get_logger`` and
any other part of Accelerate that a script keeps using.
"""

import json
import re
import shutil
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradsync.accelerator.models import extract_model_from_parallel
from gradsync.accelerator.prepared_state import Prepared, has_checkpoint, load_prepared, save_prepared
from gradsync.accelerator.settings import ProjectConfiguration
from gradsync.accelerator.world import ProcessControl
from gradsync.base.errors import ConfigurationError
from gradsync.checkpoint import CheckpointFolder, write_tensors

__all__ = ["Saving", "register_accelerator"]

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_OURS = "_told_by_gradsync"


class Saving(ProcessControl):
    """Mixin of the Accelerator: saving, loading and trackers."""

    prepared: Prepared
    project_configuration: ProjectConfiguration
    mixed_precision: Any
    log_with: list[Any]
    trackers: list[Any]
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

    # -- trackers; they live on the main process, elsewhere these methods do nothing ---------------------------------

    def _choose_trackers(self, log_with: Any, logging_dir: str | Path | None) -> None:
        self.trackers = []
        self.log_with = []
        if log_with is None or log_with == []:
            return
        try:
            self.log_with = _trackers_of_accelerate().filter_trackers(log_with, logging_dir)
        except ValueError as error:
            raise ConfigurationError(f"log_with={log_with!r}: {error}") from error
        if not self.log_with:
            warnings.warn(
                f"`log_with={log_with}` was passed but no supported trackers are currently installed.", stacklevel=4
            )

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Begin a run with every tracker of ``log_with``. ``init_kwargs`` has arguments for each, by its name."""
        if not self.log_with or not self.is_main_process:
            return
        tracking = _trackers_of_accelerate()
        register_accelerator(self, self.mixed_precision)
        for wanted in self.log_with:
            if isinstance(wanted, tracking.GeneralTracker):
                self.trackers.append(wanted)
                continue
            kind = tracking.LOGGER_TYPE_TO_CLASS[str(wanted)]
            places = [self.project_configuration.logging_dir] if kind.requires_logging_directory else []
            self.trackers.append(kind(project_name, *places, **(init_kwargs or {}).get(str(wanted), {})))
        for tracker in self.trackers:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, or with ``unwrap`` the object of its library."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.trackers:
            return _Blank()
        names: Sequence[str] = [tracker.name for tracker in self.trackers]
        raise ConfigurationError(f"{name} is not an available tracker stored inside the `Accelerator`: it has {names}")

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give numbers and texts to all trackers. ``log_kwargs`` has arguments for each, by its name."""
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def _finish_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []


# -- files of a model -------------------------------------------------------------------------------------------------


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


# -- the package accelerate -------------------------------------------------------------------------------------------


def register_accelerator(control: ProcessControl, mixed_precision: str) -> None:
    """Tell Accelerate's state, if it is loaded and knows nothing better, which process this is."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return
    known: Any = module.PartialState._shared_state
    if known and _OURS not in known:
        return
    known.update(
        {
            "_cpu": control.device.type == "cpu",
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "device": control.device,
            "debug": False,
            "distributed_type": module.DistributedType(str(control.distributed_type)),
            "num_processes": control.num_processes,
            "process_index": control.process_index,
            "local_process_index": control.local_process_index,
            "fork_launched": False,
            _OURS: True,
        }
    )
    whole: Any = module.AcceleratorState._shared_state
    if whole and _OURS not in whole:
        return
    whole.clear()
    plugin = sys.modules["accelerate.utils"].TorchDynamoPlugin()
    try:
        module.AcceleratorState(mixed_precision, cpu=known["_cpu"], dynamo_plugin=plugin, _from_accelerator=True)
    except Exception:
        # A version that wants to know more. It says so itself to whoever asks it.
        whole.clear()


def _trackers_of_accelerate() -> Any:
    try:
        from accelerate import tracking  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            "log_with uses the trackers of the package accelerate, which is not here. Run: pip install accelerate. Or "
            "leave log_with away, and use the tracker's own package where accelerator.is_main_process"
        ) from error
    return tracking


class _Blank:
    """A tracker for processes that have none: every call does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
