"""A language model with Lightning's Transformer: a learning rate per step, clipped gradients, a test at the end.

    python examples/integrations/lightning_language_model.py
    torchrun --nproc-per-node 2 examples/integrations/lightning_language_model.py --strategy ddp

Without torchrun, Lightning starts the second rank. The folder gets metrics.csv and last.ckpt.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos import Transformer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync.lightning  # noqa: F401  registers the strategy

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="gradsync")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per optimizer step")
parser.add_argument("--folder", type=Path, default=Path("runs/language-model"))
VOCABULARY = 20


class LanguageModel(L.LightningModule):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=VOCABULARY, ninp=16, nhid=16, nlayers=1)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.nll_loss(self.model(inputs, targets), targets.flatten())

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def text(number: int, seed: int) -> TensorDataset:
    """Each token is the one before it plus 1, 2 or 3."""
    steps = torch.randint(1, 4, (number, 9), generator=torch.Generator().manual_seed(seed))
    tokens = steps.cumsum(1) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    L.seed_everything(1)
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=0.25,
        log_every_n_steps=1,
        logger=CSVLogger(options.folder, name="", version=""),
        callbacks=[LearningRateMonitor("step")],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = LanguageModel()
    # 7 batches per rank, so that the last window of an epoch is short.
    trainer.fit(model, DataLoader(text(7 * 2 * 4, seed=2), batch_size=4, shuffle=True))
    trainer.save_checkpoint(options.folder / "last.ckpt")
    trainer.test(model, DataLoader(text(24, seed=3), batch_size=4), verbose=False)


if __name__ == "__main__":
    main()
