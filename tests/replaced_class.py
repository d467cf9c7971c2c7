"""Trains through other libraries, once over torch's DistributedDataParallel and once with gradsync's in its place.

    torchrun --nproc-per-node 2 -m tests.replaced_class

The ranks train together first, then each as the only rank of a world of its own. Each prints a line of JSON: for every
way to train, whether the parameters came out the same bit for bit.
"""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel

warnings.simplefilter("ignore")

State = dict[str, torch.Tensor]
TORCHS = nn.parallel.DistributedDataParallel


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """gradsync's class by torch's names, as users do it."""
    from lightning_fabric.strategies import ddp as fabrics

    places: list[Any] = [nn.parallel, nn.parallel.distributed, fabrics]
    for place in places:
        place.DistributedDataParallel = DistributedDataParallel
    try:
        yield
    finally:
        for place in places:
            place.DistributedDataParallel = TORCHS


class Regression(nn.Module):
    """What a Trainer asks of a model: the loss comes first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 4, generator=generator)
    return [{"x": row, "labels": row.sum()[None].sin()} for row in x]


def by_transformers(accumulation: int) -> tuple[State, str]:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
            learning_rate=0.05,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        model = Regression()
        trainer = Trainer(model=model, args=arguments, train_dataset=samples(32))
        trainer.train()
    return model.state_dict(), type(trainer.model_wrapped).__module__


def by_fabric(accumulation: int) -> tuple[State, str]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    model = Regression()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(24 * accumulation), batch_size=2))
    for number, batch in enumerate(loader, start=1):
        synchronizes = number % accumulation == 0
        with fabric.no_backward_sync(wrapped, enabled=not synchronizes):
            fabric.backward(wrapped(**batch)["loss"] / accumulation)
        if synchronizes:
            fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), type(wrapped._forward_module).__module__


def compare(train: Callable[[int], tuple[State, str]], accumulation: int) -> str:
    """Empty if all is well."""
    theirs, by_torch = train(accumulation)
    with replaced():
        ours, by_gradsync = train(accumulation)
    if (by_torch, by_gradsync) != (TORCHS.__module__, DistributedDataParallel.__module__):
        return f"wrapped by {by_torch} and {by_gradsync}"
    different = [name for name in theirs if not torch.equal(theirs[name], ours[name])]
    if not different and torch.equal(ours["layers.0.weight"], Regression().layers[0].weight):
        return "nothing was trained"
    return f"different: {', '.join(different)}" if different else ""


def ignore_by_name() -> str:
    model = Regression()
    with replaced():
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layers.0.bias"])
        wrapper = nn.parallel.DistributedDataParallel(model)
    return "" if wrapper.parameters_to_ignore == {"layers.0.bias"} else "not ignored"


def all_ways() -> dict[str, str]:
    told = {
        f"{train.__name__}, accumulation {accumulation}": compare(train, accumulation)
        for train in (by_transformers, by_fabric)
        for accumulation in (1, 4)
    }
    return {**told, "ignored names": ignore_by_name()}


def main() -> None:
    dist.init_process_group("gloo")
    told = {2: all_ways()}
    dist.destroy_process_group()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told[1] = all_ways()
    dist.destroy_process_group()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
