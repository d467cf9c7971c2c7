"""Small trainings by the Trainer of transformers, stock and with gradsync, on two ranks. Prints what came of each.

    torchrun --nproc-per-node 2 -m tests.trainer_script OUT

Rank R writes its results to OUT.R, as JSON: the sum of the parameters by the name of a training, or an error.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import gradsync.transformers
from gradsync.errors import MisuseError


class Tokens(nn.Module):
    """A loss over tokens, of which those with label -100 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> Any:
        output = self.layers(x)
        total = nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)}


class Unfreeze(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            model.layers[0].requires_grad_(True)


def samples(*, empty: bool) -> list[dict[str, torch.Tensor]]:
    """With ``empty``, samples that rank 1 takes have nothing to predict."""
    chance = torch.Generator().manual_seed(4)
    made = []
    for number in range(32):
        labels = torch.randint(0, 12, (6,), generator=chance)
        labels[: 6 if empty and number // 2 % 2 == 1 else number % 5] = -100
        made.append({"x": torch.randint(0, 12, (6,), generator=chance), "labels": labels})
    return made


def trained(
    ours: bool, *, empty: bool = False, evaluate: bool = False, frozen: bool = False, times: int = 1, **options: Any
) -> float:
    torch.manual_seed(0)
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(
        output_dir=".",
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        train_sampling_strategy="sequential",
        **quiet | options,
    )
    data = samples(empty=empty)
    trainer = Trainer(Tokens(), arguments, train_dataset=data, eval_dataset=data)
    if ours:
        gradsync.transformers.use(trainer)
    if frozen:
        # The optimizer has all parameters.
        trainer.create_optimizer()
        trainer.add_callback(Unfreeze())
        trainer.model.layers[0].requires_grad_(False)
    if evaluate:
        trainer.evaluate()
    for _ in range(times):
        trainer.train()
    return sum(float(parameter.double().sum()) for parameter in trainer.model.parameters())


def too_late() -> str:
    arguments = TrainingArguments(output_dir=".", use_cpu=True, max_steps=1, report_to=[], save_strategy="no")
    trainer = Trainer(Tokens(), arguments, train_dataset=samples(empty=False))
    trainer.train()
    try:
        gradsync.transformers.use(trainer)
    except MisuseError as error:
        return str(error)
    return "nothing"


def main(out: str) -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    found: dict[str, Any] = {"too late": too_late()}
    for ours in (False, True):
        name = "ours" if ours else "stock"
        found[f"{name}, plain"] = trained(ours)
        found[f"{name}, twice"] = trained(ours, times=2)
        found[f"{name}, bf16"] = trained(ours, bf16=True)
        found[f"{name}, evaluated first"] = trained(ours, evaluate=True)
        found[f"{name}, unfrozen"] = trained(ours, frozen=True, ddp_find_unused_parameters=False)
        found[f"{name}, rank 1 has no tokens"] = trained(ours, empty=True)
    found["ours, rank 1 has no tokens and says so"] = trained(True, empty=True, average_tokens_across_devices=False)
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
