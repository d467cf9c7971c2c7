"""Lightning's introductory example, an autoencoder of images, with gradsync as its strategy.

    python examples/integrations/lightning_autoencoder.py
    python examples/integrations/lightning_autoencoder.py --strategy ddp

Lightning starts the second rank. The folder gets metrics.csv and the checkpoint with the lowest validation loss.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync.lightning  # noqa: F401  registers the strategy

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="gradsync")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
parser.add_argument("--folder", type=Path, default=Path("runs/autoencoder"))


class Autoencoder(L.LightningModule):
    """Compresses an image into three numbers, and restores it from them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8 * 8, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 8 * 8))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        pixels = batch[0].flatten(1)
        return nn.functional.mse_loss(self.decoder(self.encoder(pixels)), pixels)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def images(number: int, seed: int) -> TensorDataset:
    """A bright square at a random place."""
    pixels = torch.zeros(number, 1, 8, 8)
    corners = torch.randint(0, 6, (number, 2), generator=torch.Generator().manual_seed(seed))
    for image, (x, y) in zip(pixels, corners.tolist(), strict=True):
        image[0, x : x + 3, y : y + 3] = 1.0
    return TensorDataset(pixels)


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=3,
        accumulate_grad_batches=options.accumulate,
        log_every_n_steps=1,
        logger=CSVLogger(options.folder, name="", version=""),
        callbacks=[LearningRateMonitor("step"), ModelCheckpoint(options.folder, "best", monitor="val_loss")],
        enable_progress_bar=False,
    )
    # 7 batches per rank, so that the last window of an epoch is short.
    training = DataLoader(images(7 * 2 * 4, seed=2), batch_size=4, shuffle=True)
    trainer.fit(Autoencoder(), training, DataLoader(images(24, seed=3), batch_size=4))


if __name__ == "__main__":
    main()
