"""Replica check: compares parameter fingerprints across ranks at a fixed interval of windows.

Replicas begin with the same bits and take the same steps, so nothing is ever sent to keep them equal. A bit that flips
in memory, or code that runs on one rank only, makes them differ for good, and silently. Ranks detect this before the
buckets of a window. While they agree they exchange one number per rank; once they do not, one number per parameter.

A fingerprint is ``Σ (2i + 1)·wᵢ`` over the 32-bit words ``wᵢ`` of a tensor, modulo 2⁶⁴. The weights are odd, so no
single flipped bit can vanish. Two words that change places change it by ``2(i − j)(wᵢ − wⱼ)``, which is less than
2⁶⁴ and not zero.

Alternative considered: ``torch.hash_tensor`` is the exclusive or of all words. It detects neither two words that change
places nor the same bit flipped in two of them.

[Note: shares] Where each rank updates its share and the others take it, a step makes replicas equal, even if the
owner's value was wrong. The comparison comes before the buckets of a window, so a bit that has flipped since the last
step is found before an update uses it, if this window is compared. On CPUs the share that is updated is the parameter's
own memory: the owner has no second copy to compare it with.

Buffers are not compared: each rank's forward updates its own, until rank 0's are taken before the next one.
"""

import logging
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gradsync.base.errors import ConfigurationError, MismatchError
from gradsync.communicator import Communicator
from gradsync.communicator.logs import join_names, rank_name
from gradsync.core.bucket import ParameterSpec

__all__ = ["Comparison", "ReplicaCheck", "fingerprint"]

LOGGER = logging.getLogger("gradsync")

_REMEDIES = ("raise", "repair")

# Words per block. Two megabytes of products stay in the cache of a core; an accelerator wants few operations.
BLOCK = 1 << 18
ACCELERATOR_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ReplicaCheck:
    """Compares the parameters of all replicas in the first window and then in one of every ``every``.

    on_mismatch
        ``"raise"``: MismatchError on all ranks, which names the rank and the parameter; or ``"repair"``:
        the parameter is copied from the ranks that agree, if they are more than half of all ranks.

    With a :class:`~gradsync.ShardedOptimizer` use ``every=1``: each step gives the value of an element's owner to all
    ranks, so a wrong one is found by a comparison before that step, or never.
    """

    every: int
    on_mismatch: Literal["raise", "repair"] = "raise"

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or self.every < 1:
            raise ConfigurationError(f"every must be a number of windows, 1 or more, got {self.every!r}")
        if self.on_mismatch not in _REMEDIES:
            raise ConfigurationError(f"on_mismatch must be one of {', '.join(_REMEDIES)}, got {self.on_mismatch!r}")


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """A parameter with different fingerprints across ranks, in rank order."""

    index: int
    prints: tuple[int, ...]

    @property
    def majority(self) -> int | None:
        """The fingerprint that more than half of the ranks have."""
        value, count = Counter(self.prints).most_common(1)[0]
        return value if 2 * count > len(self.prints) else None

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; all, if there is none."""
        return tuple(rank for rank, value in enumerate(self.prints) if value != self.majority)


class Comparison:
    """Compares the parameters of one engine with those of the other ranks."""

    def __init__(
        self,
        settings: ReplicaCheck,
        specs: Sequence[ParameterSpec],
        communicator: Communicator,
        value_of: Callable[[torch.nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        self._settings, self._names = settings, [spec.name for spec in specs]
        # Not the parameter itself: a backward is running and need not notice the repair.
        self._communicator, self._value_of = communicator, value_of or operator.attrgetter("data")

    def before_window(self, window: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Compare the replicas, if this window is due: ranks know by counting. Collective."""
        if window % self._settings.every or self._communicator.world_size == 1:
            return
        values = [self._value_of(parameter) for parameter in parameters]
        prints = _all_prints(values)
        if len(set(self._gather(fingerprint(prints).view(1)))) == 1:
            return
        rows = self._gather(prints)
        columns = zip(*(rows[start : start + len(values)] for start in range(0, len(rows), len(values))), strict=True)
        differences = [
            _Difference(index=index, prints=column) for index, column in enumerate(columns) if len(set(column)) > 1
        ]
        if self._settings.on_mismatch == "raise" or any(each.majority is None for each in differences):
            self._refuse(differences)
        for difference in differences:
            self._repair(difference, values[difference.index])
        if self._communicator.rank == 0:
            LOGGER.warning(
                "%s, and taken from the majority. States of optimizers are not compared: if one of them was changed "
                "too, replicas will differ again",
                self._describe(differences),
            )

    def _gather(self, numbers: torch.Tensor) -> list[int]:
        """Gather the numbers of all ranks, in rank order."""
        communicator = self._communicator
        gathered = torch.empty(numbers.numel() * communicator.world_size, dtype=torch.int64, device=communicator.device)
        communicator.all_gather(gathered, numbers.to(communicator.device)).wait()
        return gathered.tolist()

    @torch.no_grad()
    def _repair(self, difference: _Difference, value: torch.Tensor) -> None:
        source = next(rank for rank in range(len(difference.prints)) if rank not in difference.others)
        whole = value.contiguous()
        self._communicator.broadcast(whole.view(-1).view(torch.uint8), source).wait()
        if whole is not value and self._communicator.rank in difference.others:
            value.copy_(whole)

    def _describe(self, differences: Sequence[_Difference]) -> str:
        """The beginning of an error message: which ranks differ, and in what."""
        first, further = differences[0], len(differences) - 1
        names = join_names([rank_name(self._communicator.group, rank) for rank in first.others])
        which = f"parameter {self._names[first.index]!r}" + (f" and {further} more" if further else "")
        if first.majority is not None:
            return f"{which} on {names} was found to differ from the other ranks"
        return f"{which} was found to differ on {names}, no majority of which agrees"

    def _refuse(self, differences: Sequence[_Difference]) -> None:
        repaired = "" if self._settings.on_mismatch == "raise" else " Nothing was repaired."
        raise MismatchError(
            f"{self._describe(differences)}: a bit has flipped, or code that only some ranks run has changed it."
            f"{repaired} Load the last checkpoint on all ranks, and call zero_grad() before the next backward"
        )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A single number that depends on all bits of the tensor and their positions."""
    return _all_prints([tensor])[0]


@torch.no_grad()
def _all_prints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The fingerprints of the tensors. On an accelerator the host does not wait for them."""
    home = tensors[0].device
    block = BLOCK if home.type == "cpu" else ACCELERATOR_BLOCK
    longest = min(block, max(tensor.nbytes // min(tensor.dtype.itemsize, 4) for tensor in tensors))
    devices = {tensor.device for tensor in tensors}
    weights = {device: torch.arange(1, 2 * longest + 1, 2, device=device) for device in devices}
    return torch.stack([_print_of(_words(each), weights[each.device], block).to(home) for each in tensors])


def _print_of(words: torch.Tensor, weights: torch.Tensor, block: int) -> torch.Tensor:
    """The fingerprint of words, block by block with the same weights: those of later ones are larger by a constant."""
    total = (words[:block] * weights[: words.numel()]).sum()
    for start in range(block, words.numel(), block):
        part = words[start : start + block]
        total += (part * weights[: part.numel()]).sum() + part.sum(dtype=torch.int64) * (2 * start)
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, as integers of at most 32 bits."""
    kind = {1: torch.int8, 2: torch.int16}.get(tensor.dtype.itemsize, torch.int32)
    return tensor.detach().contiguous().view(-1).view(kind)
