"""The current buckets: built from the agreed gradient order, and rebuilt when ranks agree on a different one.

Buckets are cut from the order in which gradients become ready, so that they fill one after the other and start early.
It is learned from the first synchronized backward, and checked again after 2, 4, 8, … and then every 256 windows: ranks
then know by counting alone that a small collective is due, and nothing is exchanged in between. The collectives are in
:mod:`gradsync.core.engine.exchange`.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.chunk import Chunk
from gradsync.core.bucket.control_flags import Requests
from gradsync.core.bucket.layout import BucketCaps, BucketLayout, ParameterSpec, plan_layout
from gradsync.core.bucket.sizes import BucketTuner

__all__ = ["Arrangement", "GradientOrder", "Place"]

CHECK_EVERY = 256

# A parameter not seen in this many checks counts as unused: it moves to the end, where it delays nothing.
CHECKS_REMEMBERED = 4


class GradientOrder:
    """The agreed order over parameter indices, and how it changes."""

    def __init__(self, count: int) -> None:
        # The initial guess: gradients come in about the reverse of the order of registration.
        self.order = list(reversed(range(count)))
        self.learned = False
        self.running = False
        self._windows = 0
        # Whether the ranks must now agree on the order. The same answer on all ranks.
        self.due = False
        self._observed: list[int] = []
        self._seen: deque[set[int]] = deque(maxlen=CHECKS_REMEMBERED)

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, as plain values."""
        return {
            "order": list(self.order),
            "learned": self.learned,
            "windows": self._windows,
            "observed": list(self._observed),
            "seen": [sorted(seen) for seen in self._seen],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was learned. All ranks must load the same."""
        self.order = list(state["order"])
        self.learned, self._windows = state["learned"], state["windows"]
        self._observed = list(state["observed"])
        self._seen = deque(map(set, state["seen"]), maxlen=CHECKS_REMEMBERED)

    # Windows are counted when ranks negotiate: all do, even one whose backward fails, so that all counts agree.

    def window_began(self) -> None:
        """Count the window that ranks negotiate for."""
        self.due = self._windows > 0 and _is_checked(self._windows)
        self._windows += 1
        self.running = True

    def window_ended(self) -> None:
        """Note that no window is running any more, whatever its outcome."""
        self.running = False

    def observe(self, arrivals: list[int]) -> None:
        """Note the order of the running window, which was synchronized."""
        self._observed = list(arrivals)
        self._seen.append(set(arrivals))

    @property
    def windows_before(self) -> int:
        """The number of windows before the running one."""
        return self._windows - 1

    @property
    def observing(self) -> bool:
        """Whether the running window, or else the next, is one that is observed."""
        return _is_checked(self._windows if self.running else self._windows + 1)

    @property
    def observed(self) -> bool:
        """Whether anything was observed. A window that failed teaches nothing."""
        return bool(self._seen)

    def keep(self) -> None:
        """Keep the current order, whatever was observed. All ranks must call this alike."""
        self.due = False

    def propose(self) -> list[int]:
        """The order by what this rank has seen, for ranks to agree on one."""
        self.due = False
        self.learned = True
        return merge_order(self.order, self._observed, set().union(*self._seen))

    def adopt(self, agreed: list[int]) -> bool:
        """Take the agreed order. True when it differs."""
        changed = agreed != self.order
        self.order = agreed
        return changed


def _is_checked(window: int) -> bool:
    return window % CHECK_EVERY == 0 if window >= CHECK_EVERY else window & (window - 1) == 0


def merge_order(previous: Sequence[int], observed: Sequence[int], seen: Collection[int]) -> list[int]:
    """The observed order; parameters not seen this time stay right after the one that preceded them before.

    Unused parameters would otherwise wander to the end and back with every draw of a dropped layer; those that are not
    in ``seen``, a longer memory, do go to the end. A parameter observed several times counts at its last appearance:
    only then is its gradient whole.
    """
    last_seen = {parameter: place for place, parameter in enumerate(observed)}
    merged = sorted(last_seen, key=last_seen.__getitem__)
    place_after: dict[int, list[int]] = {}
    leading: list[int] = []
    trailing: list[int] = []
    anchor: int | None = None
    for parameter in previous:
        if parameter in last_seen:
            anchor = parameter
        elif parameter not in seen:
            trailing.append(parameter)
        elif anchor is None:
            leading.append(parameter)
        else:
            place_after.setdefault(anchor, []).append(parameter)
    result = list(leading)
    for parameter in merged:
        result.append(parameter)
        result.extend(place_after.get(parameter, ()))
    return result + trailing


class Place(NamedTuple):
    """The place of a parameter's gradient: its bucket, the chunk there, and its slot in the chunk."""

    bucket: Bucket
    chunk: Chunk
    slot: int


class Arrangement:
    """Maps parameters to their places in buckets. ``places`` has None for a parameter that is in no bucket.

    Buckets start with the sizes ``caps``, which ``tuner`` may change in the first windows; ``allocate`` makes their
    memory, and ``before_gather`` is called with the parameters of a chunk.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        *,
        world_size: int,
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor],
        caps: BucketCaps,
        tuner: BucketTuner | None = None,
        before_gather: Callable[[Sequence[torch.nn.Parameter]], None] | None = None,
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
        self.caps = caps
        self.specs = specs
        self.tuner = tuner
        self._world_size, self._allocate, self._before_gather = world_size, allocate, before_gather
        # Which parameters ranks have agreed to train.
        self.trainable = [parameter.requires_grad for parameter in parameters]
        # Whether ranks agreed on the trained parameters since the buckets were made.
        self.stale = False
        self._absent: frozenset[int] = frozenset()
        self._multiplicity = [1] * len(parameters)

    @property
    def trains_more(self) -> bool:
        """Whether a parameter is trained here that was not when ranks last agreed on it."""
        return any(self.parameters[index].requires_grad for index in self._frozen)

    @property
    def outside_indices(self) -> list[int]:
        """The indices of the parameters whose gradients have no place in a bucket."""
        return [*self.layout.sparse, *(index for index in self._frozen if self.parameters[index].requires_grad)]

    def outside_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients have no place in a bucket, themselves."""
        return [self.parameters[index] for index in self.outside_indices]

    def newly_trained_gradients(self) -> list[tuple[torch.Tensor, int]]:
        """The gradients of parameters that are trained here and have no place yet, and their versions.

        No hook reports such a gradient: comparing with what this returned before a backward shows whether one came.
        """
        frozen = (self.parameters[index] for index in self._frozen)
        gradients = (parameter.grad for parameter in frozen if parameter.requires_grad)
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
            "trainable": list(self.trainable),
            "multiplicity": list(self._multiplicity),
            "tuned": 0 if self.tuner is None else self.tuner.rounds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lay out buckets as they were; :meth:`build` must follow."""
        self.caps = BucketCaps(caps=tuple(state["caps"]), from_the_end=state["from_the_end"])
        self.order.load_state_dict(state["order"])
        self.trainable = list(state["trainable"])
        self._multiplicity = list(state["multiplicity"])
        if self.tuner is not None:
            self.tuner.rounds = state.get("tuned", 0)
        self.repeats = max(self._multiplicity, default=1) > 1

    def build(self) -> None:
        """Plan the layout and make buckets for it. Only gradients that are still needed may hold the old ones."""
        self.layout = self._plan(self.caps)
        self.stale = False
        self.buckets = []
        self.places = [None] * len(self.parameters)
        for plan in self.layout.buckets:
            bucket = Bucket(plan, self.parameters, self.specs, self._allocate)
            if self._before_gather is not None:
                bucket.before_gather(self._before_gather)
            self.buckets.append(bucket)
            for number, slot in enumerate(plan.slots):
                chunk, slot_in_chunk = bucket.place_of(number)
                self.places[slot.parameter] = Place(bucket, chunk, slot_in_chunk)
        self.expect_arrivals()
        self._frozen = [n for n, is_trained in enumerate(self.trainable) if not is_trained and n not in self.taken]

    def expect_arrivals(self) -> bool:
        """Have buckets wait for as many gradients of each parameter as were seen: True if that has changed.

        Each rank does this on its own: nothing is sent, and buckets stay where they are.
        """
        changed = False
        for place, expected in zip(self.places, self._multiplicity, strict=True):
            if place is not None and place.chunk.arrivals_expected[place.slot] != expected:
                place.chunk.arrivals_expected[place.slot] = expected
                changed = True
        for bucket in self.buckets if changed else ():
            bucket.reopen()
        return changed

    def train(self, agreed: Sequence[int]) -> bool:
        """Note which parameters ranks have agreed to train: True if that has changed."""
        before = self.trainable
        self.trainable = [bool(flag) and index not in self.taken for index, flag in enumerate(agreed)]
        return self.trainable != before

    def tune(self, times: list[float]) -> bool:
        """End the tuner's trial, which took these ``times`` over all ranks: True when buckets must be rebuilt."""
        assert self.tuner is not None
        caps = self.tuner.propose(times, self.caps, self._sizes)
        changed = caps != self.caps
        self.caps = caps
        # The last round ends the measurement, which the engine arranges when it builds.
        return changed or self.tuner.finished

    def _sizes(self, caps: BucketCaps) -> list[int]:
        """The bucket sizes in bytes that ``caps`` would make."""
        return [plan.numel * plan.dtype.itemsize for plan in self._plan(caps).buckets]

    def _plan(self, caps: BucketCaps) -> BucketLayout:
        trained = [index for index in self.order.order if self.trainable[index]]
        control = self._world_size + Requests.PLACES
        return plan_layout(self.specs, trained, caps, control=control, shares=self.shares, unit=self.unit)

    def restore_arrivals(self, arrivals: Iterable[int]) -> None:
        """Mark these gradients as arrived in the new buckets, too, after a rebuild in the middle of a backward."""
        for index in arrivals:
            place = self.places[index]
            if place is not None:
                place.chunk.mark_ready(place.slot)

    def mark_absent(self, agreed: Iterable[int]) -> None:
        """Leave these parameters out of what is sent: no rank will have gradients for them."""
        self._absent = frozenset(agreed)
        self.restore_absent()

    def restore_absent(self) -> None:
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
        """Forget what belongs to the running window: it is over, whatever its outcome."""
        self.order.window_ended()
        self._absent = frozenset()

    def take_out(self, indices: Iterable[int]) -> None:
        """Give these parameters up to another synchronizer."""
        self.taken.update(indices)
        self.trainable = [flag and index not in self.taken for index, flag in enumerate(self.trainable)]
