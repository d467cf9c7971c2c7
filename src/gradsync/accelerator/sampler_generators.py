"""The random numbers behind a loader's order: who draws them, and how all ranks get the same."""

import base64
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["SamplerGenerators", "decoded", "draw_seed", "generators_replaced"]


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
