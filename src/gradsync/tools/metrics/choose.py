"""Sinks by name: ``tensorboard``, ``prometheus:9400``; several are separated by commas."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.base.extras import import_extra
from gradsync.observe.metrics import MetricsSink
from gradsync.tools.metrics.monitoring import OpenTelemetrySink, PrometheusSink
from gradsync.tools.metrics.trackers import MlflowSink, TensorBoardSink, WandbSink

__all__ = ["SINKS", "SinkPlace", "check_sinks", "open_sinks", "require_packages"]

PROMETHEUS_PORT = 9400
# Of W&B, and the experiment of MLflow.
PROJECT = "gradsync"


@dataclass(frozen=True, kw_only=True)
class SinkPlace:
    """Where sinks are opened: the ``folder`` of the run, and this rank, by default as the launcher numbers it.
    ``first_step`` is that of a run that goes on."""

    folder: str | os.PathLike[str] = "runs"
    rank: int = field(default_factory=lambda: read_environment().rank)
    local_rank: int = field(default_factory=lambda: read_environment().local_rank)
    first_step: int | None = None


# What makes a sink of a place and of what follows the colon; None on a rank that has nothing to write.
Opener = Callable[[SinkPlace, str], MetricsSink | None]


def _tensorboard(place: SinkPlace, folder: str) -> MetricsSink | None:
    if place.rank:
        return None
    return TensorBoardSink(folder or Path(place.folder) / "tensorboard", first_step=place.first_step)


def _prometheus(place: SinkPlace, port: str) -> MetricsSink:
    if port and not port.isdecimal():
        raise ConfigurationError(f"prometheus:PORT needs a port of this host, got {port!r}")
    return PrometheusSink(int(port or PROMETHEUS_PORT) + place.local_rank, rank=place.rank)


def _wandb(place: SinkPlace, project: str) -> MetricsSink | None:
    folder = Path(place.folder)
    return None if place.rank else WandbSink(folder / "wandb", project=project or PROJECT, name=folder.name)


def _mlflow(place: SinkPlace, experiment: str) -> MetricsSink | None:
    folder = Path(place.folder)
    return None if place.rank else MlflowSink(folder / "mlruns", experiment=experiment or PROJECT, name=folder.name)


def _opentelemetry(place: SinkPlace, endpoint: str) -> MetricsSink:
    return OpenTelemetrySink(endpoint or None, rank=place.rank)


SINKS: dict[str, Opener] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "prometheus": _prometheus,
    "opentelemetry": _opentelemetry,
}
PACKAGES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "prometheus": "prometheus_client",
    "opentelemetry": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
}


def check_sinks(spec: str) -> bool:
    """Whether all sinks in ``spec`` are known by their names."""
    return all(each.partition(":")[0] in SINKS for each in spec.split(","))


def require_packages(spec: str) -> None:
    """Raise if a package that the sinks need is not installed."""
    for name in (each.partition(":")[0] for each in spec.split(",")):
        import_extra(PACKAGES[name], f"writing metrics to {name}", name)


def open_sinks(spec: str, place: SinkPlace | None = None) -> list[MetricsSink]:
    """Open the sinks that ``spec`` names: ``open_sinks("tensorboard,prometheus:9400")``. Those that write one run for
    all ranks are opened on rank 0 alone."""
    sinks = []
    for each in spec.split(","):
        name, _, argument = each.partition(":")
        if name not in SINKS:
            raise ConfigurationError(f"metrics go to {', '.join(SINKS)}; got {name!r}")
        sink = SINKS[name](place or SinkPlace(), argument)
        if sink is not None:
            sinks.append(sink)
    return sinks
