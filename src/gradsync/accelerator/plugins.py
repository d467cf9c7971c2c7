"""The configuration objects of an Accelerator, with Accelerate's names and defaults."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from gradsync.base.errors import ConfigurationError

__all__ = ["DataLoaderConfiguration", "GradientAccumulationPlugin", "ProjectConfiguration", "require_steps"]


CHOICES = {
    "divide_by": ("window", "num_steps"),
    "scheduler_steps": ("per_process", "once"),
    "windows": ("per_model", "shared"),
}


def require_steps(name: str, steps: object) -> None:
    """``name``: the argument through which the caller passed the number."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, got {steps!r}")


@dataclass(frozen=True)
class GradientAccumulationPlugin:
    """How micro-batches become windows.

    num_steps
        micro-batches per window.
    adjust_scheduler
        accepted but without effect, as in Accelerate 1.15, which never reads a value other than False.
    sync_with_dataloader
        the last batch of a prepared loader ends the window, however short it is.
    sync_each_batch
        synchronize in every micro-batch: more traffic, the same result.
    divide_by
        ``"window"``: the mean over the micro-batches that the window really had. ``"num_steps"``: every loss is divided
        by ``num_steps``, as in Accelerate, so the gradients of a short last window are too small.
    scheduler_steps
        how far a prepared scheduler moves per window. ``"per_process"``: once per process (once in all with
        ``split_batches``), for a schedule that counts the batches of one process. ``"once"``: one step, for a schedule
        that counts windows.
    windows
        ``"per_model"``: ``accumulate(a)`` and ``accumulate(b)`` in one loop count separate windows. ``"shared"``: one
        count of all micro-batches, as in Accelerate.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    divide_by: Literal["window", "num_steps"] = "window"
    scheduler_steps: Literal["per_process", "once"] = "per_process"
    windows: Literal["per_model", "shared"] = "per_model"

    @classmethod
    def like_accelerate(cls, num_steps: int | None = None, **options: Any) -> "GradientAccumulationPlugin":
        """Accelerate's own arithmetic, for runs that must not differ from earlier ones."""
        return cls(num_steps, **{"divide_by": "num_steps", "windows": "shared", **options})

    @classmethod
    def of(cls, plugin: Any) -> "GradientAccumulationPlugin":
        """``plugin``, or what Accelerate's object of that name says."""
        return plugin if isinstance(plugin, cls) else cls(**_fields_of(plugin, cls))

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            require_steps("num_steps", self.num_steps)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{name} must be {' or '.join(map(repr, known))}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """How a prepared loader distributes batches among the ranks.

    split_batches
        the loader's batch size is that of all ranks together, and each rank takes its part of every batch.
    dispatch_batches
        only rank 0 reads; it sends the others their parts. Default: every rank reads, also from iterable datasets.
    even_batches
        every rank gets the same number of batches of equal size; missing samples are repeated from the beginning.
    use_seedable_sampler
        shuffle by a seed and the epoch alone, whatever else draws random numbers.
    data_seed
        that seed; by default the initial seed of torch's generator on rank 0.
    non_blocking
        copy batches to the device without waiting; needs ``pin_memory=True`` in the loader.
    use_stateful_dataloader
        use torchdata's ``StatefulDataLoader`` underneath.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    @classmethod
    def of(cls, configuration: Any) -> "DataLoaderConfiguration":
        """``configuration``, or what Accelerate's object of that name says."""
        return configuration if isinstance(configuration, cls) else cls(**_fields_of(configuration, cls))


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    project_dir, logging_dir
        the folder of the run, and the folder of trackers that write files (default: ``project_dir``).
    automatic_checkpoint_naming, total_limit, iteration
        ``save_state()`` writes ``project_dir/checkpoints/checkpoint_<iteration>``, and keeps at most ``total_limit``.
    save_on_each_node
        ``accelerator.save`` writes once per node, not once in all.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.logging_dir = self.project_dir if self.logging_dir is None else self.logging_dir

    @classmethod
    def of(cls, configuration: Any, project_dir: Any = None) -> "ProjectConfiguration":
        """``configuration``, ours or Accelerate's, with ``project_dir`` where it has none."""
        if isinstance(configuration, cls):
            chosen = configuration
        else:
            chosen = cls() if configuration is None else cls(**_fields_of(configuration, cls))
        if project_dir is not None and chosen.project_dir is None:
            chosen.project_dir = str(project_dir)
            chosen.logging_dir = chosen.logging_dir or str(project_dir)
        return chosen


def _fields_of(given: Any, known: type[Any]) -> dict[str, Any]:
    """The values of an object that has other fields besides."""
    names = [field.name for field in dataclasses.fields(known)]
    found = {name: getattr(given, name) for name in names if hasattr(given, name)}
    if not found:
        raise ConfigurationError(f"a {known.__name__} was expected, ours or Accelerate's, got {type(given).__name__}")
    return found
