"""`save_state` and `load_state`: a run that is interrupted anywhere, also in mid-window, goes on bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsync import Accelerator
from gradsync.errors import ConfigurationError
from tests.on_gpu import computes_on_cpu
from tests.ranks import RankPool, Ranks, ThreadRanks, run_once

pytestmark = pytest.mark.timeout(120)

STEPS = 3


class Counter:
    """Something of the user's own that has a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(46, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :1] - 2 * inputs[:, 1:2])


class Run:
    """A training that can be stopped after any micro-batch."""

    def __init__(self, **options: Any) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=computes_on_cpu(), **options)
        generator = torch.Generator().manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        loader = DataLoader(dataset(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3))
        self.plain = model
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, *, epochs: int, stop_after: int | None = None) -> None:
        for _ in range(epochs):
            for inputs, targets in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(inputs), targets)
                    self.accelerator.backward(loss, weight=len(inputs))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.counter.value += 1
                if self.counter.value == stop_after:
                    return

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.plain.parameters()]


def uninterrupted() -> tuple[list[torch.Tensor], int]:
    run = Run()
    run.train(epochs=2)
    return run.parameters(), run.counter.value


def interrupted(folder: str, stop_after: int) -> tuple[list[torch.Tensor], int]:
    first = Run()
    first.train(epochs=2, stop_after=stop_after)
    first.accelerator.save_state(folder)
    # What happens after saving must not matter.
    first.train(epochs=1, stop_after=stop_after + 2)
    first.accelerator.free_memory()
    second = Run()
    second.accelerator.load_state(folder)
    done = second.counter.value
    per_epoch = len(second.loader)
    second.train(epochs=2 - done // per_epoch)
    return second.parameters(), second.counter.value


@pytest.mark.parametrize("stop_after", [1, 2, 3, 7])
def test_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, stop_after: int) -> None:
    """One, two and three micro-batches of a window of three; and a later one."""
    expected, count = run_once(ranks, uninterrupted)[0]
    for parameters, counted in ranks.run(interrupted, str(tmp_path), stop_after):
        assert counted == count
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, expected, strict=True))


def damaged(folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    run = Run()
    run.train(epochs=1, stop_after=3)
    run.accelerator.save_state(folder)
    good = run.parameters()
    run.train(epochs=1, stop_after=6)
    run.accelerator.save_state(folder)
    if run.accelerator.is_main_process:
        newest = sorted(Path(folder).glob("step-*"))[-1]
        victim = max(newest.iterdir(), key=lambda path: path.stat().st_size)
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    run.accelerator.wait_for_everyone()
    run.accelerator.load_state(folder)
    return run.parameters(), good


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_taken(process_ranks: RankPool, tmp_path: Path) -> None:
    for parameters, good in process_ranks.run(damaged, str(tmp_path)):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, good, strict=True))


def mismatched(folder: str, case: str) -> str:
    run = Run()
    if case == "nothing there":
        with pytest.raises(ConfigurationError) as caught:
            run.accelerator.load_state(folder)
        return str(caught.value)
    run.accelerator.save_state(folder)
    other = Accelerator(cpu=computes_on_cpu())
    other.prepare(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError) as caught:
        other.load_state(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"), [("nothing there", "no checkpoint in"), ("other objects", "has prepared 0")]
)
def test_what_does_not_fit_is_refused(tmp_path: Path, case: str, words: str) -> None:
    for message in ThreadRanks(2).run(mismatched, str(tmp_path), case):
        assert words in message


def test_only_what_has_a_state_can_be_registered() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="state_dict"):
        accelerator.register_for_checkpointing(object())
