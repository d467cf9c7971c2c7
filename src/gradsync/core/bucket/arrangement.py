"""The current buckets: built from the agreed gradient order, and rebuilt when ranks agree on a different one."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.communicator import Communicator
from gradsync.communicator.agreement import agree_on_absent
from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.chunk import Chunk
from gradsync.core.bucket.layout import BucketCaps, BucketLayout, ParameterSpec, plan_layout
from gradsync.core.bucket.order import GradientOrder
from gradsync.core.bucket.requests import Requests
from gradsync.core.bucket.tuner import BucketTuner

__all__ = ["Arrangement", "BucketOptions", "Place"]

# The place of a parameter's gradient: its bucket, the chunk there, its index in the chunk.
Place = tuple[Bucket, Chunk, int]


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """Options that buckets are built with: the initial ``caps``, which ``tuner`` may change in the first windows."""

    communicator: Communicator
    caps: BucketCaps
    tuner: BucketTuner | None = None
    before_gather: Callable[[Sequence[torch.nn.Parameter]], None] | None = None


class Arrangement:
    """Maps parameters to their places in buckets. ``places`` has None for a parameter that is in no bucket."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], specs: Sequence[ParameterSpec], options: BucketOptions
    ) -> None:
        self.parameters = parameters
        self.order = GradientOrder(len(parameters))
        self.repeats = False
        self.layout = BucketLayout(buckets=(), sparse=())
        self.buckets: list[Bucket] = []
        self.places: list[Place | None] = [None] * len(parameters)
        self.taken: set[int] = set()
        # The number of shares that buckets are divided into, and the unit their sizes are a multiple of.
        self.shares = self.unit = 1
        # The only place that knows how large buckets may be: the tuner and a loaded state change it.
        self.caps = options.caps
        self.specs = specs
        self._communicator = options.communicator
        self._tuner = options.tuner
        self._before_gather = options.before_gather
        self._trainable = [parameter.requires_grad for parameter in parameters]
        # Whether ranks agreed on the trained parameters since the buckets were made.
        self._stale = False
        self._absent: frozenset[int] = frozenset()
        self._multiplicity = [1] * len(parameters)

    @property
    def trainable(self) -> list[bool]:
        """Which parameters ranks have agreed to train."""
        return self._trainable

    @property
    def trains_more(self) -> bool:
        """Whether a parameter is trained here that was not when ranks last agreed on it."""
        return any(parameter.requires_grad for parameter in self._frozen)

    def outside(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients have no place in a bucket."""
        sparse = [self.parameters[index] for index in self.layout.sparse]
        return sparse + [parameter for parameter in self._frozen if parameter.requires_grad]

    def gradients_outside(self) -> list[tuple[int, str, torch.Tensor | None]]:
        """Their gradients, each with the index and the name of its parameter."""
        outside = {id(parameter) for parameter in self.outside()}
        return [
            (index, self.specs[index].name, parameter.grad)
            for index, parameter in enumerate(self.parameters if outside else ())
            if id(parameter) in outside
        ]

    def unbucketed(self) -> list[tuple[torch.Tensor, int]]:
        """The gradients of parameters that are trained here and have no place yet, and their versions.

        No hook reports such a gradient: comparing with what this returned before a backward shows whether one came.
        """
        gradients = (parameter.grad for parameter in self._frozen if parameter.requires_grad)
        return [(gradient, gradient._version) for gradient in gradients if gradient is not None]

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        # A plain loop: over thousands of parameters it is a quarter faster than any() with map().
        for parameter in self.parameters:  # noqa: SIM110
            if parameter.grad is not None:
                return True
        return False

    def drop_gradients(self) -> None:
        """Drop all gradients, except those of parameters that another synchronizer has taken."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.taken:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The layout and how it was determined, as plain values."""
        return {
            "caps": list(self.caps.caps),
            "from_the_end": self.caps.from_the_end,
            "order": self.order.state_dict(),
            "trainable": list(self._trainable),
            "multiplicity": list(self._multiplicity),
            "tuned": 0 if self._tuner is None else self._tuner.rounds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lay out buckets as they were; :meth:`build` must follow."""
        self.caps = BucketCaps(caps=tuple(state["caps"]), from_the_end=state["from_the_end"])
        self.order.load_state_dict(state["order"])
        self._trainable = list(state["trainable"])
        self._multiplicity = list(state["multiplicity"])
        if self._tuner is not None:
            self._tuner.rounds = state.get("tuned", 0)
        self.repeats = max(self._multiplicity, default=1) > 1

    def build(self) -> None:
        """Plan the layout and make buckets for it. Only gradients that are still needed may hold the old ones."""
        self.layout = self._plan(self.caps)
        self._stale = False
        self.buckets = []
        self.places = [None] * len(self.parameters)
        for plan in self.layout.buckets:
            bucket = Bucket(plan, self.parameters, self.specs, self._communicator)
            if self._before_gather is not None:
                bucket.before_gather(self._before_gather)
            self.buckets.append(bucket)
            for number, slot in enumerate(plan.slots):
                chunk, place = bucket.place_of(number)
                self.places[slot.parameter] = (bucket, chunk, place)
        self.expect_arrivals()
        self._frozen = [
            parameter
            for index, parameter in enumerate(self.parameters)
            if not self._trainable[index] and index not in self.taken
        ]

    def expect_arrivals(self) -> bool:
        """Have buckets wait for as many gradients of each parameter as were seen: True if that has changed.

        Each rank does this on its own: nothing is sent, and buckets stay where they are.
        """
        changed = False
        for place, expected in zip(self.places, self._multiplicity, strict=True):
            if place is not None and place[1].arrivals_expected[place[2]] != expected:
                place[1].arrivals_expected[place[2]] = expected
                changed = True
        for bucket in self.buckets if changed else ():
            bucket.reopen()
        return changed

    def agree(self, *, hold_order: bool = False) -> bool:
        """Negotiate, if it is time: which parameters are trained, and in which order gradients come.

        Collective. True when buckets must be rebuilt. With ``hold_order`` a different order is no reason to.
        """
        changed = self._stale
        self._stale = False
        if not self.order.due:
            return changed
        changed = bool(self._agree_on_trained()) or changed
        if hold_order:
            self.order.keep()
            return changed
        return self.order.agree(self._communicator) or changed

    def take_in(self) -> list[int]:
        """Agree on parameters that some rank trains and that have no place; they get one in the next window.

        Collective.
        """
        before = self._trainable
        self._stale = self._agree_on_trained() or self._stale
        return [index for index, trained in enumerate(self._trainable) if trained and not before[index]]

    def _agree_on_trained(self) -> bool:
        communicator = self._communicator
        trainable = torch.tensor(
            [parameter.requires_grad for parameter in self.parameters], dtype=torch.int32, device=communicator.device
        )
        communicator.all_reduce(trainable, "max").wait()
        before = self._trainable
        self._trainable = [bool(flag) and index not in self.taken for index, flag in enumerate(trainable.tolist())]
        return self._trainable != before

    def tune(self) -> bool:
        """Switch to different caps if the measurements favour them: True when buckets must be rebuilt. Collective."""
        tuner = self._tuner
        if tuner is None or not tuner.due(self.order.windows_before):
            return False
        caps = tuner.propose(self._communicator, self.caps, self._sizes)
        changed = caps != self.caps
        self.caps = caps
        # The last round ends the measurement, which the engine arranges when it builds.
        return changed or tuner.finished

    def _sizes(self, caps: BucketCaps) -> list[int]:
        """The bucket sizes in bytes that ``caps`` would make."""
        return [plan.numel * plan.dtype.itemsize for plan in self._plan(caps).buckets]

    def _plan(self, caps: BucketCaps) -> BucketLayout:
        trained = [index for index in self.order.order if self._trainable[index]]
        ballot = self._communicator.world_size + Requests.PLACES
        return plan_layout(self.specs, trained, caps, ballot=ballot, shares=self.shares, unit=self.unit)

    def land_again(self, arrivals: Iterable[int]) -> None:
        """After a rebuild in the middle of a backward: mark what had arrived before as arrived here, too."""
        for index in arrivals:
            place = self.places[index]
            if place is not None:
                place[1].land(place[2])

    def mark_absent(self, announced: Iterable[int]) -> None:
        """Do not send gradients that no rank will have: absent both in ``announced`` and on all others. Collective."""
        # Ranks may have run different forwards, or none: only what all of them left out counts.
        here = [index for index in announced if self.parameters[index].grad is None]
        self._absent = frozenset(agree_on_absent(self._communicator, here, len(self.parameters)))
        self.mark_again()

    def mark_again(self) -> None:
        """Restore the absent marks of buckets that were reopened in the window, which all ranks agreed on."""
        for bucket in self.buckets if self._absent else ():
            absent = frozenset(n for n, slot in enumerate(bucket.plan.slots) if slot.parameter in self._absent)
            if absent:
                bucket.announce_absent(absent)

    def window_finished(self, arrivals: list[int]) -> None:
        """Learn from the window that was just synchronized: the order, and how often each parameter's hook ran."""
        if self.order.observing:
            self.order.observe(arrivals)
            for index, count in Counter(arrivals).items():
                self._multiplicity[index] = count
            self.repeats = max(self._multiplicity) > 1

    def window_ended(self) -> None:
        """The window is over, whatever its outcome."""
        self.order.window_ended()
        self._absent = frozenset()

    def take_out(self, indices: Iterable[int]) -> None:
        """Give these parameters up to another synchronizer."""
        self.taken.update(indices)
        self._trainable = [flag and index not in self.taken for index, flag in enumerate(self._trainable)]
