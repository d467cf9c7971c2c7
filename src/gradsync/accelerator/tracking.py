"""``log_with``: Accelerate's trackers (TensorBoard, wandb, …), which need the ``accelerate`` package.

Accelerate's objects ask its ``PartialState``, one per process, which rank this is. By itself it would read a launcher's
variables and might create a process group; so :func:`register_accelerator` tells it. That also serves
``accelerate.logging.get_logger`` and any other part of Accelerate that a script keeps using.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradsync.accelerator.plugins import ProjectConfiguration
from gradsync.accelerator.process_control import ProcessControl
from gradsync.base.errors import ConfigurationError

__all__ = ["Tracking", "register_accelerator"]

_OURS = "_told_by_gradsync"


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


class Tracking(ProcessControl):
    """An Accelerator's trackers. They live on the main process; on all others these methods do nothing."""

    mixed_precision: Any
    project_configuration: ProjectConfiguration
    log_with: list[Any]
    trackers: list[Any]

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
