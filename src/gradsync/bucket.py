"""One flat buffer of gradients, a view per parameter, and its life.

::

    FILLING ──all slots landed──▶ READY ──start──▶ REDUCING ──finish──▶ REDUCED ──reopen──▶ FILLING

*Landing* notes that a gradient is there, by counting or by looking, and does no tensor work. *Gathering* moves
what autograd left outside into the buffer, all gradients of the bucket in one batched operation, and makes
``parameter.grad`` a view of the buffer, where later micro-batches accumulate in place. So there is one copy of the
gradients, and the wire reads it where it lies.
"""

import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch

from gradsync.bucket_layout import BucketPlan, ParameterSpec, Slot
from gradsync.communicator import Communicator
from gradsync.errors import LateGradientError, MisuseError

__all__ = ["Bucket", "BucketState", "gradients_of"]

# Above this mean size of a slot it is cheaper to scale each gradient while it is copied than to scale the whole
# bucket in a further pass; below it the cost of an operation per gradient weighs more than the pass.
SCALED_COPY_BYTES = 32 * 1024


LATE_REMEDY = (
    "Reentrant activation checkpointing of a parameter that is used in several places does that. Pass "
    "schedule='bucketed', or use_reentrant=False to the checkpoint"
)


class BucketState(enum.Enum):
    """Where in its life a bucket is."""

    FILLING = "filling"
    READY = "ready"
    REDUCING = "reducing"
    REDUCED = "reduced"


class Bucket:
    """The gradients of the parameters in one :class:`BucketPlan`."""

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        communicator: Communicator,
    ) -> None:
        self.index = plan.index
        self.plan = plan
        self.parameters = [parameters[slot.parameter] for slot in plan.slots]
        self.specs = [specs[slot.parameter] for slot in plan.slots]
        self.buffer = communicator.allocate(plan.numel, plan.dtype, plan.device)
        self.payload = self.buffer[: plan.payload]
        self.tail = self.buffer[plan.payload :]
        self.flags = self.tail[: len(plan.slots)]
        self.ballot = self.tail[len(plan.slots) :]
        self.views = [_view(self.buffer, slot, spec) for slot, spec in zip(plan.slots, self.specs, strict=True)]
        self.state = BucketState.FILLING
        self.arrivals_expected = [1] * len(plan.slots)
        self._waiting = list(self.arrivals_expected)
        self._missing = len(plan.slots)
        self._sighted: list[torch.Tensor | None] = []
        self._empty: list[int] = []
        self._absent: frozenset[int] = frozenset()
        self._compacted: torch.Tensor | None = None
        self._version = 0
        self._scaled_copies = plan.payload * plan.dtype.itemsize > SCALED_COPY_BYTES * len(plan.slots)
        self.before_gather: Callable[[Sequence[torch.nn.Parameter]], None] | None = None

    # -- landing -----------------------------------------------------------------------------------------------

    def land(self, slot: int) -> bool:
        """Count a gradient of ``slot``; True when the bucket has become full by it. The hot path."""
        left = self._waiting[slot] - 1
        self._waiting[slot] = left
        if left == 0:
            self._missing -= 1
            if not self._missing:
                self.state = BucketState.READY
                return True
        elif left < 0:
            self._check_surplus(slot, left)
        return False

    def land_by_sight(self) -> bool:
        """True when every slot has a gradient. Says something only if none had one when the backward began."""
        if self.state is not BucketState.FILLING:
            return False
        gradients = list(gradients_of(self.parameters))
        if any(map(operator.is_, gradients, repeat(None))) and any(
            gradient is None and slot not in self._absent for slot, gradient in enumerate(gradients)
        ):
            return False
        self.state = BucketState.READY
        self._sighted = gradients
        return True

    def _check_surplus(self, slot: int, left: int) -> None:
        """A gradient that nobody waited for is fine as long as the bucket lies still."""
        if slot in self._absent:
            self._refuse_absent(slot)
        if self.state is BucketState.REDUCING:
            raise LateGradientError(
                f"parameter {self.specs[slot].name!r} received {self.arrivals_expected[slot] - left} gradients in one "
                f"backward, but its bucket {self.index} was started after {self.arrivals_expected[slot]}, as many as "
                f"in earlier backwards. {LATE_REMEDY}"
            )

    # -- gathering: the batched path ---------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, scale: float) -> None:
        """Bring every gradient of the bucket into its slot, multiplied by ``scale``, and attach the views."""
        if self.before_gather is not None:
            self.before_gather(self.parameters)
        loose, targets = self._take_loose()
        if not loose:
            self._scale_in_place(scale)
        elif self._scaled_copies and scale != 1.0 and len(loose) == len(self.views):
            _copy_scaled(targets, loose, scale)
        else:
            _copy(targets, loose)
            self._scale_in_place(scale)
        for slot in self._absent.difference(self._empty):
            self._refuse_absent(slot)

    def _take_loose(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Gradients that lie outside, and the views that take their place. Slots without a gradient are zeroed."""
        gradients = self._sighted or list(gradients_of(self.parameters))
        views = self.views
        self._empty, self._sighted = [], []
        if not any(map(operator.is_, gradients, views)) and not any(map(operator.is_, gradients, repeat(None))):
            # All lie outside: the rule after zero_grad().
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.grad = view
            return gradients, views
        loose: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for slot, (parameter, gradient, view) in enumerate(zip(self.parameters, gradients, views, strict=True)):
            if gradient is None:
                self._empty.append(slot)
            elif gradient is not view:
                loose.append(gradient)
                targets.append(view)
                parameter.grad = view
        if self._empty:
            torch._foreach_zero_([views[slot] for slot in self._empty])
        return loose, targets

    def _scale_in_place(self, scale: float) -> None:
        if scale != 1.0:
            self.payload.mul_(scale)

    # -- the wire ----------------------------------------------------------------------------------------------

    def _refuse_absent(self, slot: int) -> None:
        raise MisuseError(
            f"parameter {self.specs[slot].name!r} received a gradient although its layer was announced as dropped "
            "on all ranks. Run a droppable layer only through its LayerDrop"
        )

    def announce_absent(self, slots: frozenset[int]) -> None:
        """All ranks know that nobody will have gradients for these slots: they are left off the wire.

        The bucket no longer waits for them. A gradient that comes all the same is refused.
        """
        for slot in slots - self._absent:
            if self._waiting[slot] > 0:
                self._waiting[slot] = 0
                self._missing -= 1
        self._absent = slots
        if not self._missing and self.state is BucketState.FILLING:
            self.state = BucketState.READY

    @property
    def has_wire(self) -> bool:
        """False when there is nothing to send: every slot is absent and the ballot rides elsewhere."""
        return len(self._absent) < len(self.views) or self.plan.ballot > 0

    @torch.no_grad()
    def load_tail(self, *, failed_rank: int | None = None) -> None:
        """Write the flags, and the vote of this rank where the ballot is here."""
        self.flags.fill_(1)
        if self._empty:
            self.flags[self._empty] = 0
        if self.plan.ballot:
            self.ballot.zero_()
            if failed_rank is not None:
                self.ballot[failed_rank] = 1

    @torch.no_grad()
    def wire(self) -> torch.Tensor:
        """The flat tensor that crosses the wire: the whole buffer, or what is left of it without absent slots."""
        if not self._absent:
            return self.buffer
        if self._compacted is None:
            self._compacted = torch.cat([self.buffer[start:end] for start, end in self._segments()])
        return self._compacted

    def _segments(self) -> list[tuple[int, int]]:
        """Runs of the buffer that are sent, the tail included."""
        segments: list[tuple[int, int]] = []
        starts = [slot.offset for slot in self.plan.slots] + [self.plan.payload]
        for number in range(len(self.plan.slots)):
            if number in self._absent:
                continue
            start, end = starts[number], starts[number + 1]
            if segments and segments[-1][1] == start:
                start = segments.pop()[0]
            segments.append((start, end))
        tail = (self.plan.payload, self.plan.numel)
        if segments and segments[-1][1] == tail[0]:
            tail = (segments.pop()[0], tail[1])
        return [*segments, tail]

    def started(self) -> None:
        """The bucket is on the wire: from now on nobody may write into it."""
        self.state = BucketState.REDUCING
        self._version = self.buffer._version

    @property
    def touched(self) -> bool:
        """Whether anybody wrote into the bucket since it started. Autograd does so through the views, which share the
        version counter of the buffer."""
        return self.buffer._version != self._version

    def refuse_touched(self) -> None:
        raise LateGradientError(
            f"a parameter of bucket {self.index} ({self.specs[0].name!r} … {self.specs[-1].name!r}) received a "
            f"further gradient after the bucket had started. {LATE_REMEDY}"
        )

    @torch.no_grad()
    def finish(self) -> None:
        """After the reduction: parameters that got no gradient here get the mean, if any rank had one."""
        if self._compacted is not None:
            offset = 0
            for start, end in self._segments():
                self.buffer[start:end].copy_(self._compacted[offset : offset + end - start])
                offset += end - start
            self._compacted = None
        if self._empty and self.has_wire:
            # The only place where the host reads what came over the wire, and only on a rank with unused parameters.
            somebody_has = (self.flags > 0).tolist()
            for slot in self._empty:
                if somebody_has[slot]:
                    self.parameters[slot].grad = self.views[slot]
        self.state = BucketState.REDUCED

    def reopen(self) -> None:
        """Make ready for the next backward."""
        self._waiting[:] = self.arrivals_expected
        self._missing = len(self._waiting)
        self._empty, self._sighted = [], []
        self._absent = frozenset()
        self._compacted = None
        self.state = BucketState.FILLING


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor | None]:
    """Their ``.grad``. Thousands of small parameters make the loops over them count, so these run in C."""
    return map(_grad, parameters)


_grad: Callable[[torch.nn.Parameter], torch.Tensor | None] = operator.attrgetter("grad")


def _view(buffer: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    flat = buffer[slot.offset : slot.offset + slot.numel]
    if spec.dtype.is_complex:
        flat = torch.view_as_complex(flat.view(-1, 2))
    return flat.as_strided(spec.shape, spec.stride)


def _copy(targets: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    try:
        torch._foreach_copy_(targets, gradients)
    except (RuntimeError, NotImplementedError):
        # A sparse gradient among them. Testing every gradient for it would cost more than this rare second try.
        for target, gradient in zip(targets, gradients, strict=True):
            target.copy_(_dense(gradient))


def _copy_scaled(targets: list[torch.Tensor], gradients: list[torch.Tensor], scale: float) -> None:
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient.dtype == target.dtype and gradient.layout == torch.strided:
            torch.mul(gradient, scale, out=target)
        else:
            target.copy_(_dense(gradient)).mul_(scale)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout == torch.strided else gradient.to_dense()
