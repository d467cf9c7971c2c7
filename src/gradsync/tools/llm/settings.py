"""The settings of a training run, each declared once: its type and default, its option, and the values it accepts."""

# ruff: noqa: RUF009 (what is called in the class makes its fields)

import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from gradsync.accelerator.optimizer import Overlap, Overlapping
from gradsync.base.errors import ConfigurationError
from gradsync.core.reduction import reduction_by_name
from gradsync.core.window.skip_vote import ON_BAD_STEP, OnBadStep
from gradsync.optim.local_steps import is_local_steps, local_steps_by_name
from gradsync.tools.metrics.choose import SINKS, check_sinks

__all__ = ["HEADINGS", "RANKS", "TrainOption", "TrainSettings", "option_of"]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]

# Headings of the options in the help.
HEADINGS = ("Model and data", "Batches and steps", "Optimization", "Ranks and communication", "Run folder")

# What a value must be, in words and as a test. None is always accepted.
Rule = tuple[str, Callable[[Any], bool]]
ANYTHING: Rule = ("anything", lambda value: True)
COUNT: Rule = ("a whole number of at least 1", lambda value: value >= 1)
WHOLE: Rule = ("a whole number of at least 0", lambda value: value >= 0)
POSITIVE: Rule = ("a finite number greater than 0", lambda value: 0 < value < math.inf)
NOT_NEGATIVE: Rule = ("a finite number of at least 0", lambda value: 0 <= value < math.inf)
SEED: Rule = ("a whole number of at most 62 bits", lambda value: abs(value) < 1 << 62)


def _one_of(values: tuple[str, ...]) -> Rule:
    return f"one of {', '.join(values)}", values.__contains__


METRICS: Rule = (f"names of {', '.join(SINKS)} with commas between them, each with :ARGUMENT or without", check_sinks)
PRECISION, OVERLAP, BAD_STEP = _one_of(get_args(Precision)), _one_of(get_args(Overlap)), _one_of(ON_BAD_STEP)


@dataclass(frozen=True, kw_only=True)
class TrainOption:
    """How a setting is given on the command line. Without a ``name`` the option is called like the setting."""

    heading: str
    help: str
    rule: Rule
    name: str


def setting(heading: str, default: Any, text: str, rule: Rule = ANYTHING, name: str = "") -> Any:
    """A field of a settings class that is also an option."""
    return field(default=default, metadata={"option": TrainOption(heading=heading, help=text, rule=rule, name=name)})


DATA, BATCH, LEARNING, RANKS, FOLDER = (partial(setting, heading) for heading in HEADINGS)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run. ``steps`` are optimizer steps; ``epochs`` may be given instead."""

    model: str = DATA("tiny", "nano, tiny, mini, gpt2, hf:NAME, or a folder.")
    data: str = DATA("stdlib", "stdlib, a text file, a folder, or hf:NAME.")
    tokenizer: str | None = DATA(None, "A Hugging Face tokenizer. Default: bytes.")
    micro_batch: int = BATCH(8, "Sequences per micro-batch and rank.", COUNT, "--batch")
    grad_accum: int = BATCH(4, "Micro-batches per step and rank.", COUNT)
    sequence_length: int = BATCH(128, "Tokens per sequence.", COUNT, "--length")
    steps: int | None = BATCH(None, "Optimizer steps. Default: 130, unless --epochs is given.", COUNT)
    epochs: float | None = BATCH(None, "Passes over the data (instead of --steps).", POSITIVE)
    learning_rate: float = LEARNING(1e-3, "Peak learning rate, after the warm-up.", POSITIVE, "--lr")
    warmup: int = LEARNING(20, "Steps of the warm-up; a cosine decay follows.", WHOLE)
    weight_decay: float = LEARNING(0.1, "Weight decay (AdamW).", NOT_NEGATIVE)
    clip: float = LEARNING(1.0, "Maximum norm of the gradient.", POSITIVE)
    precision: Precision = LEARNING("fp32", "fp32, bf16, fp16 or fp64.", PRECISION)
    seed: int = LEARNING(0, "Random seed of weights and data order.", SEED)
    elastic: bool = RANKS(False, "Continue when ranks are lost, and let new ranks join (needs torchft).")
    min_ranks: int = RANKS(1, "With --elastic: minimum number of ranks; with fewer, training waits.", COUNT)
    bucket_mb: float | None = RANKS(None, "Bucket size in MiB; measured without it.", POSITIVE)
    reduction: str = RANKS(
        "mean",
        "How gradients are sent: mean, bf16, fp16, int8, int4, int2, sign, low-rank:4, top-k:0.01, auto, local:16, "
        "diloco:32, diloco:32:int2.",
    )
    shard_optimizer: bool = RANKS(
        False, "Divide the update among ranks, and gather parameters during the next forward."
    )
    overlap: Overlap | None = RANKS(
        None,
        "Overlap communication with backward, next-forward, or auto (whichever is faster).",
        OVERLAP,
    )
    on_bad_step: OnBadStep | None = RANKS(
        None, "What to do if a rank's gradients are not finite: raise, skip or drop-rank.", BAD_STEP
    )
    replica_check: int | None = RANKS(
        None, "Steps between comparisons of the replicas; a rank that differs is named.", COUNT
    )
    run_folder: Path = FOLDER(MISSING, "Folder for metrics, checkpoints and the report. Default: runs/TIME.")
    resume: bool = FOLDER(False, "Continue from the newest checkpoint in --run-folder.")
    checkpoint_every: int = FOLDER(100, "Steps between checkpoints.", COUNT)
    keep: int = FOLDER(2, "Number of checkpoints to keep.", COUNT)
    validate_every: int = FOLDER(50, "Steps between validations.", COUNT)
    metrics: str | None = FOLDER(None, f"Also write metrics to these, with commas: {', '.join(SINKS)}.", METRICS)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, (expected, accepts) = getattr(self, each.name), each.metadata["option"].rule
            if value is not None and not accepts(value):
                raise ConfigurationError(f"{option_of(each.name)} must be {expected}, got {value!r}")
        self._check_reduction()
        self._check_together()
        if self.steps is not None and self.epochs is not None:
            raise ConfigurationError(f"give --steps ({self.steps}) or --epochs ({self.epochs}), not both")

    def _check_reduction(self) -> None:
        try:
            (reduction_by_name if self.local_steps is None else local_steps_by_name)(self.reduction)
        except ConfigurationError as error:
            others = "" if self.local_steps else "local:STEPS, diloco:STEPS, or else "
            raise ConfigurationError(f"--reduction {others}{error}") from None

    def _check_together(self) -> None:
        """Refuse settings that exclude each other."""
        overlap, local = f"--overlap {self.overlap}", f"--reduction {self.reduction}"
        found = ["--shard-optimizer"] if self.shard_optimizer else []
        found += [overlap] if self.overlap not in (None, "backward") else []
        if self.local_steps is not None and found:
            raise ConfigurationError(
                f"{local} and {found[0]} exclude each other: who steps locally has no means to wait for, and needs the "
                "whole state of the optimizer"
            )
        found += [local] if self.local_steps is not None else []
        if self.elastic and found:
            raise ConfigurationError(
                f"--elastic and {found[0]} exclude each other: a rank that is lost would take something along that the "
                "others have not got"
            )
        try:
            Overlapping(shards=self.shard_optimizer, overlap=self.overlap)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"--shard-optimizer and {overlap} exclude each other: new parameters of a sharded optimizer are "
                "gathered behind the next forward. Leave one of them out"
            ) from error
        if not self.elastic and self.min_ranks != 1:
            raise ConfigurationError(
                f"--min-ranks {self.min_ranks} says when --elastic ranks go on; without --elastic all are needed"
            )

    @property
    def local_steps(self) -> str | None:
        """The local steps that ``reduction`` names; None where gradients are averaged in every step."""
        return self.reduction if is_local_steps(self.reduction) else None

    def as_json(self) -> dict[str, Any]:
        """Plain values, for config.json and checkpoints."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def option_of(name: str, settings: type = TrainSettings) -> str:
    """What a user of ``gradsync train`` calls a setting."""
    own = {each.name: each.metadata["option"].name for each in fields(settings)}
    return own[name] or f"--{name.replace('_', '-')}"
