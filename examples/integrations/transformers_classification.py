"""A classifier with the Trainer of transformers: evaluation with a metric, checkpoints, the best one, TensorBoard.

    torchrun --nproc-per-node 2 examples/integrations/transformers_classification.py
    torchrun --nproc-per-node 2 examples/integrations/transformers_classification.py --stock
    torchrun --nproc-per-node 2 examples/integrations/transformers_classification.py --resume

The number of samples does not divide by that of ranks times the batch.
"""

import argparse
from typing import Any

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import gradsync.transformers

parser = argparse.ArgumentParser()
parser.add_argument("--stock", action="store_true", help="train with torch's DistributedDataParallel")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--stop-after", type=int, help="end after this epoch, as if the run had been cut short")
parser.add_argument("--folder", default="classification")
parser.add_argument("--report-to", nargs="*", default=[])
parser.add_argument("--save", help="write the trained parameters and the log to this file")


def samples(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Whether small numbers are more frequent than large ones."""
    tokens = torch.randint(0, 40, (number, 9), generator=torch.Generator().manual_seed(seed))
    labels = ((tokens < 20).sum(dim=1) > 4).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    chosen = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((chosen == prediction.label_ids).mean())}


class StopAfter(TrainerCallback):
    """Ends a run whose schedule is longer."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.epoch >= self._epoch


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=40, **sizes))
    arguments = TrainingArguments(
        output_dir=options.folder,
        use_cpu=True,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.01,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=options.report_to,
        disable_tqdm=True,
    )
    data = {"train_dataset": samples(101, seed=1), "eval_dataset": samples(37, seed=2)}
    trainer = Trainer(model, arguments, compute_metrics=accuracy, **data)
    # BERT's loss is the mean of its batch. Since its forward takes any keyword, the Trainer believes it divides by
    # num_items_in_batch, and multiplies it by the number of ranks.
    trainer.model_accepts_loss_kwargs = False
    if options.stop_after:
        trainer.add_callback(StopAfter(options.stop_after))
    if not options.stock:
        gradsync.transformers.use(trainer, on_bad_step="skip")
    trainer.train(resume_from_checkpoint=options.resume or None)
    if options.save and trainer.is_world_process_zero():
        torch.save({"parameters": model.state_dict(), "log": trainer.state.log_history}, options.save)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
