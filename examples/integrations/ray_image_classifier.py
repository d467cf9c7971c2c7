"""A convolutional network by Ray Train: BatchNorm, accumulation with ``no_sync``, an accuracy over all workers.

    python examples/integrations/ray_image_classifier.py
    python examples/integrations/ray_image_classifier.py --stock

Images are noise with a bright stripe, across or down, and the network tells which.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsync.tools.integrations.ray import GradsyncConfig

parser = argparse.ArgumentParser()
parser.add_argument("--stock", action="store_true", help="train with torch's DistributedDataParallel")
parser.add_argument("--folder", default="ray-results")
parser.add_argument("--save", help="write the trained parameters and the reports to this file")

ACCUMULATE = 2


def stripes(number: int, seed: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(seed)
    images = torch.rand(number, 1, 8, 8, generator=chance)
    labels = torch.randint(0, 2, (number,), generator=chance)
    for image, label, place in zip(images, labels, torch.randint(0, 8, (number,), generator=chance), strict=True):
        image[0].select(int(label), int(place)).add_(1.0)
    return TensorDataset(images, labels)


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    loader = prepare_data_loader(DataLoader(stripes(96, seed=1), batch_size=8, shuffle=True))
    held_out = prepare_data_loader(DataLoader(stripes(32, seed=2), batch_size=8))
    features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model = prepare_model(nn.Sequential(features, nn.Linear(8 * 6 * 6, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        model.train()
        for number, (images, labels) in enumerate(loader, start=1):
            ends = number % ACCUMULATE == 0
            with contextlib.nullcontext() if ends else model.no_sync():
                loss = nn.functional.cross_entropy(model(images), labels)
                (loss / ACCUMULATE).backward()
            if ends:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for images, labels in held_out:
                right += (model(images).argmax(dim=1) == labels).sum()
        dist.all_reduce(right)
        metrics = {
            "epoch": epoch,
            "loss": loss.item(),
            "accuracy": right.item() / 32,
            "rate": scheduler.get_last_lr()[0],
        }
        with tempfile.TemporaryDirectory() as folder:
            first = ray.train.get_context().get_world_rank() == 0
            torch.save({"model": model.module.state_dict()}, Path(folder) / "state.pt")
            saved = ray.train.Checkpoint.from_directory(folder) if first else None
            ray.train.report(metrics | {"wrapper": type(model).__module__}, checkpoint=saved)


def main() -> None:
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={},
        torch_config=None if options.stock else GradsyncConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(storage_path=str(Path(options.folder).resolve())),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as last:
        state = torch.load(Path(last) / "state.pt")
    print(result.metrics)
    if options.save:
        torch.save({"parameters": state["model"], "metrics": result.metrics_dataframe.to_dict("records")}, options.save)


if __name__ == "__main__":
    main()
