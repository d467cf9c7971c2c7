"""A regression by Ray Train: a loader that is split over the workers, reports, checkpoints, and failures.

    python examples/integrations/ray_regression.py
    python examples/integrations/ray_regression.py --stock
    python examples/integrations/ray_regression.py --kill

With ``--kill`` rank 1 is killed in the third epoch. Ray starts the workers again, from the last checkpoint.
``RAY_ADDRESS`` names the cluster; without it, Ray starts one on this machine.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync.tools.integrations.ray import GradsyncConfig

parser = argparse.ArgumentParser()
parser.add_argument("--stock", action="store_true", help="train with torch's DistributedDataParallel")
parser.add_argument("--kill", action="store_true", help="kill rank 1 once")
parser.add_argument("--folder", default="ray-results")
parser.add_argument("--save", help="write the trained parameters and the reports to this file")

EPOCHS = 4


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    context = ray.train.get_context()
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    loader = prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
    model = prepare_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for number, (batch, targets) in enumerate(loader):
            if config["kill"] and first == 0 and epoch == 2 and number == 1 and context.get_world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = nn.functional.mse_loss(model(batch), targets)
            try:
                loss.backward()
            except gradsync.PeerFailedError as error:
                (Path(config["folder"]) / "named.txt").write_text(str(error))
                raise
            optimizer.step()
            optimizer.zero_grad()
        metrics = {
            "epoch": epoch,
            "loss": loss.item(),
            "ranks": context.get_world_size(),
            "wrapper": type(model).__module__,
        }
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder) / "state.pt")
            saved = ray.train.Checkpoint.from_directory(folder) if context.get_world_rank() == 0 else None
            ray.train.report(metrics, checkpoint=saved)


def main() -> None:
    options = parser.parse_args()
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={"kill": options.kill, "folder": str(folder)},
        torch_config=None if options.stock else GradsyncConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            storage_path=str(folder), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    with result.checkpoint.as_directory() as last:
        state = torch.load(Path(last) / "state.pt")
    print(result.metrics)
    if options.save:
        torch.save({"parameters": state["model"], "metrics": result.metrics_dataframe.to_dict("records")}, options.save)


if __name__ == "__main__":
    main()
