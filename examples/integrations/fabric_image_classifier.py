"""Fabric's image classifier: convolutions with BatchNorm and dropout, evaluated after every epoch.

    python examples/integrations/fabric_image_classifier.py
    python examples/integrations/fabric_image_classifier.py --strategy ddp

Fabric starts the second rank. The folder gets metrics.csv and last.ckpt.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import gradsync.lightning  # noqa: F401  registers the strategy

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="gradsync")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
parser.add_argument("--folder", type=Path, default=Path("runs/image-classifier"))


def network() -> nn.Module:
    convolutions = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Dropout(0.25), nn.Flatten(), nn.Linear(32, 4), nn.LogSoftmax(1))


def images(number: int, seed: int) -> TensorDataset:
    """Noise with a bright corner; the class is the corner."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(number, 1, 8, 8, generator=generator)
    corners = torch.randint(0, 4, (number,), generator=generator)
    for image, corner in zip(pixels, corners.tolist(), strict=True):
        image[0, corner // 2 * 4 :, corner % 2 * 4 :][:4, :4] += 0.5
    return TensorDataset(pixels, corners)


def evaluate(fabric: Fabric, model: Any, batches: Any) -> dict[str, float]:
    accuracy = MulticlassAccuracy(num_classes=4).to(fabric.device)
    losses = []
    model.eval()
    with torch.no_grad():
        for pixels, corners in batches:
            output = model(pixels)
            losses.append(nn.functional.nll_loss(output, corners))
            accuracy(output, corners)
    model.train()
    return {"test_loss": fabric.all_reduce(torch.stack(losses).mean()).item(), "accuracy": accuracy.compute().item()}


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    logger = CSVLogger(options.folder, name="", version="", flush_logs_every_n_steps=1)
    fabric = Fabric(strategy=options.strategy, accelerator="cpu", devices=2, loggers=logger)
    fabric.launch()
    seed_everything(1)
    plain = network()
    model, optimizer = fabric.setup(plain, torch.optim.Adadelta(plain.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    # 7 batches per rank, so that the last window of an epoch is short.
    training = fabric.setup_dataloaders(DataLoader(images(7 * 2 * 16, seed=2), batch_size=16, shuffle=True))
    test = fabric.setup_dataloaders(DataLoader(images(96, seed=3), batch_size=16))
    step = 0
    for _ in range(4):
        for number, (pixels, corners) in enumerate(training, start=1):
            is_last = number % options.accumulate == 0 or number == len(training)
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.nll_loss(model(pixels), corners)
                fabric.backward(loss / options.accumulate)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                fabric.log_dict({"train_loss": loss.item(), "lr": scheduler.get_last_lr()[0]}, step)
        scheduler.step()
        fabric.log_dict(evaluate(fabric, model, test), step)
    fabric.save(options.folder / "last.ckpt", {"model": model, "optimizer": optimizer, "step": step})


if __name__ == "__main__":
    main()
