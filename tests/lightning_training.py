"""Trains by Lightning and by Fabric, knowing nothing of gradsync: a script for ``gradsync run``, and for Python alone.

    python tests/lightning_training.py OUT lightning fabric

Either starts rank 1 by itself, unless a launcher has. Rank 0 writes the parameters of every training to OUT, and each
rank prints which class has wrapped its models.
"""

import logging
import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
RANKS = 2
# Of 7 batches a rank, so that the last window is short.
ACCUMULATIONS = (1, 2, 4)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def loader() -> DataLoader[Any]:
    inputs = torch.randn(7 * RANKS * 3, 4, generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=3, shuffle=True)


def by_lightning(accumulation: int) -> tuple[int, nn.Module, str]:
    import pytorch_lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Regression(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

    model = Regression()
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    wrappers: list[str] = []
    prepare = trainer.strategy._setup_model
    trainer.strategy._setup_model = lambda module: (
        wrappers.append(type(wrapped := prepare(module)).__module__) or wrapped
    )
    trainer.fit(model, loader())
    return trainer.global_rank, model.network, *wrappers


def by_fabric(accumulation: int) -> tuple[int, nn.Module, str]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=RANKS)
    fabric.launch()
    plain = network()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.02))
    batches = fabric.setup_dataloaders(loader())
    for number, (inputs, targets) in enumerate(batches, start=1):
        ends = number % accumulation == 0 or number == len(batches)
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(nn.functional.mse_loss(model(inputs), targets) / accumulation)
        if ends:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return fabric.global_rank, plain, type(model._forward_module).__module__


def main(out: str, *ways: str) -> None:
    trained = {}
    for way in ways:
        for accumulation in ACCUMULATIONS:
            rank, model, wrapper = {"lightning": by_lightning, "fabric": by_fabric}[way](accumulation)
            trained[f"{way} {accumulation}"] = model.state_dict()
            print(f"{way} {accumulation} on rank {rank}: {wrapper}", flush=True)
    if rank == 0:
        torch.save(trained, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
