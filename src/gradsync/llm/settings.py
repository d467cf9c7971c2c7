"""What a training run is asked to do. Checked before anything is opened."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradsync.errors import ConfigurationError

__all__ = ["Precision", "TrainSettings", "WireReduction"]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
WireReduction = Literal["mean", "bf16", "fp16"]


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
    reduction: WireReduction = "mean"
    run_folder: Path = Path("runs/train")
    checkpoint_every: int = 100
    keep: int = 2
    resume: bool = False
    validate_every: int = 50
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch", "grad_accum", "sequence_length", "checkpoint_every", "keep", "validate_every"):
            _require(self, name, "a whole number of at least 1", getattr(self, name) >= 1)
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            _require(self, name, "a finite number greater than 0", math.isfinite(value) and value > 0)
        _require(self, "warmup", "a whole number of at least 0", self.warmup >= 0)
        _require(self, "weight_decay", "a number of at least 0", self.weight_decay >= 0)
        _require(self, "steps", "a whole number of at least 1", self.steps is None or self.steps >= 1)
        _require(self, "epochs", "a number greater than 0", self.epochs is None or self.epochs > 0)
        _require(self, "bucket_mb", "a number greater than 0", self.bucket_mb is None or self.bucket_mb > 0)
        _require(self, "precision", f"one of {', '.join(get_args(Precision))}", self.precision in get_args(Precision))
        _require(
            self, "reduction", f"one of {', '.join(get_args(WireReduction))}", self.reduction in get_args(WireReduction)
        )
        if self.steps is not None and self.epochs is not None:
            raise ConfigurationError(f"give --steps ({self.steps}) or --epochs ({self.epochs}), not both")

    def as_json(self) -> dict[str, Any]:
        """Plain values, for config.json and checkpoints."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}


def _require(settings: TrainSettings, name: str, expected: str, holds: bool) -> None:
    if not holds:
        option = "--" + name.replace("_", "-")
        raise ConfigurationError(f"{option} must be {expected}, got {getattr(settings, name)!r}")
