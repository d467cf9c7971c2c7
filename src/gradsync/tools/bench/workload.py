"""The models that variants train, wrapped the same way for all: layers with emulated computation, and real ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.tools.bench.device import CPU, Device
from gradsync.tools.bench.measure import Rounds
from gradsync.tools.bench.peers import ALONE, Peer, Wrapped
from gradsync.tools.bench.record import EVERY
from gradsync.tools.lab.emulated import Profile, bert_base, resnet50, transformer
from gradsync.tools.llm.model import GPTConfig, TransformerBlock

__all__ = ["FLOAT_BYTES", "PROFILES", "EmulatedWorkload", "RealWorkload", "Workload", "paper_models"]

FLOAT_BYTES = 4
VOCABULARY, HEADS = 256, 8
# The models of the DDP paper, by name.
PROFILES = {"ResNet-50": resnet50, "BERT-base": bert_base}
SEED = 0
# Over sockets on one machine gradients take about as long as a backward of so many seconds' forward and backward.
GPU_SECONDS = {"ResNet-50": 0.06, "BERT-base": 0.25}
# BERT-base of a quick run is smaller, and faster as much.
QUICK_SCALES = {"ResNet-50": 1.0, "BERT-base": 0.4}


def paper_models(*, quick: bool) -> list[dict[str, Any]]:
    """The models of the DDP paper as options of cells over NCCL, where communication takes half of a backward."""
    scales = {model: QUICK_SCALES[model] if quick else 1.0 for model in PROFILES}
    return [
        {"model": model, "parameters": scale, "seconds": GPU_SECONDS[model] * scale} for model, scale in scales.items()
    ]


class Workload(ABC):
    """A model, and what is known of it before anything runs."""

    learning_rate: float
    device: Device = CPU
    # A class of torch's.
    optimizer: str

    @property
    @abstractmethod
    def parameters(self) -> int: ...

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def forward(self, model: nn.Module) -> Tensor: ...

    @property
    def nbytes(self) -> int:
        """Of the gradients."""
        return self.parameters * FLOAT_BYTES

    def wrap(self, peer: Peer, *, window: int = 1) -> Wrapped:
        """The same weights for everyone."""
        torch.manual_seed(SEED)
        made = getattr(torch.optim, self.optimizer)
        with self.device.torch_device:
            model = self.model()
        return peer.wrap(model, partial(made, lr=self.learning_rate, foreach=True), window=window)

    def note(self, rounds: Rounds, *, senders: int | None = None) -> None:
        """Its size, and what bounds a step that synchronizes it once, among so many ``senders`` or all ranks."""
        rounds.fact("gradient bytes", self.nbytes)
        rounds.limits(compute=ALONE, wire={EVERY: rounds.cell.wire_seconds(self.nbytes, senders=senders)})


@dataclass(frozen=True, kw_only=True)
class EmulatedWorkload(Workload):
    """The layers of a profile, which sleep instead of computing."""

    profile: Profile
    optimizer: str = "SGD"
    device: Device = CPU
    learning_rate = 1e-4

    @classmethod
    def of(cls, rounds: Rounds, **others: Any) -> "EmulatedWorkload":
        """What the options of the cell, and ``others``, say: a ``model`` of the DDP paper, with so many times its
        ``parameters``, or a transformer."""
        said = {**rounds.cell.options, **others}
        whole = PROFILES.get(said.get("model", ""))
        if whole is None:
            return replace(cls.transformer(said), device=rounds.device)
        return cls(profile=whole(seconds=said["seconds"]).scaled(parameters=said["parameters"]), device=rounds.device)

    @classmethod
    def transformer(cls, options: Mapping[str, Any], **others: Any) -> "EmulatedWorkload":
        """Of the size that these options of a cell, and ``others``, say."""
        said = {**options, **others}
        return cls(profile=transformer(**{key: said[key] for key in ("parameters", "layers", "seconds")}))

    @property
    def parameters(self) -> int:
        return self.profile.parameters

    def model(self) -> nn.Module:
        return self.device.emulated(self.profile)

    def forward(self, model: nn.Module) -> Tensor:
        """The gradients of rank r are r + 1 times those of rank 0, so that a mean differs from each of them."""
        loss: Tensor = model(self._input)
        return loss

    @cached_property
    def _input(self) -> Tensor:
        return torch.tensor(float(dist.get_rank() + 1), device=self.device.torch_device)


@dataclass(frozen=True, kw_only=True)
class RealWorkload(Workload):
    """A transformer that computes, for what emulated layers cannot show: cores and memory shared with the wire.

    Its layers are those of gradsync's GPT, one after another in a ``Sequential``, so that every peer may treat each
    block as a unit. Tokens are random, the same ones in every step: speed does not depend on them.
    """

    layers: int
    width: int
    # The share of a rank.
    batch: int
    length: int
    optimizer: str = "SGD"
    device: Device = CPU
    learning_rate = 1e-3

    @cached_property
    def parameters(self) -> int:
        # On no device: counting must not cost memory.
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.model().parameters())

    def forward(self, model: nn.Module) -> Tensor:
        inputs, targets = self._tokens
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    @cached_property
    def _tokens(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (self.batch, self.length + 1), generator=generator)
        tokens = tokens.to(self.device.torch_device)
        return tokens[:, :-1], tokens[:, 1:]

    def model(self) -> nn.Module:
        config = GPTConfig(
            vocab_size=VOCABULARY, sequence_length=self.length, layers=self.layers, heads=HEADS, width=self.width
        )
        blocks = (TransformerBlock(config) for _ in range(self.layers))
        ends = nn.LayerNorm(self.width), nn.Linear(self.width, VOCABULARY)
        return nn.Sequential(nn.Embedding(VOCABULARY, self.width), *blocks, *ends)
