"""The order of an epoch: the random numbers behind it, who draws them, and how all ranks get the same."""

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from gradsync.base.errors import MismatchError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_json, require_agreement

__all__ = ["EpochOrder", "EpochPosition", "require_same_order"]

# Neighbouring ranks' seeds lie far apart, because workers count up from their rank's.
SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class EpochPosition:
    """The state of an iteration. ``ended``: this rank has had its last batch. The rest determines the epoch's order."""

    epoch: int
    batches: int = 0
    ended: bool = False
    base: int | None = None
    seed: int | None = None
    generator: str | None = None


class EpochOrder:
    """The samplers of ``loader``, and the random numbers that its epochs and its workers begin with.

    ``seed``: the order is determined by it and the epoch alone; the user's generators have no influence.
    ``only_rank_0``: the other ranks do not go through their samplers.
    """

    def __init__(
        self, loader: DataLoader[Any], communicator: Communicator, *, seed: int | None, only_rank_0: bool
    ) -> None:
        self.seed = seed
        self.worker_seeds = torch.Generator(device=torch.get_default_device())
        self._loader = loader
        self._communicator = communicator
        self._only_rank_0 = only_rank_0
        # Of iterations under way. They end with these, and are in no state.
        self._temporary: list[torch.Generator] = []
        if communicator.world_size > 1 and not only_rank_0 and seed is None and (lacking := self._lacking):
            # For good, as Accelerate does where several ranks go through the samplers.
            number = _draw(torch.default_generator)
            for each in lacking:
                each.generator = _seeded(number)

    @property
    def samplers(self) -> list[Any]:
        """Everything that has a say in which samples come next, once each."""
        outer = [self._loader.batch_sampler, self._loader.sampler]
        named = [*outer, *(getattr(each, "sampler", None) for each in outer)]
        return list({id(each): each for each in named if each is not None}.values())

    @property
    def _holders(self) -> list[Any]:
        """The samplers that shuffle by a generator of torch's, or would if they had been given one."""
        missing = object()
        found = [(each, getattr(each, "generator", missing)) for each in self.samplers]
        return [each for each, generator in found if generator is None or isinstance(generator, torch.Generator)]

    @property
    def _lacking(self) -> list[Any]:
        return [each for each in self._holders if each.generator is None or self._is_temporary(each.generator)]

    def _is_temporary(self, generator: torch.Generator) -> bool:
        return any(generator is each for each in self._temporary)

    @property
    def _shared(self) -> list[torch.Generator]:
        """The generators that make the order: they stay in use, and all ranks give them rank 0's state."""
        holders = [] if self.seed is not None else self._holders
        if isinstance(self._loader.dataset, IterableDataset):
            holders.append(self._loader.dataset)
        found = [getattr(each, "generator", None) for each in holders]
        made = [each for each in found if isinstance(each, torch.Generator) and not self._is_temporary(each)]
        return list({id(each): each for each in made}.values())

    def states(self) -> str:
        """The states of the generators that make the order, as text."""
        return base64.b64encode(b"".join(bytes(each.get_state().tolist()) for each in self._shared)).decode()

    def set_states(self, states: str | None) -> None:
        """Continue from the result of :meth:`states`."""
        self._set(_decoded(states))

    def _set(self, states: torch.Tensor) -> None:
        if states.numel():
            for generator, state in zip(self._shared, states.chunk(len(self._shared)), strict=True):
                generator.set_state(state.clone())

    def agree(
        self, wanted: EpochPosition, *, resumes: bool, length: int | None, batch_size: int | None
    ) -> EpochPosition:
        """``wanted`` with rank 0's order, and generators and seeds of workers ready for it. Collective.

        Raises :class:`MismatchError` on every rank unless all want the same of the same loader.
        """
        # What seeds of workers are drawn from, as in Accelerate: where rank 0 reads for all, not the loader's.
        source = torch.default_generator if self._only_rank_0 else self._loader.generator or torch.default_generator
        before = source.get_state()
        if wanted.seed is None:
            wanted = self._drawn(wanted, source)
        states = _decoded(wanted.generator)
        compared = {
            "epoch": wanted.epoch,
            "number of batches already taken": wanted.batches,
            "size of the generators' state": -1 if self._only_rank_0 else states.numel(),
            "length": -1 if self._only_rank_0 or length is None else length,
            "batch size": -1 if self._only_rank_0 or batch_size is None else batch_size,
        }
        own = [wanted.base or 0, wanted.seed or 0, wanted.ended, *compared.values()]
        rows = gather_json(self._communicator, own)
        _require_equal(compared, [row[3:] for row in rows])
        if states.numel() and not self._only_rank_0 and self._communicator.world_size > 1:
            sent = states.to(self._communicator.device)
            self._communicator.broadcast(sent, 0).wait()
            states = sent.cpu()
        self._set(states)
        base, seed = rows[0][:2]
        self.worker_seeds.manual_seed((base + self._communicator.rank * SEED_STRIDE) % 2**63)
        if not resumes and self._communicator.rank == 0 and source.device == self.worker_seeds.device:
            self.worker_seeds.set_state(before)  # rank 0's workers get the seeds they had without us
        return replace(wanted, base=base, seed=seed, generator=self.states(), ended=all(row[2] for row in rows))

    def _drawn(self, wanted: EpochPosition, source: torch.Generator) -> EpochPosition:
        """Draw as torch would: a number for the workers, and one for a random sampler without a generator, where it is
        read."""
        base, seed = _draw(source), 0
        if self.seed is not None:
            seed = (self.seed + wanted.epoch + 2**63) % 2**64 - 2**63  # to torch the same, and it fits 64 bits
        elif (self._communicator.rank == 0 or not self._only_rank_0) and self._lacking:
            seed = _draw(torch.default_generator)
        return replace(wanted, base=base, seed=seed, generator=self.states())

    @contextlib.contextmanager
    def applied(self, position: EpochPosition) -> Iterator[None]:
        """Samplers whose own generators do not make the order draw from one with the seed of ``position`` in here."""
        shared = [id(generator) for generator in self._shared]
        before = [(each, each.generator) for each in self._holders if id(each.generator) not in shared]
        used = [_seeded(position.seed or 0) for _ in before]
        self._temporary += used
        for (holder, _), generator in zip(before, used, strict=True):
            holder.generator = generator
        try:
            yield
        finally:
            self._temporary = [each for each in self._temporary if all(each is not one for one in used)]
            for holder, generator in before:
                holder.generator = generator


def _draw(generator: torch.Generator) -> int:
    """A number as torch's loader and its random sampler draw one: 63 bits."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)


def _decoded(states: str | None) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(states or "")), dtype=torch.uint8, device="cpu")


def _require_equal(names: dict[str, int], rows: list[list[int]]) -> None:
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if len(set(values)) > 1:
            found = ", ".join(f"rank {rank} has {'none' if value < 0 else value}" for rank, value in enumerate(values))
            raise MismatchError(
                f"ranks differ in the {name} of a prepared loader: {found}. Every rank must be given the same dataset "
                "and loader, and load the state that it saved at the same time as the others"
            )


def require_same_order(communicator: Communicator, batches: list[Any]) -> None:
    """Raise :class:`MismatchError` on every rank unless all of them pass the same first round."""
    require_agreement(
        communicator,
        "the order in which they go through the dataset, so that samples would be lost and repeated",
        [("hash of the first global batch", hashlib.sha256(repr(batches).encode()).hexdigest())],
        remedy="A sampler must yield the same on every rank: let it shuffle by a torch.Generator in its attribute "
        "'generator', or by its epoch. A DistributedSampler is not needed here",
    )
