"""Sinks that write the metrics of one run, on rank 0, for a program that draws them."""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from gradsync.base.extras import import_extra

__all__ = ["MlflowSink", "TensorBoardSink", "WandbSink"]

# The file in a tracker's folder by which a run that goes on finds what it has begun.
RUN_ID = "run-id"
# Without it, MLflow refuses to write files, which it no longer develops.
ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"


def _run_id(folder: Path, make: Callable[[], str]) -> str:
    """The id of the run in ``folder``, made on first use."""
    path = folder / RUN_ID
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(make())
    return path.read_text()


class TensorBoardSink:
    """Writes TensorBoard events to ``folder``.

    ``first_step`` is that of a run that goes on: TensorBoard hides what was written from there on before.
    """

    def __init__(self, folder: str | os.PathLike[str], *, first_step: int | None = None) -> None:
        package = import_extra("torch.utils.tensorboard", "writing TensorBoard events", "tensorboard")
        self._writer = package.SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Writes a run of W&B to ``folder``, offline unless ``WANDB_MODE`` is ``online``; ``wandb sync`` uploads it."""

    def __init__(self, folder: str | os.PathLike[str], *, project: str = "gradsync", name: str | None = None) -> None:
        wandb = import_extra("wandb", "writing a run of W&B", "wandb")
        folder = Path(folder)
        self._run = wandb.init(
            project=project,
            name=name,
            id=_run_id(folder, lambda: uuid.uuid4().hex[:8]),
            resume="allow",
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            # Not what the process prints, nor what the machine does.
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """Writes a run of MLflow: to the server in ``MLFLOW_TRACKING_URI``, or else to files in ``folder``."""

    def __init__(
        self, folder: str | os.PathLike[str], *, experiment: str = "gradsync", name: str | None = None
    ) -> None:
        mlflow = import_extra("mlflow", "writing a run of MLflow", "mlflow")
        self._metric = import_extra("mlflow.entities", "writing a run of MLflow", "mlflow").Metric
        folder = Path(folder)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = folder.resolve().as_uri()
            os.environ.setdefault(ALLOW_FILES, "true")
        self._client = client = mlflow.MlflowClient(tracking_uri=uri)

        def start() -> str:
            known = client.get_experiment_by_name(experiment)
            number = client.create_experiment(experiment) if known is None else known.experiment_id
            return str(client.create_run(number, run_name=name).info.run_id)

        self.run_id = _run_id(folder, start)
        client.update_run(self.run_id, status="RUNNING")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        self._client.log_batch(self.run_id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self.run_id)
