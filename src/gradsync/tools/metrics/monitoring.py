"""Sinks for programs that watch many processes: every rank reports its own numbers."""

import re
from collections.abc import Mapping
from typing import Any

from gradsync.base.errors import ConfigurationError
from gradsync.base.extras import import_extra
from gradsync.observe.metrics import COUNTERS, DESCRIPTIONS

__all__ = ["OpenTelemetrySink", "PrometheusSink"]


class PrometheusSink:
    """Serves the newest values at ``http://HOST:port/metrics``, in Prometheus' text format, labelled with the rank.

    ``step/seconds`` is called ``gradsync_step_seconds`` there, and counters end in ``_total``. With port 0 a free one
    is taken; :attr:`port` says which.
    """

    def __init__(self, port: int = 0, *, rank: int = 0, host: str = "0.0.0.0") -> None:
        client = import_extra("prometheus_client", "a Prometheus endpoint", "prometheus")
        self._families = import_extra("prometheus_client.core", "a Prometheus endpoint", "prometheus")
        self._rank = str(rank)
        self._values: Mapping[str, float] = {}
        registry = client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigurationError(
                f"the Prometheus endpoint of rank {rank} cannot listen on port {port} of {host} ({error.strerror}). "
                "Ranks of one host take ports in a row, from the given one on: choose another one"
            ) from error
        self.port = int(self._server.server_port)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # A new mapping: the server's threads may be reading the old one.
        self._values = {**self._values, **values, "training/step": step}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> list[Any]:
        """The values as prometheus_client wants them, when somebody asks for them."""
        families = []
        for name, value in self._values.items():
            is_counter = name in COUNTERS
            kind = self._families.CounterMetricFamily if is_counter else self._families.GaugeMetricFamily
            called = "gradsync_" + re.sub(r"\W", "_", name)
            family = kind(called, DESCRIPTIONS.get(name, name), labels=["rank"])
            family.add_metric([self._rank], value)
            families.append(family)
        return families


class OpenTelemetrySink:
    """Reports to an OpenTelemetry collector: ``step/seconds`` is called ``gradsync.step.seconds`` there, and every
    value has the attribute ``rank``.

    ``provider`` is a meter provider of your own, which is not shut down. Without one, values go by OTLP over HTTP to
    ``endpoint``, by default to the one in ``OTEL_EXPORTER_OTLP_ENDPOINT``, as often as OpenTelemetry's variables say.
    """

    _own: Any = None

    def __init__(self, endpoint: str | None = None, *, rank: int = 0, provider: Any = None) -> None:
        if provider is None:
            provider = self._own = _otlp_provider(endpoint)
        self._meter = provider.get_meter("gradsync")
        self._attributes = {"rank": rank}
        self._instruments: dict[str, Any] = {}
        self._totals: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, "training/step": step}.items():
            is_counter = name in COUNTERS
            if name not in self._instruments:
                make = self._meter.create_counter if is_counter else self._meter.create_gauge
                called = "gradsync." + name.replace("/", ".")
                self._instruments[name] = make(called, description=DESCRIPTIONS.get(name, name))
            if is_counter:
                self._instruments[name].add(value - self._totals.get(name, 0.0), self._attributes)
                self._totals[name] = value
            else:
                self._instruments[name].set(value, self._attributes)

    def close(self) -> None:
        if self._own is not None:
            self._own.shutdown()


def _otlp_provider(endpoint: str | None) -> Any:
    purpose, extra = "reporting to OpenTelemetry", "opentelemetry"
    metrics = import_extra("opentelemetry.sdk.metrics", purpose, extra)
    export = import_extra("opentelemetry.sdk.metrics.export", purpose, extra)
    exporters = import_extra("opentelemetry.exporter.otlp.proto.http.metric_exporter", purpose, extra)
    resources = import_extra("opentelemetry.sdk.resources", purpose, extra)
    exporter = exporters.OTLPMetricExporter(endpoint=None if endpoint is None else f"{endpoint}/v1/metrics")
    return metrics.MeterProvider(
        metric_readers=[export.PeriodicExportingMetricReader(exporter)],
        resource=resources.Resource.create({"service.name": "gradsync"}),
        # Its owner shuts it down.
        shutdown_on_exit=False,
    )
