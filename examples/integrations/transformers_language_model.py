"""A causal language model with the Trainer of transformers: samples of different lengths, accumulation, a warm-up.

    torchrun --nproc-per-node 2 examples/integrations/transformers_language_model.py
    torchrun --nproc-per-node 2 examples/integrations/transformers_language_model.py --stock

The windows of one process with ``--accumulate 4`` are those of two with ``--accumulate 2``. Every sample has a
different number of tokens, so means over micro-batches or ranks would not be means over tokens.
"""

import argparse
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gradsync.transformers

parser = argparse.ArgumentParser()
parser.add_argument("--stock", action="store_true", help="train with torch's DistributedDataParallel")
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--own-tokens", action="store_true", help="ranks do not tell each other how many tokens they have")
parser.add_argument("--folder", default="language-model")
parser.add_argument("--save", help="write the trained parameters and the log to this file")


def samples(number: int) -> list[dict[str, list[int]]]:
    """Sequences that count up, from anywhere, in steps of one or two."""
    random.seed(5)
    made = []
    for _ in range(number):
        start, step, length = random.randrange(40), random.randint(1, 2), random.randint(4, 12)
        made.append({"input_ids": [(start + step * place) % 60 for place in range(length)]})
    return made


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sample; what was padded is not predicted."""
    longest = max(len(sample["input_ids"]) for sample in batch)
    tokens = torch.zeros(len(batch), longest, dtype=torch.long)
    real = torch.zeros_like(tokens)
    for number, sample in enumerate(batch):
        length = len(sample["input_ids"])
        tokens[number, :length] = torch.tensor(sample["input_ids"])
        real[number, :length] = 1
    return {"input_ids": tokens, "attention_mask": real, "labels": tokens.masked_fill(real == 0, -100)}


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes))
    arguments = TrainingArguments(
        output_dir=options.folder,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=options.accumulate,
        average_tokens_across_devices=not options.own_tokens,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=samples(72), data_collator=collate)
    if not options.stock:
        gradsync.transformers.use(trainer)
    trainer.train()
    if options.save and trainer.is_world_process_zero():
        torch.save({"parameters": model.state_dict(), "log": trainer.state.log_history}, options.save)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
