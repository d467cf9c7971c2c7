"""Gradient accumulation by Accelerate: ``accumulate()`` decides which backward synchronizes and when optimizers step.

torchrun --nproc-per-node 2 examples/unchanged/accelerate_accumulation.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(192, 6, generator=generator, dtype=torch.float64)
    labels = (inputs[:, :3].sum(1) > 0).long()
    train, test = TensorDataset(inputs[:128], labels[:128]), TensorDataset(inputs[128:], labels[128:])
    order = torch.Generator().manual_seed(11)
    return DataLoader(train, batch_size, shuffle=True, generator=order), DataLoader(test, batch_size)


def training_function(options: argparse.Namespace) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.gradient_accumulation_steps)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(options.batch_size)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    optimizer = AdamW(model.parameters(), lr=0.02)
    total = options.epochs * len(train_dataloader) // options.gradient_accumulation_steps
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / max(1, total)))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(options.epochs):
        model.train()
        for inputs, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right, seen = right + int((predictions == references).sum()), seen + len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.3f}")
    accelerator.wait_for_everyone()
    if options.out and accelerator.is_main_process:
        torch.save({"model": accelerator.unwrap_model(model).state_dict()}, options.out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="")
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
