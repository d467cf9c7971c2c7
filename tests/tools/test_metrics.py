"""Every sink, with the real package: what was written is read back by the package itself."""

import http.server
import json
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradsync.errors import ConfigurationError
from gradsync.observe.metrics import DESCRIPTIONS
from gradsync.tools.llm.run import run
from gradsync.tools.llm.run_folder import read_metrics
from gradsync.tools.llm.settings import TrainSettings
from gradsync.tools.metrics import (
    SINKS,
    MlflowSink,
    OpenTelemetrySink,
    PrometheusSink,
    SinkPlace,
    TensorBoardSink,
    WandbSink,
    open_sinks,
)
from gradsync.tools.metrics.choose import PACKAGES, check_sinks, require_packages
from tests.ranks import pool_of

# Grafana puts the time between its points here.
RATE = "$__rate_interval"

pytestmark = [pytest.mark.program, pytest.mark.timeout(200)]

STEPS = {
    step: {
        "training/loss": 4.0 / step,
        "step/forward_seconds": 0.25 * step,
        "communication/bytes": 1000.0 * step,
        "training/skipped_steps": float(step // 2),
    }
    for step in (1, 2, 3)
}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    for step, values in STEPS.items():
        sink.write(step, values)
    sink.close()
    # A run that goes on from step 2 does step 3 again, otherwise.
    sink = TensorBoardSink(tmp_path, first_step=3)
    sink.write(3, {"training/loss": 30.0})
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("training/loss")] == [(1, 4.0), (2, 2.0), (3, 30.0)]
    assert [event.value for event in events.Scalars("step/forward_seconds")] == [0.25, 0.5]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: a header, then chunks in blocks of 32 KiB, as LevelDB's logs have them."""
    from wandb.proto import wandb_internal_pb2

    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        # Whole, or the last of several.
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sink = WandbSink(tmp_path, name="mine")
    for step, values in STEPS.items():
        sink.write(step, values)
    sink.close()
    wandb.teardown()
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(path))
    (begun,) = [record.run for record in records if record.HasField("run")]
    assert (begun.project, begun.display_name, begun.run_id) == ("gradsync", "mine", (tmp_path / "run-id").read_text())
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["_step"] for row in rows] == list(STEPS)
    for row, values in zip(rows, STEPS.values(), strict=True):
        assert {name: row[name] for name in values} == values


def test_mlflow_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sink = MlflowSink(tmp_path, name="mine")
    sink.write(1, STEPS[1])
    sink.close()
    # A run that goes on is the same run.
    sink = MlflowSink(tmp_path, name="mine")
    for step in (2, 3):
        sink.write(step, STEPS[step])
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    assert client.get_run(sink.run_id).info.status == "RUNNING"
    sink.close()
    run_of = client.get_run(sink.run_id)
    assert (run_of.info.run_name, run_of.info.status) == ("mine", "FINISHED")
    assert len(client.search_runs([run_of.info.experiment_id])) == 1
    for name in STEPS[1]:
        history = [(entry.step, entry.value) for entry in client.get_metric_history(sink.run_id, name)]
        assert sorted(history) == [(step, values[name]) for step, values in STEPS.items()]


# -- OpenTelemetry -------------------------------------------------------------------------------------------------


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what it is sent by OTLP."""

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.kept.append((self.path, ExportMetricsServiceRequest.FromString(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_collector_gets_what_was_written() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.kept = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        sink = OpenTelemetrySink(f"http://127.0.0.1:{server.server_port}", rank=1)
        for step, values in STEPS.items():
            sink.write(step, values)
        sink.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, request),) = server.kept  # type: ignore[attr-defined]
    assert path == "/v1/metrics"
    (resource,) = request.resource_metrics
    metrics = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    (point,) = metrics["gradsync.step.forward_seconds"].gauge.data_points
    assert point.as_double == 0.75
    assert [(each.key, each.value.int_value) for each in point.attributes] == [("rank", 1)]
    total = metrics["gradsync.communication.bytes"].sum
    assert total.is_monotonic
    assert [point.as_double for point in total.data_points] == [3000.0]
    assert metrics["gradsync.training.step"].gauge.data_points[0].as_int == 3


def test_a_meter_provider_of_your_own_is_used_and_left_open() -> None:
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    reader = pytest.importorskip("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
    provider = metrics.MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    sink = OpenTelemetrySink(provider=provider)
    sink.write(1, {"training/loss": 4.0})
    sink.close()
    (resource,) = reader.get_metrics_data().resource_metrics
    names = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
    assert names == {"gradsync.training.loss", "gradsync.training.step"}
    provider.shutdown()


# -- Prometheus ----------------------------------------------------------------------------------------------------


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.fixture
def endpoints() -> Iterator[list[PrometheusSink]]:
    pytest.importorskip("prometheus_client")
    sinks = [PrometheusSink(rank=rank, host="127.0.0.1") for rank in range(2)]
    yield sinks
    for sink in sinks:
        sink.close()


def test_prometheus_reads_the_newest_values(endpoints: list[PrometheusSink]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    for step, values in STEPS.items():
        endpoints[1].write(step, values)
    endpoints[1].write(3, {"validation/loss": 0.5})
    text = scrape(endpoints[1].port)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["gradsync_step_forward_seconds"].type == "gauge"
    assert families["gradsync_communication_bytes"].type == "counter"
    samples = {sample.name: sample for family in families.values() for sample in family.samples}
    assert samples["gradsync_communication_bytes_total"].value == 3000
    assert samples["gradsync_validation_loss"].value == 0.5
    assert samples["gradsync_training_step"].value == 3
    assert all(sample.labels == {"rank": "1"} for sample in samples.values())
    assert "gradsync_" not in scrape(endpoints[0].port)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ask(port: int, path: str, **query: str) -> Any:
    address = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return None


@pytest.fixture
def prometheus(tmp_path: Path, endpoints: list[PrometheusSink]) -> Iterator[int]:
    """The port of a real Prometheus that scrapes the endpoints."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs the program prometheus")
    port = free_port()
    targets = json.dumps([f"127.0.0.1:{sink.port}" for sink in endpoints])
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 200ms}}\n"
        f"scrape_configs: [{{job_name: gradsync, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_a_real_prometheus_scrapes_every_rank(prometheus: int, endpoints: list[PrometheusSink]) -> None:
    for rank, sink in enumerate(endpoints):
        sink.write(3, {**STEPS[3], "step/seconds": 1.0 + rank})
    found: dict[str, str] = {}
    until = time.monotonic() + 100
    while len(found) < 2 and time.monotonic() < until:
        time.sleep(0.2)
        answer = ask(prometheus, "/api/v1/query", query="gradsync_step_seconds")
        results = [] if answer is None else answer["data"]["result"]
        found = {each["metric"]["rank"]: each["value"][1] for each in results}
    assert found == {"0": "1", "1": "2"}
    answer = ask(prometheus, "/api/v1/query", query="sum(gradsync_communication_bytes_total)")
    assert answer["data"]["result"][0]["value"][1] == "6000"
    # In OpenMetrics, which a newer Prometheus asks for, the name of a counter is that without its suffix.
    types = {name.removesuffix("_total"): each for name, (each,) in ask(prometheus, "/api/v1/metadata")["data"].items()}
    assert types["gradsync_communication_bytes"]["type"] == "counter"
    assert types["gradsync_step_seconds"]["help"] == "Seconds of a step"


DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_prometheus_answers_every_panel_of_the_dashboard(prometheus: int, endpoints: list[PrometheusSink]) -> None:
    shown = dict.fromkeys([*DESCRIPTIONS, "training/loss", "validation/loss"], 1.0)
    for sink in endpoints:
        sink.write(1, shown)
    missing, until = expressions(), time.monotonic() + 100
    # A rate has to see two values.
    while missing and time.monotonic() < until:
        time.sleep(0.2)
        answers = {each: ask(prometheus, "/api/v1/query", query=each.replace(RATE, "30s")) for each in missing}
        missing = [each for each, answer in answers.items() if answer is None or not answer["data"]["result"]]
    assert missing == []


def unknown(given: Any, known: Any, place: str = "") -> Iterator[str]:
    """What of the JSON ``given`` is not in ``known``."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            yield from unknown(value, known.get(key), f"{place}/{key}")
    elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        for number, (value, other) in enumerate(zip(given, known, strict=True)):
            yield from unknown(value, other, f"{place}/{number}")
    elif given != known:
        yield place


def test_grafana_s_own_schema_has_all_of_the_dashboard() -> None:
    """Its classes are made from that schema, and drop what it does not have."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard").Dashboard
    from grafana_foundation_sdk.cog import encoder, plugins

    plugins.register_default_plugins()
    given = json.loads(DASHBOARD.read_text())

    def read(content: Any) -> Any:
        return json.loads(encoder.JSONEncoder().encode(dashboard.from_json(content)))

    assert list(unknown(given, read(given))) == []
    given["panels"][0]["targets"][0]["expression"] = given["panels"][0].pop("title")
    assert list(unknown(given, read(given))) == ["/panels/0/targets/0/expression"]


# -- by name -------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_an_error_that_names_it(endpoints: list[PrometheusSink]) -> None:
    port = endpoints[0].port
    with pytest.raises(ConfigurationError, match=rf"rank 2 cannot listen on port {port} .*choose another one"):
        PrometheusSink(port, rank=2, host="127.0.0.1")


def test_sinks_are_opened_by_name_and_trackers_on_rank_0_alone(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboard")
    first = free_port()
    place = SinkPlace(folder=tmp_path, rank=3, local_rank=1)
    (served,) = open_sinks(f"tensorboard,prometheus:{first - 1}", place)
    assert isinstance(served, PrometheusSink)
    assert served.port == first
    served.close()
    (written,) = open_sinks("tensorboard", SinkPlace(folder=tmp_path))
    written.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


@pytest.mark.parametrize("spec", ["statsd", "tensorboard,", "prometheus;tensorboard"])
def test_an_unknown_name_is_refused(spec: str) -> None:
    assert not check_sinks(spec)
    with pytest.raises(ConfigurationError, match="metrics go to tensorboard, "):
        open_sinks(spec, SinkPlace(rank=1))


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_an_error_that_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.startswith(PACKAGES[name])]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tensorboard" if name == "tensorboard" else PACKAGES[name], None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'gradsync\[{name}\]'"):
        require_packages(name)


# -- gradsync train ------------------------------------------------------------------------------------------------


def train_with_metrics(folder: Path, text: Path, metrics: str) -> None:
    settings = TrainSettings(
        model="nano",
        data=str(text),
        micro_batch=2,
        sequence_length=32,
        steps=4,
        warmup=2,
        run_folder=folder,
        metrics=metrics,
    )
    assert run(settings, cpu=True).proof.equal


def test_a_training_writes_its_metrics(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. \n" * 400)
    folder = tmp_path / "run"
    pool_of(2).run(train_with_metrics, folder, text, "tensorboard")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    series = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    losses = [record["loss"] for record in read_metrics(folder) if record["kind"] == "step"]
    assert series["training/loss"] == pytest.approx(losses)
    assert series["training/steps"] == [1, 2, 3, 4]
    assert len(series["validation/loss"]) == 1
    sent = series["communication/bytes"]
    assert sent == pytest.approx([sent[0], 2 * sent[0], 3 * sent[0], 4 * sent[0]])
    assert all(seconds > 0 for seconds in series["step/exposed_seconds"])
