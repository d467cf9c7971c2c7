"""A transformer that really computes, for what emulated layers cannot show: cores and memory shared with the wire.

Its layers are those of gradsync's GPT, one after another in a ``Sequential``, so that every peer may treat each block
as a unit. Tokens are random, the same ones in every step: speed does not depend on them.
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.bench.peers import Peer, Wrapped
from gradsync.llm.model import Block, GPTConfig

__all__ = ["RealWorkload"]

VOCABULARY, HEADS = 256, 8
SEED = 0


@dataclass(frozen=True, kw_only=True)
class RealWorkload:
    """The size of the model, and of the share of the batch that a rank computes."""

    layers: int
    width: int
    batch: int
    length: int

    @cached_property
    def parameters(self) -> int:
        # On no device: counting must not cost memory.
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self._model().parameters())

    @property
    def nbytes(self) -> int:
        """Of the gradients."""
        return self.parameters * torch.float32.itemsize

    def wrap(self, peer: Peer, *, window: int = 1) -> Wrapped:
        """The same weights for everyone."""
        torch.manual_seed(SEED)
        return peer.wrap(self._model(), partial(torch.optim.SGD, lr=1e-3, foreach=True), window=window)

    def forward(self, model: nn.Module) -> Tensor:
        inputs, targets = self._tokens
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (self.batch, self.length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def _model(self) -> nn.Sequential:
        config = GPTConfig(
            vocab_size=VOCABULARY, sequence_length=self.length, layers=self.layers, heads=HEADS, width=self.width
        )
        blocks = (Block(config) for _ in range(self.layers))
        ends = nn.LayerNorm(self.width), nn.Linear(self.width, VOCABULARY)
        return nn.Sequential(nn.Embedding(VOCABULARY, self.width), *blocks, *ends)
