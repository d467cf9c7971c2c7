"""Scripts for Lightning, Fabric, the Trainer of Transformers and Accelerate, unchanged: under `gradsync run` they end
with the bits they end with over torch's DistributedDataParallel, or by Accelerate itself.

GPT-like loops and plain DDP scripts are in test_run.py, loops by both Accelerators in test_like_accelerate.py.
"""

import os
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import clean_environment, in_new_interpreters, run_scripts
from tests.zygote import run_python

# One worker runs them all, and test_run.py: they take their time from the same two cores.
pytestmark = [pytest.mark.program, pytest.mark.timeout(200), pytest.mark.xdist_group("run")]

ROOT = Path(__file__).parent.parent
LIGHTNING = ROOT / "tests" / "lightning_training.py"
# Most of the time that Lightning takes to be imported. Lightning itself would stay in the zygote, with torch's class.
PRELOADED = ("torchmetrics", "torch._dynamo")

TRAINER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging
logging.set_verbosity_error()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x, labels):
        output = self.layers(x)
        return {"loss": (output - labels).square().mean(), "logits": output}

torch.manual_seed(0)
data = [{"x": x, "labels": x.sum()[None].sin()} for x in torch.randn(32, 4)]
trained = {}
for accumulation in (1, 3):
    arguments = TrainingArguments(
        output_dir=".", use_cpu=True, report_to=[], max_steps=4, per_device_train_batch_size=2, disable_tqdm=True,
        save_strategy="no", logging_strategy="no", learning_rate=0.1, gradient_accumulation_steps=accumulation,
    )
    trainer = Trainer(Net(), arguments, train_dataset=data)
    trainer.train()
    trained[str(accumulation)] = trainer.model.state_dict()
    print(f"{type(trainer.accelerator).__module__} {type(trainer.model_wrapped).__module__}", flush=True)
if trainer.accelerator.is_main_process:
    torch.save(trained, sys.argv[1])
"""

ACCELERATE = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
trained = {}
for shuffle in (False, True):
    set_seed(42)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4, shuffle=shuffle)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(batch), targets))
                optimizer.step()
                optimizer.zero_grad()
    trained[f"shuffle={shuffle}"] = accelerator.unwrap_model(model).state_dict()
    print(type(accelerator).__module__, flush=True)
if accelerator.is_main_process:
    torch.save(trained, sys.argv[1])
accelerator.end_training()
"""


def assert_same_bits(ours: Path, theirs: Path) -> None:
    found, expected = (torch.load(path) for path in (ours, theirs))
    assert found.keys() == expected.keys()
    different = [
        f"{training}: {name}"
        for training, state in expected.items()
        for name in state
        if not torch.equal(found[training][name], state[name])
    ]
    assert different == []


# -- Lightning and Fabric ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def over_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Lightning and Fabric train over torch's class."""
    pytest.importorskip("pytorch_lightning")
    folder = tmp_path_factory.mktemp("lightning")
    path = folder / "theirs.pt"
    ran = run_scripts(
        [LIGHTNING],
        ranks=2,
        folder=folder,
        arguments=[str(path), "lightning", "fabric"],
        timeout=150,
        preload=PRELOADED,
    )[LIGHTNING]
    assert ran.error is None
    assert ran.output.count("torch.nn.parallel.distributed") == 12, ran.output
    return path


@pytest.mark.parametrize(
    ("nproc", "ways"),
    [("0", ["lightning"]), ("0", ["fabric"]), ("2", ["lightning", "fabric"])],
    ids=["Lightning starts its ranks", "Fabric starts its ranks", "gradsync run starts them"],
)
def test_lightning_and_fabric_train_to_the_bits_of_torch(
    nproc: str, ways: list[str], over_torch: Path, tmp_path: Path
) -> None:
    """With windows of 1, 2 and 4 micro-batches, of which the last are short, clipping and dropout."""
    ours = tmp_path / "ours.pt"
    command = ["-m", "gradsync", "run", "--nproc", nproc, str(LIGHTNING), str(ours), *ways]
    # This process is forked; the rank that they start themselves is a new interpreter.
    told = run_python(*command, folder=tmp_path, variables=clean_environment(), timeout=150)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("gradsync.parallel.data_parallel") == 6 * len(ways), told.stdout
    assert "optimizer steps on 2 ranks" in told.stderr
    expected = {name: state for name, state in torch.load(over_torch).items() if name.split()[0] in ways}
    theirs = tmp_path / "theirs.pt"
    torch.save(expected, theirs)
    assert_same_bits(ours, theirs)


# -- the Trainer of Transformers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer_over_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return by_itself(
        TRAINER, tmp_path_factory.mktemp("trainer"), "accelerate.accelerator torch.nn.parallel.distributed"
    )


def by_itself(text: str, folder: Path, words: str) -> Path:
    """What a script trains on two ranks, without gradsync."""
    script, path = folder / "script.py", folder / "theirs.pt"
    script.write_text(text)
    ran = run_scripts([script], ranks=2, folder=folder, arguments=[str(path)], timeout=150)[script]
    assert ran.error is None
    assert ran.output.count(words) == 4, ran.output
    return path


def packages_from(way: str, folder: Path) -> dict[str, Any]:
    """A Python that has our packages from another one's folder, and what it needs in its environment."""
    packages = [each for each in sys.path if each.endswith("site-packages")]
    source = str(ROOT / "src")
    if way == "PYTHONPATH":
        base: str = sys._base_executable  # type: ignore[attr-defined]
        return {"python": base, "PYTHONPATH": os.pathsep.join([source, *packages])}
    venv.create(folder / "env", symlinks=True)
    (own,) = (folder / "env").glob("lib/python*/site-packages")
    (own / "others.pth").write_text("\n".join([source, *packages]))
    return {"python": str(folder / "env" / "bin" / "python")}


@pytest.mark.parametrize("way", ["venv", "PYTHONPATH", ".pth"])
def test_a_trainer_trains_to_the_bits_of_torch_wherever_its_packages_are(
    way: str, trainer_over_torch: Path, tmp_path: Path
) -> None:
    """It has Accelerate's own class, which wraps its model in gradsync's."""
    (tmp_path / "script.py").write_text(TRAINER)
    command = ["--nproc", "2", "script.py", "ours.pt"]
    if way == "venv":
        told = run_python("-m", "gradsync", "run", *command, folder=tmp_path, timeout=150)
    else:
        told = in_new_interpreters(*command, folder=tmp_path, **packages_from(way, tmp_path))
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("accelerate.accelerator gradsync.parallel.data_parallel") == 4, told.stdout
    assert "8 optimizer steps on 2 ranks" in told.stderr
    assert_same_bits(tmp_path / "ours.pt", trainer_over_torch)


# -- Accelerate -------------------------------------------------------------------------------------------------------


def test_an_accelerate_script_trains_to_the_bits_of_accelerate_shuffled_and_not(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    theirs = by_itself(ACCELERATE, tmp_path, "accelerate.accelerator")
    told = run_python("-m", "gradsync", "run", "--nproc", "2", "script.py", "ours.pt", folder=tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("gradsync.accelerator.accelerator") == 4, told.stdout
    assert "16 optimizer steps on 2 ranks" in told.stderr
    assert_same_bits(tmp_path / "ours.pt", theirs)
