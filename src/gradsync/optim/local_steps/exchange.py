"""The exchange of one round: averages buckets of parameters, or of their differences from their anchors.

The buckets are of the kind that gradients travel in, so that every reduction can carry them. They are filled here, not
by autograd, and the model's gradients are left alone.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket, BucketCaps, BucketLayout, BucketPlan, ParameterSpec, plan_layout
from gradsync.core.bucket.precise import widened
from gradsync.core.reduction import Reduction

__all__ = ["Exchange", "Fragment", "put_down", "wide"]

# No computation runs meanwhile that a smaller first bucket could hide behind; this is torch's own size.
CAP = 25 * 1024 * 1024


def wide(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """The specs of what is sent: at least float32. A mean of bfloat16 numbers, rounded in transit, would lose what
    ranks have learned in a few steps."""
    return widened(specs, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Tensors that are sent together: their indices among all tensors, and the buckets they travel in."""

    members: tuple[int, ...]
    buckets: tuple[Bucket, ...]


class Exchange:
    """Averages tensors over the ranks, through ``reduction``, fragment by fragment.

    ``tensors`` are the current ones, and ``runs`` of neighbours are the fragments. :meth:`start` is told what to send;
    :meth:`results` returns the means after :meth:`wait`.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        specs: Sequence[ParameterSpec],
        runs: Sequence[range],
        reduction: Reduction,
        communicator: Communicator,
    ) -> None:
        self.specs = wide(specs)
        self.reduction = reduction
        self._communicator = communicator
        self._divisor = float(communicator.world_size)
        layout, plans = _plan(self.specs, runs)
        parameters = [
            tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor.detach(), False)
            for tensor in tensors
        ]
        buckets = [Bucket(plan, parameters, self.specs, communicator.allocate) for plan in layout.buckets]
        self.fragments = [
            Fragment(members=tuple(run), buckets=tuple(buckets[number] for number in numbers))
            for run, numbers in zip(runs, plans, strict=True)
        ]
        self._running: list[Handle] = []
        reduction.rebuilt(layout)

    @torch.no_grad()
    def start(
        self, fragments: Sequence[int], tensors: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor] | None
    ) -> None:
        """Start sending ``tensors``, or what they lack of ``anchors``. All ranks send the same."""
        try:
            for bucket in self._buckets(fragments):
                self._fill(bucket, tensors, anchors)
                self._running.append(self.reduction.start(bucket, self._communicator, self._divisor))
        except BaseException:
            self._running = []
            self.reduction.ended(well=False)
            raise

    def _fill(self, bucket: Bucket, tensors: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor] | None) -> None:
        bucket.reopen()
        for slot, view in zip(bucket.plan.slots, bucket.views, strict=True):
            if anchors is None:
                view.copy_(tensors[slot.parameter])
            else:
                torch.sub(anchors[slot.parameter], tensors[slot.parameter], out=view)
        scale = self.reduction.landing_scale(bucket, self._communicator, self._divisor)
        if scale != 1.0:
            bucket.payload.mul_(scale)

    def wait(self) -> None:
        """Wait until all that was started has arrived, or raise why it has not."""
        handles, self._running = self._running, []
        well = False
        try:
            for handle in handles:
                handle.wait()
            well = True
        finally:
            if handles:
                self.reduction.ended(well=well)

    def results(self, fragments: Sequence[int]) -> dict[int, torch.Tensor]:
        """The means, by the index of their tensors. They lie in buckets, and are valid until the next start."""
        return {
            slot.parameter: view
            for bucket in self._buckets(fragments)
            for slot, view in zip(bucket.plan.slots, bucket.views, strict=True)
        }

    def _buckets(self, fragments: Sequence[int]) -> list[Bucket]:
        return [bucket for number in fragments for bucket in self.fragments[number].buckets]


@torch.no_grad()
def put_down(tensor: torch.Tensor, value: torch.Tensor, sent: torch.Tensor | None) -> None:
    """Set ``tensor`` to the new value, and add what it has changed since it was ``sent``, where that was kept."""
    if sent is not None:
        # Not a sum: a rank that took no step must end with the exact bits of one that kept nothing, even of minus zero.
        value = value - (sent.to(value.dtype) - tensor.to(value.dtype))
    tensor.copy_(value)


def _plan(specs: Sequence[ParameterSpec], runs: Sequence[range]) -> tuple[BucketLayout, list[list[int]]]:
    """A layout in which no bucket has tensors of two runs, and the indices of the buckets of each run."""
    plans: list[BucketPlan] = []
    numbers: list[list[int]] = []
    for run in runs:
        # The last bucket of a round has a ballot (control flags); communication hooks recognize the last bucket by it.
        layout = plan_layout(specs, run, BucketCaps.uniform(CAP), ballot=1)
        first = len(plans)
        plans += [dataclasses.replace(plan, index=first + plan.index) for plan in layout.buckets]
        numbers.append(list(range(first, len(plans))))
    return BucketLayout(buckets=tuple(plans), sparse=()), numbers
