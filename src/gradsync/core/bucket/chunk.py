"""A chunk: a run of neighbouring slots that is gathered in one operation, as soon as its gradients are there.

Autograd puts each gradient in memory of its own. Moving each one separately would cost one operation per gradient;
moving a whole bucket at once would keep two copies of a large bucket alive. So a bucket is gathered in chunks (a
quarter of a megabyte on the CPU): many small gradients in one batched operation, large ones one by one.

Gathered gradients are attached: ``parameter.grad`` becomes a view of the bucket, where later micro-batches accumulate
in place. They are *scaled* when they have also been multiplied by their share of the mean. This happens once per
synchronization, in the same pass where that is possible.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch

from gradsync.base.errors import LateGradientError, MisuseError

__all__ = ["LATE_REMEDY", "Chunk", "gradients_of"]

# Above this mean size it is cheaper to scale each gradient while it is copied than to scale the chunk in a further
# pass; below it the cost of an operation per gradient weighs more than the pass.
SCALED_COPY_BYTES = 32 * 1024

LATE_REMEDY = (
    "Reentrant activation checkpointing of a parameter that is used in several places does that. Pass "
    "schedule='bucketed', or use_reentrant=False to the checkpoint"
)


class Chunk:
    """The gradients of ``parameters``, each with its name and the view of the bucket that becomes its gradient.

    The views fill ``memory``; the first has slot ``first`` of the bucket.
    ``flags`` tell the other ranks which slots have a gradient here; see :mod:`gradsync.core.bucket.layout`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        views: Sequence[torch.Tensor],
        memory: torch.Tensor,
        flags: torch.Tensor,
        first: int,
    ) -> None:
        self.parameters, self.names, self.views = list(parameters), list(names), list(views)
        self.memory, self.flags, self.first = memory, flags, first
        # Where the views belong: see `reclaim_views`.
        self._own_memory, self._addresses = [view.data for view in self.views], list(map(_address, self.views))
        self.arrivals_expected = [1] * len(self.parameters)
        self.before_gather: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
        self._waiting = list(self.arrivals_expected)
        self._scaled_copies = memory.nbytes > SCALED_COPY_BYTES * len(self.parameters)
        self.reopen()

    def reopen(self) -> None:
        """Prepare for the next backward."""
        self._waiting[:] = self.arrivals_expected
        self._missing = len(self._waiting)
        self._found_ready: list[torch.Tensor | None] = []
        self._all_unattached = False
        self.full = False
        self.scaled = False
        self.empty: list[int] = []
        self.absent: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        state = "scaled" if self.scaled else "full" if self.full else f"{self._missing} missing"
        return f"Chunk({self.names[0]!r} … {self.names[-1]!r}: {len(self.names)} gradients, {state})"

    # -- arrival -----------------------------------------------------------------------------------------------

    def mark_ready(self, slot: int) -> bool:
        """Count a gradient of the chunk's ``slot``; returns whether this makes the chunk full. The hot path."""
        left = self._waiting[slot] - 1
        self._waiting[slot] = left
        if left == 0:
            self._missing -= 1
            if not self._missing:
                self.full = True
                return True
        elif left < 0:
            self._check_surplus(slot, left)
        return False

    def check_all_ready(self) -> bool:
        """Whether every slot has a gradient now. Valid only if none had one when the backward began."""
        if self.full:
            return False
        gradients = list(map(_grad, self.parameters))
        complete = not any(map(operator.is_, gradients, repeat(None)))
        if not complete and any(g is None and slot not in self.absent for slot, g in enumerate(gradients)):
            return False
        self._found_ready = gradients
        self._all_unattached = complete
        self.full = True
        return True

    def expect_absent(self, slots: frozenset[int]) -> None:
        """Do not wait for these slots: no rank will have gradients for them."""
        for slot in slots - self.absent:
            if self._waiting[slot] > 0:
                self._waiting[slot] = 0
                self._missing -= 1
        self.absent = slots
        self.full = self.full or not self._missing

    def _check_surplus(self, slot: int, left: int) -> None:
        """Refuse a gradient that was not expected if the chunk is already scaled, or the slot absent."""
        if slot in self.absent:
            self._refuse_absent(slot)
        if self.scaled:
            raise LateGradientError(
                f"parameter {self.names[slot]!r} received {self.arrivals_expected[slot] - left} gradients in one "
                f"backward, but was on its way to the other ranks after {self.arrivals_expected[slot]}, as many as in "
                f"earlier backwards. {LATE_REMEDY}"
            )

    def _refuse_absent(self, slot: int) -> None:
        raise MisuseError(
            f"parameter {self.names[slot]!r} received a gradient although its layer was announced as dropped on all "
            "ranks. Run a droppable layer only through its LayerDrop"
        )

    def _refuse_converted(self) -> None:
        """Refuse parameters that cannot have these views as gradients any more."""
        for parameter, name, view in zip(self.parameters, self.names, self.views, strict=True):
            now, before = [(each.device, each.shape) for each in (parameter, view)]
            if parameter.grad_dtype != view.dtype or now != before:
                raise MisuseError(
                    f"parameter {name!r} was converted after its model was wrapped: its gradient was planned as "
                    f"{view.dtype} of shape {tuple(view.shape)} on {view.device}, and it has {parameter.grad_dtype} of "
                    f"shape {tuple(parameter.shape)} on {parameter.device} now. Convert a model before you wrap it, or "
                    "wrap it again"
                )

    # -- gathering ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self) -> None:
        """Copy gradients that are not attached yet into their slots, and attach the views."""
        unattached, targets = self._take_unattached()
        if unattached:
            _copy(targets, unattached)

    @torch.no_grad()
    def gather_scaled(self, scale: float) -> None:
        """Gather, multiply by ``scale`` and set the flags, unless this was done already."""
        if self.scaled:
            return
        self.scaled = True
        unattached, targets = self._take_unattached()
        if self.empty:
            self.flags[self.empty] = 0
        if scale != 1.0 and self._scaled_copies and len(unattached) == len(self.views):
            _copy_scaled(targets, unattached, scale)
            return
        if unattached:
            _copy(targets, unattached)
        if scale != 1.0:
            self.memory.mul_(scale)

    def reclaim_views(self) -> None:
        """Return views that were given other memory to the bucket, with the values that they have there.

        Whoever assigns ``parameter.grad.data`` does that, as ``module.to()`` does for every gradient.
        """
        for parameter, view, memory in zip(self.parameters, self.views, self._own_memory, strict=True):
            if _address(view) != _address(memory):
                values, view.data = view.data, memory
                if parameter.grad is view:
                    view.copy_(values)

    def _take_unattached(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Attach the views; returns the gradients that were not attached yet, and the views that replace them.

        Slots without a gradient are zeroed.
        """
        if self.before_gather is not None:
            self.before_gather(self.parameters)
        if list(map(_address, self.views)) != self._addresses:
            self.reclaim_views()
        gradients = self._found_ready or list(map(_grad, self.parameters))
        views = self.views
        # The rule after zero_grad(). What the batched check found has come in this backward, so none of it is a view.
        all_unattached = self._all_unattached or not (
            any(map(operator.is_, gradients, views)) or any(map(operator.is_, gradients, repeat(None)))
        )
        self._found_ready, self.empty, self._all_unattached = [], [], False
        try:
            if all_unattached:
                for parameter, view in zip(self.parameters, views, strict=True):
                    parameter.grad = view
                unattached, targets = gradients, views
            else:
                unattached, targets = self._take_some(gradients)
        except RuntimeError:
            self._refuse_converted()
            raise
        for slot in self.absent.difference(self.empty):
            self._refuse_absent(slot)
        return unattached, targets

    def _take_some(self, gradients: list[torch.Tensor | None]) -> tuple[list[Any], list[torch.Tensor]]:
        unattached: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for slot, (parameter, gradient, view) in enumerate(zip(self.parameters, gradients, self.views, strict=True)):
            if gradient is None:
                self.empty.append(slot)
            elif gradient is not view:
                unattached.append(gradient)
                targets.append(view)
                parameter.grad = view
        if self.empty:
            torch._foreach_zero_([self.views[slot] for slot in self.empty])
        return unattached, targets


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.Tensor | None]:
    """The gradients of the parameters. With thousands of small ones the loops over them matter: these run in C."""
    return map(_grad, parameters)


_grad: Callable[[torch.nn.Parameter], torch.Tensor | None] = operator.attrgetter("grad")
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


def _copy(targets: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    try:
        torch._foreach_copy_(targets, gradients)
    except (RuntimeError, NotImplementedError):
        # One of them is sparse. Checking every gradient would cost more than this rare second attempt.
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
