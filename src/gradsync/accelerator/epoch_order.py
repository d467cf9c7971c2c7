"""The order of an epoch: the random numbers behind it, who draws them, and how all ranks get the same."""

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gradsync.base.errors import MismatchError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes

__all__ = [
    "EpochPosition",
    "SamplerGenerators",
    "agree_on_position",
    "decoded",
    "draw_seed",
    "generators_replaced",
    "require_same_order",
]


def draw_seed(generator: torch.Generator | None) -> int:
    """A number as torch's loader and its random sampler draw one: 63 bits from ``generator`` or from torch's own."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


@contextlib.contextmanager
def generators_replaced(holders: Iterable[Any], seed: int) -> Iterator[None]:
    """Let each of ``holders`` draw from a generator of its own with this seed, and give back what it had."""
    before = [(holder, holder.generator) for holder in holders]
    for holder, _ in before:
        holder.generator = _seeded(seed)
    try:
        yield
    finally:
        for holder, generator in before:
            holder.generator = generator


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


@dataclass(frozen=True)
class EpochPosition:
    """The state of an iteration. ``ended``: this rank has had its last batch. The rest determines the epoch's order."""

    epoch: int
    batches: int = 0
    ended: bool = False
    base: int | None = None
    seed: int | None = None
    generator: str | None = None


class SamplerGenerators:
    """The samplers of ``loader`` and their generators.

    ``seedable``: the order is determined by a seed and the epoch alone; the user's generators have no influence.
    """

    def __init__(self, loader: DataLoader[Any], *, seedable: bool) -> None:
        self._loader = loader
        self._seedable = seedable

    @property
    def samplers(self) -> list[Any]:
        """Everything that has a say in which samples come next, once each."""
        outer = [self._loader.batch_sampler, self._loader.sampler]
        named = [*outer, *(getattr(each, "sampler", None) for each in outer)]
        return list({id(each): each for each in named if each is not None}.values())

    @property
    def holders(self) -> list[Any]:
        """The samplers that shuffle by a generator of torch's, or would if they had been given one."""
        missing = object()
        found = [(each, getattr(each, "generator", missing)) for each in self.samplers]
        return [each for each, generator in found if generator is None or isinstance(generator, torch.Generator)]

    @property
    def lacking(self) -> list[Any]:
        """Those that have not been given one."""
        return [each for each in self.holders if each.generator is None]

    @property
    def shared(self) -> list[torch.Generator]:
        """The generators that make the order: they stay in use, and all ranks give them rank 0's state."""
        holders = [] if self._seedable else self.holders
        if isinstance(self._loader.dataset, IterableDataset):
            holders.append(self._loader.dataset)
        found = [getattr(each, "generator", None) for each in holders]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    @property
    def unshared(self) -> list[Any]:
        """The samplers that need a generator for as long as an epoch lasts."""
        shared = [id(generator) for generator in self.shared]
        return [each for each in self.holders if id(each.generator) not in shared]

    def give_for_good(self) -> None:
        """Let every sampler that lacks a generator have one, seeded by a number drawn now: what Accelerate does where
        several ranks go through the samplers."""
        if not self._seedable and (lacking := self.lacking):
            seed = draw_seed(None)
            for each in lacking:
                each.generator = _seeded(seed)

    def states(self) -> str:
        """Those of the shared generators, as text."""
        return base64.b64encode(b"".join(bytes(each.get_state().tolist()) for each in self.shared)).decode()

    def set_states(self, states: torch.Tensor) -> None:
        """Go on from what :meth:`states` told, decoded."""
        if states.numel():
            for generator, state in zip(self.shared, states.chunk(len(self.shared)), strict=True):
                generator.set_state(state.clone())


def decoded(states: str | None) -> torch.Tensor:
    """The bytes of :meth:`SamplerGenerators.states`."""
    return torch.tensor(list(base64.b64decode(states or "")), dtype=torch.uint8, device="cpu")


def agree_on_position(
    communicator: Communicator,
    wanted: EpochPosition,
    compared: Mapping[str, int],
    generators: SamplerGenerators,
    *,
    shares_states: bool,
) -> EpochPosition:
    """``wanted`` with rank 0's order, and generators in its state if ``shares_states``. Raises
    :class:`MismatchError` on every rank unless all pass the same numbers in ``compared``. Collective."""
    row = json.dumps([wanted.base or 0, wanted.seed or 0, wanted.ended, *compared.values()])
    rows = [json.loads(text) for text in gather_bytes(communicator, row.encode())]
    for number, name in enumerate(compared, 3):
        values = [row[number] for row in rows]
        if len(set(values)) > 1:
            found = ", ".join(f"rank {rank} has {'none' if value < 0 else value}" for rank, value in enumerate(values))
            raise MismatchError(
                f"ranks differ in the {name} of a prepared loader: {found}. Every rank must be given the same dataset "
                "and loader, and load the state that it saved at the same time as the others"
            )
    states = decoded(wanted.generator)
    if states.numel():
        if shares_states and communicator.world_size > 1:
            sent = states.to(communicator.device)
            communicator.broadcast(sent, 0).wait()
            states = sent.cpu()
        generators.set_states(states)
    ended = all(row[2] for row in rows)
    return replace(wanted, base=rows[0][0], seed=rows[0][1], generator=generators.states(), ended=ended)


def require_same_order(communicator: Communicator, batches: list[Any]) -> None:
    """Raise :class:`MismatchError` on every rank unless all of them pass the same first round."""
    digests = gather_bytes(communicator, hashlib.sha256(repr(batches).encode()).digest())
    if len(set(digests)) > 1:
        odd = next(rank for rank, each in enumerate(digests) if each != digests[0])
        raise MismatchError(
            f"ranks 0 and {odd} go through the dataset in different orders, so that samples would be lost and "
            "repeated. A sampler must yield the same on every rank: let it shuffle by a torch.Generator in its "
            "attribute 'generator', or by its epoch. A DistributedSampler is not needed here"
        )
