"""What variants run: the models they train, wrapped the same way for all, and steps as users write them.

Layers compute for real, or sleep instead. Models are scaled down so that many rounds fit into minutes, and a default of
25 MiB, made for whole models, would put all of a scaled one into one bucket. So torch's wrapper gets the best of
several fractions of the gradients, by trial.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.base.errors import ConfigurationError
from gradsync.observe.timeline import Timeline
from gradsync.tools.bench.measure import CPU, CellRounds, Device, LateParts, Parts, Steady, Step
from gradsync.tools.bench.peers import ALONE, DDP, TUNED, Peer, WrappedModel
from gradsync.tools.bench.record import EVERY
from gradsync.tools.lab.emulated import Profile, bert_base, resnet50, transformer
from gradsync.tools.llm.model import GPTConfig, TransformerBlock

__all__ = [
    "FLOAT_BYTES",
    "MIB",
    "PROCESSOR",
    "EmulatedWorkload",
    "Lineup",
    "Pattern",
    "RealWorkload",
    "Workload",
    "best_bucket_mb",
    "optimizer_step",
    "timed_step",
    "tuned_ddp",
    "window_step",
    "with_processor_seconds",
    "workload_of",
]

FLOAT_BYTES, MIB = 4, 2**20
VOCABULARY, HEADS = 256, 8
# The models of the DDP paper, by name.
PROFILES = {"ResNet-50": resnet50, "BERT-base": bert_base}
SEED = 0
# The part of a step that tells the seconds of processors it took.
PROCESSOR = "host work"


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
        """The bytes of the gradients."""
        return self.parameters * FLOAT_BYTES

    def wrap(self, peer: Peer, *, window: int = 1) -> WrappedModel:
        """Wrap the model, with the same weights for everyone."""
        torch.manual_seed(SEED)
        made = getattr(torch.optim, self.optimizer)
        with self.device.torch_device:
            model = self.model()
        return peer.wrap(model, partial(made, lr=self.learning_rate, foreach=True), window=window)


@dataclass(frozen=True, kw_only=True)
class EmulatedWorkload(Workload):
    """The layers of a profile, which sleep instead of computing."""

    profile: Profile
    optimizer: str = "SGD"
    device: Device = CPU
    learning_rate = 1e-4

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
    """A transformer that computes, for what emulated layers cannot show: cores and memory shared with communication.

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


def workload_of(rounds: CellRounds, **others: Any) -> Workload:
    """What the options of the cell, and ``others``, describe: layers of some ``width`` that compute, a ``model`` of the
    DDP paper that has ``parameters`` times as many as the original, or an emulated transformer."""
    options = {**rounds.cell.options, **others}
    if "width" in options:
        return RealWorkload(**options, device=rounds.device)
    if options.get("model") in PROFILES:
        profile = PROFILES[options["model"]](seconds=options["seconds"]).scaled(parameters=options["parameters"])
    else:
        profile = transformer(**{key: options[key] for key in ("parameters", "layers", "seconds")})
    return EmulatedWorkload(profile=profile, device=rounds.device)


# Of all gradients; and what DDP has by itself, which is tried where there is more than that.
SHARES, DEFAULT = (1, 2, 4, 8), 25.0

# One forward of the wrapped model, with whatever inputs it needs, to the loss.
Forward = Callable[[torch.nn.Module], torch.Tensor]


class Pattern(StrEnum):
    """The four ways of the table in Accelerate's guide."""

    EVERY = "sync every micro-batch"
    IMPROPER = "no_sync around backward only"
    NO_SYNC = "no_sync"
    ACCUMULATE = "accumulate"


def optimizer_step(wrapped: WrappedModel) -> None:
    wrapped.optimizer.step()
    wrapped.optimizer.zero_grad()


def window_step(
    wrapped: WrappedModel, forward: Forward, *, count: int = 1, pattern: Pattern = Pattern.EVERY, times: int = 1
) -> Step:
    """A step of ``count`` micro-batches and one update, ``times`` in a row."""
    if pattern is Pattern.ACCUMULATE and wrapped.accumulate is None:
        raise ConfigurationError("this peer has no accumulate(); ask for the pattern no_sync instead")

    def synchronized(last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last or pattern is Pattern.EVERY else wrapped.no_sync()

    def micro_batch(last: bool) -> None:
        if wrapped.accumulate is not None and pattern is Pattern.ACCUMULATE:
            with wrapped.accumulate(last):
                (wrapped.framed_backward or wrapped.backward)(forward(wrapped.model))
        elif pattern is Pattern.IMPROPER:
            loss = forward(wrapped.model)
            with synchronized(last):
                wrapped.backward(loss)
        else:
            with synchronized(last):
                wrapped.backward(forward(wrapped.model))

    def step() -> None:
        for _ in range(times):
            for number in range(1, count + 1):
                micro_batch(number == count)
            optimizer_step(wrapped)

    return step


def timed_step(wrapped: WrappedModel, forward: Forward, device: Device, timeline: Timeline | None = None) -> Step:
    """A step of one micro-batch that says how long its parts took.

    ``timeline`` knows how much of backward was waiting for communication, in the last step of a block; without it
    backward is one part.
    """

    def step() -> LateParts:
        marks = [device.mark()]
        loss = forward(wrapped.model)
        marks.append(device.mark())
        wrapped.backward(loss)
        marks.append(device.mark())
        optimizer_step(wrapped)
        marks.append(device.mark())

        def parts() -> Parts:
            ahead, back, update = (device.seconds(*each) for each in itertools.pairwise(marks))
            last = None if timeline is None else timeline.last
            waited = 0.0 if last is None else last.exposed
            return {"forward": ahead, "backward": back - waited, "exposed": waited, "optimizer": update}

        return parts

    return step


def with_processor_seconds(step: Step) -> Step:
    """The step, which also says how many seconds of processors this rank took for it, by all its threads."""

    def measured() -> Parts:
        began = time.process_time()
        step()
        return {PROCESSOR: time.process_time() - began}

    return measured


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A peer in the turns of a cell. ``windows`` is how many a step has."""

    peer: Peer
    wrapped: WrappedModel
    step: Step
    windows: int


class Lineup:
    """The variants of a cell, which take turns: the same model under every peer, and steps as its users write them.

    ``senders`` are the ranks whose bytes cross a link, if not all.
    """

    def __init__(self, rounds: CellRounds, workload: Workload | None = None, *, senders: int | None = None) -> None:
        self.rounds = rounds
        self.workload = workload_of(rounds) if workload is None else workload
        self.variants: dict[str, Variant] = {}
        rounds.fact("gradient bytes", self.workload.nbytes)
        seconds = rounds.cell.transfer_seconds(self.workload.nbytes, senders=senders)
        rounds.limits(compute=ALONE, communication={EVERY: seconds})

    def add(
        self,
        peer: Peer,
        name: str = "",
        *,
        count: int = 1,
        pattern: Pattern = Pattern.EVERY,
        times: int = 1,
        step: Callable[[WrappedModel], Step] | None = None,
    ) -> None:
        """Add a variant, or note why it cannot run here. Without a ``step`` of its own, it runs windows of ``count``
        micro-batches, ``times`` in a row."""
        name = name or peer.name
        reason = peer.absent()
        wrapped = self.workload.wrap(peer, window=count) if reason is None else None
        if wrapped is not None and wrapped.accumulate is None and pattern is Pattern.ACCUMULATE:
            wrapped, reason = None, "does not exist"
        if wrapped is None:
            self.rounds.absent(name, reason or "")
            return
        forward = self.workload.forward
        made = step(wrapped) if step else window_step(wrapped, forward, count=count, pattern=pattern, times=times)
        windows = times * (count if pattern is Pattern.EVERY else 1)
        self.variants[name] = Variant(peer=peer, wrapped=wrapped, step=made, windows=windows)

    def model(self, name: str) -> Any:
        """The wrapper of a variant."""
        return self.variants[name].wrapped.model

    def settle(self) -> "Lineup":
        """Run until everybody has chosen its settings, as it does in the first windows of a training."""
        for each in self.variants.values():
            step = each.step.step if isinstance(each.step, Steady) else each.step
            for _ in range(-(-each.peer.windows_to_settle // each.windows)):
                step()
            each.wrapped.flush()
        return self

    def run(self) -> None:
        """Run the rounds."""
        self.rounds.run({name: each.step for name, each in self.variants.items()})


def tuned_ddp(rounds: CellRounds, workload: Workload, *, shares: Sequence[int] = SHARES, warmup: int = 3) -> DDP:
    """torch's wrapper at its best, with the bucket size that suits it."""
    return DDP(name=TUNED, tuned=True, bucket_mb=best_bucket_mb(rounds, workload, shares=shares, warmup=warmup))


def best_bucket_mb(
    rounds: CellRounds, workload: Workload, *, tuned: bool = True, shares: Sequence[int] = SHARES, warmup: int = 3
) -> float:
    """The size in MiB with which torch's DDP was fastest in a few rounds; noted among the facts of the cell."""
    whole = workload.nbytes / MIB
    sizes = {round(whole / share, 3) for share in shares} | ({DEFAULT} if whole > DEFAULT else set())
    tried = {f"{size:g}": workload.wrap(DDP(tuned=tuned, bucket_mb=size)) for size in sorted(sizes)}
    steps = {name: window_step(wrapped, workload.forward) for name, wrapped in tried.items()}
    best = rounds.best(steps, warmup=warmup)
    rounds.fact("DDP bucket MiB", f"{best}, the best of {', '.join(steps)}")
    return float(best)
