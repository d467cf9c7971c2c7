"""The settings of a training run. Checked before anything is opened."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradsync.accelerator.optimizer import Overlap, Overlapping
from gradsync.base.errors import ConfigurationError
from gradsync.core.reduction import reduction_by_name
from gradsync.core.window.skip_vote import ON_BAD_STEP, OnBadStep

__all__ = ["Precision", "TrainSettings", "option_of"]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]

AT_LEAST_1 = (
    *("micro_batch", "grad_accum", "sequence_length", "checkpoint_every", "keep", "validate_every", "steps"),
    *("replica_check", "min_ranks"),
)
# What is expected, and of which settings; None is always allowed.
RULES: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "a whole number of at least 1": (lambda value: value >= 1, AT_LEAST_1),
    "a whole number of at least 0": (lambda value: value >= 0, ("warmup",)),
    "a finite number greater than 0": (
        lambda value: 0 < value < math.inf,
        ("learning_rate", "clip", "epochs", "bucket_mb"),
    ),
    "a finite number of at least 0": (lambda value: 0 <= value < math.inf, ("weight_decay",)),
    "a whole number of at most 62 bits": (lambda value: abs(value) < 1 << 62, ("seed",)),
    f"one of {', '.join(get_args(Precision))}": (get_args(Precision).__contains__, ("precision",)),
    f"one of {', '.join(get_args(Overlap))}": (get_args(Overlap).__contains__, ("overlap",)),
    f"one of {', '.join(ON_BAD_STEP)}": (ON_BAD_STEP.__contains__, ("on_bad_step",)),
}


# Settings whose option has another name.
OPTIONS = {"micro_batch": "--batch", "sequence_length": "--length", "learning_rate": "--lr"}
# Of --reduction: not a reduction of gradients.
LOCAL = "local"


def option_of(name: str) -> str:
    """What a user of ``gradsync train`` calls a setting."""
    return OPTIONS.get(name, f"--{name.replace('_', '-')}")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One run. ``steps`` are optimizer steps; ``epochs`` may be given instead."""

    model: str = "tiny"
    data: str = "stdlib"
    tokenizer: str | None = None
    micro_batch: int = 8
    grad_accum: int = 4
    sequence_length: int = 128
    steps: int | None = None
    epochs: float | None = None
    learning_rate: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Precision = "fp32"
    seed: int = 0
    bucket_mb: float | None = None
    reduction: str = "mean"
    shard_optimizer: bool = False
    overlap: Overlap | None = None
    on_bad_step: OnBadStep | None = None
    replica_check: int | None = None
    elastic: bool = False
    min_ranks: int = 1
    run_folder: Path = Path("runs/train")
    checkpoint_every: int = 100
    keep: int = 2
    resume: bool = False
    validate_every: int = 50
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for expected, (holds, names) in RULES.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise ConfigurationError(f"{option_of(name)} must be {expected}, got {value!r}")
        self._check_reduction()
        self._check_elastic()
        try:
            Overlapping(shards=self.shard_optimizer, overlap=self.overlap)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"--shard-optimizer and --overlap {self.overlap} exclude each other: new parameters of a sharded "
                "optimizer are gathered behind the next forward. Leave one of them out"
            ) from error
        if self.steps is not None and self.epochs is not None:
            raise ConfigurationError(f"give --steps ({self.steps}) or --epochs ({self.epochs}), not both")

    def _check_reduction(self) -> None:
        if self.local_steps is None:
            try:
                reduction_by_name(self.reduction)
            except ConfigurationError as error:
                raise ConfigurationError(f"--reduction {LOCAL}:STEPS, or else {error}") from None
        elif self.shard_optimizer or self.overlap not in (None, "backward"):
            other = "--shard-optimizer" if self.shard_optimizer else f"--overlap {self.overlap}"
            raise ConfigurationError(
                f"--reduction {self.reduction} and {other} exclude each other: who steps locally has no means to wait "
                "for, and needs the whole state of the optimizer"
            )

    def _check_elastic(self) -> None:
        wrong = [
            *(["--shard-optimizer"] if self.shard_optimizer else []),
            *([f"--overlap {self.overlap}"] if self.overlap not in (None, "backward") else []),
            *([f"--reduction {self.reduction}"] if self.local_steps is not None else []),
        ]
        if self.elastic and wrong:
            raise ConfigurationError(
                f"--elastic and {wrong[0]} exclude each other: a rank that is lost would take something along that the "
                "others have not got"
            )
        if not self.elastic and self.min_ranks != 1:
            raise ConfigurationError(
                f"--min-ranks {self.min_ranks} says when --elastic ranks go on; without --elastic all are needed"
            )

    @property
    def local_steps(self) -> int | None:
        """How many steps of its own a rank takes between meetings; None where gradients are averaged in every one."""
        kind, _, number = self.reduction.partition(":")
        if kind != LOCAL:
            return None
        if not number.isdecimal() or int(number) < 1:
            raise ConfigurationError(f"--reduction {LOCAL}:STEPS needs a number of steps, got {self.reduction!r}")
        return int(number)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for config.json and checkpoints."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
