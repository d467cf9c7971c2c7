"""Sinks for metrics, each for a program that people watch their trainings with.

::

    choose        sinks by name, as `gradsync train --metrics` takes them
    trackers      TensorBoard, W&B and MLflow: files of one run, written by rank 0
    monitoring    Prometheus and OpenTelemetry: every rank has its own numbers
"""

from gradsync.tools.metrics.choose import SINKS, SinkPlace, open_sinks
from gradsync.tools.metrics.monitoring import OpenTelemetrySink, PrometheusSink
from gradsync.tools.metrics.trackers import MlflowSink, TensorBoardSink, WandbSink

__all__ = [
    "SINKS",
    "MlflowSink",
    "OpenTelemetrySink",
    "PrometheusSink",
    "SinkPlace",
    "TensorBoardSink",
    "WandbSink",
    "open_sinks",
]
