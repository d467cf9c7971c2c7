"""Layer dropping at random, identical on all ranks; gradients of dropped layers are not sent.

Which layers are dropped is a function of a seed and the number of the forward. Both are buffers: they are the same on
all ranks because buffers are broadcast at wrapping, and a resumed run continues with the same draws because they are in
the ``state_dict``.

BLAKE2 turns the two numbers into the seed of a generator. It gives the same result on every platform and in every
release. Python's ``hash`` does not: it depends on the build, may change with a release, and is the same for -1 and -2.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.core.engine.synchronizer import synchronizer_of

__all__ = ["LayerDrop"]


class LayerDrop(nn.Module):
    """Runs ``layers`` in sequence and, in training, skips each with probability ``drop``.

    Every layer's output must look like its input, as with transformer blocks. The engine is told which layers a forward
    left out, so their gradients are not sent. To write the loop yourself, iterate over :meth:`kept`.
    """

    # Tells the replica that ranks must agree, in every window, on what no rank has run.
    announces_absence = True

    seed: torch.Tensor
    forwards: torch.Tensor

    def __init__(self, layers: Iterable[nn.Module], *, drop: float, seed: int = 0) -> None:
        super().__init__()
        if not 0.0 <= drop < 1.0:
            raise ConfigurationError(f"drop must be a probability in [0, 1), got {drop}")
        self.layers = nn.ModuleList(layers)
        self.drop = drop
        self.register_buffer("seed", torch.tensor(seed, dtype=torch.int64))
        self.register_buffer("forwards", torch.tensor(0, dtype=torch.int64))
        self._count, self._seed = 0, seed
        self._versions: tuple[int, int] | None = None

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        for layer in self.kept():
            hidden = layer(hidden, *args, **kwargs)
        return hidden

    def kept(self) -> Iterator[nn.Module]:
        """The layers of this forward; all of them in evaluation. Every call draws again."""
        if not self.training or self.drop == 0.0:
            yield from self.layers
            return
        dropped = self._draw()
        self._announce(dropped)
        for layer, is_dropped in zip(self.layers, dropped, strict=True):
            if not is_dropped:
                yield layer

    def _draw(self) -> list[bool]:
        # Drawn on the CPU from host numbers, so that a forward on an accelerator need not wait for its buffers.
        if self._versions != (self.seed._version, self.forwards._version):
            # Written elsewhere: at the start, by load_state_dict, or by the broadcast at wrapping.
            self._count, self._seed = int(self.forwards), int(self.seed)
        generator = torch.Generator("cpu").manual_seed(_mixed(self._seed, self._count))
        self._count += 1
        self.forwards += 1
        self._versions = (self.seed._version, self.forwards._version)
        draws: list[bool] = (torch.rand(len(self.layers), generator=generator, device="cpu") < self.drop).tolist()
        return draws

    def _announce(self, dropped: list[bool]) -> None:
        kept = {id(p) for layer, gone in zip(self.layers, dropped, strict=True) if not gone for p in layer.parameters()}
        absent = [
            p
            for layer, gone in zip(self.layers, dropped, strict=True)
            if gone
            for p in layer.parameters()
            if id(p) not in kept
        ]
        synchronizer = synchronizer_of(absent[0]) if absent else None
        if synchronizer is not None:
            synchronizer.announce_absent(absent)


def _mixed(seed: int, count: int) -> int:
    """A generator seed that is, for all practical purposes, different for each pair of 64-bit numbers."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, count), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFF_FFFF_FFFF_FFFF
