"""The examples for Lightning and Fabric train with gradsync as they do with DDP, and a rank that is killed is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning_examples import ACCUMULATIONS, NAMES
from tests.lightning_suite import compare
from tests.scripts import clean_environment, run_scripts
from tests.zygote import run_python

# One worker runs them, and the other tests with big packages: they take their time from the same two cores.
pytestmark = [pytest.mark.program, pytest.mark.timeout(500), pytest.mark.xdist_group("run")]

SCRIPT = Path(__file__).parents[2] / "lightning_examples.py"
# Most of the time that Lightning takes to be imported.
PRELOADED = ("torchmetrics", "torch._dynamo")

KILLED = """
import logging, os, signal, sys, warnings
import torch
import gradsync.lightning

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

def may_die(rank, number):
    if rank == 1 and number == 3:
        os.kill(os.getpid(), signal.SIGKILL)

def by_lightning():
    from lightning import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Killed(BoringModel):
        def training_step(self, batch, number):
            may_die(self.global_rank, number)
            return super().training_step(batch, number)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(strategy="gradsync", accelerator="cpu", devices=2, max_epochs=1, **quiet).fit(Killed())

def by_fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(strategy="gradsync", accelerator="cpu", devices=2)
    fabric.launch()
    plain = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for number in range(6):
        may_die(fabric.global_rank, number)
        fabric.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()

globals()[sys.argv[1]]()
"""


def left_by(strategy: str, folder: Path) -> Path:
    ran = run_scripts([SCRIPT], ranks=2, folder=folder, arguments=[strategy, strategy], timeout=450, preload=PRELOADED)
    assert ran[SCRIPT].error is None, ran[SCRIPT].error
    return folder / strategy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the examples leave behind with either strategy."""
    pytest.importorskip("lightning")
    return {strategy: left_by(strategy, tmp_path_factory.mktemp(strategy)) for strategy in ("ddp", "gradsync")}


def saved(folder: Path) -> Any:
    """Parameters, optimizers, schedulers and steps; callbacks name the folder."""
    (path,) = folder.glob("*.ckpt")
    whole = torch.load(path, weights_only=False)
    return {name: value for name, value in whole.items() if name != "callbacks"}


@pytest.mark.parametrize("count", ACCUMULATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_trains_to_the_same_bits(name: str, count: int, folders: dict[str, Path]) -> None:
    stock, ours = (folders[strategy] / name / str(count) for strategy in ("ddp", "gradsync"))
    assert compare(saved(stock), saved(ours)) == 0.0
    # Losses, learning rates and steps, in all digits.
    logged = (stock / "metrics.csv").read_text()
    assert {"step", "train_loss"} < set(logged.partition("\n")[0].split(","))
    assert (ours / "metrics.csv").read_text() == logged


@pytest.mark.parametrize("way", ["by_lightning", "by_fabric"])
def test_a_killed_rank_is_named_where_lightning_starts_the_ranks(way: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "killed.py").write_text(KILLED)
    told = run_python("killed.py", way, folder=tmp_path, variables=clean_environment(), timeout=400)
    assert told.returncode != 0
    assert "CommunicatorLostError: rank 1 (process" in told.stderr, told.stderr
    assert "has ended without a word, killed" in told.stderr
