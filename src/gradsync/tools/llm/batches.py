"""The data of a training run, addressed by number: window ``n`` always holds the same samples.

::

    stream of samples   ┃ epoch 0, permuted by (seed, 0) ┃ epoch 1, permuted by (seed, 1) ┃ …
    windows             ┃ 0      ┃ 1      ┃ 2      ┃ 3      ┃ 4      ┃ 5      ┃ …
    window 1, 2 ranks            ┃ r0 ┃r1 ┃

There is no position to save: a run resumes exactly by asking for the next number, even with a different number of
ranks. A window may reach into the next epoch, so no sample is ever left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.accelerator.numbered_windows import permutation as _permutation
from gradsync.accelerator.numbered_windows import share_of as _share
from gradsync.base.errors import ConfigurationError

__all__ = ["BatchPlan", "Batches", "MicroBatch", "validation_batches"]

# Inputs and targets, both int64 of (sequences, sequence_length).
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How tokens become windows.

    sequence_length
        tokens the model reads at once. A sample is one longer: the targets are the inputs, shifted by one.
    global_batch
        sequences in a window, over all ranks.
    micro_batch
        sequences in a micro-batch, at most.
    seed
        of the permutations.
    """

    sequence_length: int
    global_batch: int
    micro_batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch", "micro_batch"):
            _check_whole(name, getattr(self, name), at_least=1)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigurationError(f"seed must be a whole number, got {self.seed!r}")


class Batches:
    """One rank's part of every window. More ranks than ``global_batch`` are allowed: some have nothing to do then."""

    def __init__(self, tokens: Tensor, plan: BatchPlan, rank: int, world_size: int) -> None:
        _check_place(rank, world_size)
        self.plan = plan
        self._rank = rank
        self._world_size = world_size
        self._samples = _samples_of(tokens, plan)
        if plan.global_batch > len(self._samples):
            raise ConfigurationError(
                f"a window takes {plan.global_batch} sequences, but {len(tokens)} tokens are only "
                f"{len(self._samples)} samples of {plan.sequence_length + 1}: an epoch must fill at least one window. "
                "Take a smaller global batch, shorter sequences or more text"
            )
        # Those that the latest window needed: of one epoch, or of two where it reached into the next.
        self._permutations: dict[int, Tensor] = {}

    @property
    def samples(self) -> int:
        """Samples in an epoch."""
        return len(self._samples)

    @property
    def windows_per_epoch(self) -> float:
        """Not a whole number in general: a window may reach into the next epoch."""
        return len(self._samples) / self.plan.global_batch

    def epoch_of(self, number: int) -> float:
        """How many epochs have been seen when window ``number`` begins."""
        _check_whole("the number of a window", number, at_least=0)
        return number * self.plan.global_batch / len(self._samples)

    def window(self, number: int) -> list[MicroBatch]:
        """This rank's micro-batches of window ``number``, counted from 0. Empty where there are too many ranks."""
        _check_whole("the number of a window", number, at_least=0)
        count, begin = len(self._samples), number * self.plan.global_batch
        # The epochs of the whole window, not of this rank's share: all ranks do the same at the same time.
        epochs = range(begin // count, (begin + self.plan.global_batch - 1) // count + 1)
        known = self._permutations
        self._permutations = {
            epoch: known[epoch] if epoch in known else _permutation(count, self.plan.seed, epoch) for epoch in epochs
        }
        share = _share(self.plan.global_batch, self._rank, self._world_size)
        parts = [
            order[max(0, begin + share.start - epoch * count) : max(0, begin + share.stop - epoch * count)]
            for epoch, order in self._permutations.items()
        ]
        return _micro_batches(self._samples, torch.cat(parts), self.plan)


def validation_batches(
    tokens: Tensor, plan: BatchPlan, limit: int | None = None, rank: int = 0, world_size: int = 1
) -> list[MicroBatch]:
    """This rank's part of ``limit`` micro-batches at most, the same in every call, spread evenly over the tokens.

    The limit is that of all ranks together: the samples, and so their mean loss, do not depend on the number of ranks.
    Empty on a rank that has none, and where the tokens are too few for a sample.
    """
    _check_place(rank, world_size)
    if limit is not None:
        _check_whole("limit", limit, at_least=1)
    if len(tokens) <= plan.sequence_length:
        return []
    samples = _samples_of(tokens, plan)
    count = len(samples) if limit is None else min(limit * plan.micro_batch, len(samples))
    share = _share(count, rank, world_size)
    chosen = torch.arange(share.start, share.stop, dtype=torch.int64) * len(samples) // count
    return _micro_batches(samples, chosen, plan)


def _samples_of(tokens: Tensor, plan: BatchPlan) -> Tensor:
    """All samples, as a view: one in each row. What is left over at the end is too short for one."""
    if tokens.ndim != 1:
        raise ConfigurationError(f"tokens must have one dimension, got the shape {tuple(tokens.shape)}")
    width = plan.sequence_length + 1
    count = len(tokens) // width
    if not count:
        raise ConfigurationError(
            f"a sample takes {width} tokens (sequence length {plan.sequence_length}, and one to predict), but there "
            f"are only {len(tokens)}. Take shorter sequences or more text"
        )
    return tokens[: count * width].view(count, width)


def _micro_batches(samples: Tensor, chosen: Tensor, plan: BatchPlan) -> list[MicroBatch]:
    # Not torch.split: that makes one empty part of nothing.
    begins = range(0, len(chosen), plan.micro_batch)
    batches = [samples[chosen[begin : begin + plan.micro_batch]].to(torch.int64) for begin in begins]
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in batches]


def _check_place(rank: int, world_size: int) -> None:
    _check_whole("world_size", world_size, at_least=1)
    _check_whole("rank", rank, at_least=0)
    if rank >= world_size:
        raise ConfigurationError(f"ranks count from 0 to {world_size - 1} in a world of {world_size}, got rank {rank}")


def _check_whole(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigurationError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
