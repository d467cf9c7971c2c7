"""Fabric's language model: Lightning's Transformer, clipped gradients, a validation after every epoch.

    python examples/integrations/fabric_language_model.py
    torchrun --nproc-per-node 2 examples/integrations/fabric_language_model.py --strategy ddp

Without torchrun, Fabric starts the second rank. The folder gets metrics.csv and last.ckpt.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.loggers import CSVLogger
from lightning.pytorch.demos import Transformer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync.lightning  # noqa: F401  registers the strategy

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="gradsync")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
parser.add_argument("--folder", type=Path, default=Path("runs/fabric-language-model"))
VOCABULARY = 20


def text(number: int, seed: int) -> TensorDataset:
    """Each token is the one before it plus 1, 2 or 3."""
    steps = torch.randint(1, 4, (number, 9), generator=torch.Generator().manual_seed(seed))
    tokens = steps.cumsum(1) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.nll_loss(model(inputs, targets), targets.flatten())


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    logger = CSVLogger(options.folder, name="", version="", flush_logs_every_n_steps=1)
    fabric = Fabric(strategy=options.strategy, accelerator="cpu", devices=2, loggers=logger)
    fabric.launch()
    seed_everything(1)
    with fabric.init_module():
        plain = Transformer(vocab_size=VOCABULARY, ninp=16, nhid=16, nlayers=1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    # 7 batches per rank, so that the last window of an epoch is short.
    training = fabric.setup_dataloaders(DataLoader(text(7 * 2 * 4, seed=2), batch_size=4, shuffle=True))
    validation = fabric.setup_dataloaders(DataLoader(text(24, seed=3), batch_size=4))
    step = 0
    for _ in range(2):
        for number, batch in enumerate(training, start=1):
            is_last = number % options.accumulate == 0 or number == len(training)
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = loss_of(model, *batch)
                fabric.backward(loss / options.accumulate)
            if is_last:
                norm = fabric.clip_gradients(model, optimizer, max_norm=0.25)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                fabric.log_dict({"train_loss": loss.item(), "norm": norm, "lr": scheduler.get_last_lr()[0]}, step)
        model.eval()
        with torch.no_grad():
            losses = torch.stack([loss_of(model, *batch) for batch in validation])
        model.train()
        fabric.log("val_loss", fabric.all_reduce(losses.mean()).item(), step)
    fabric.save(options.folder / "last.ckpt", {"model": model, "optimizer": optimizer, "step": step})


if __name__ == "__main__":
    main()
