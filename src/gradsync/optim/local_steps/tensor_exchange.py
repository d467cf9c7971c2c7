"""The exchange of one round: averages buckets of parameters, or of their differences from their anchors.

The buckets are of the kind that gradients travel in, so that every reduction can carry them. They are filled here, not
by autograd, and the model's gradients are left alone.

The mean is the new value of the parameters, or the gradient of an outer optimizer. That updates *anchors*: what all
ranks held when they last agreed, in float32 at least. Its gradient is the anchor minus the mean of the parameters.
Every rank computes the same update of the same numbers.

Whenever the whole model was sent, floating-point buffers such as batch norm statistics are averaged, too. Counters and
masks have no mean; each rank keeps its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket, BucketCaps, BucketLayout, BucketPlan, ParameterSpec, plan_layout
from gradsync.core.bucket.precise import widened
from gradsync.core.reduction import Mean, Reduction
from gradsync.parallel.replica import Replica

__all__ = ["AveragedBuffers", "Outer", "OuterFactory", "TensorExchange", "make_outer", "merge_into", "wide"]

OuterFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# No computation runs meanwhile that a smaller first bucket could hide behind; this is torch's own size.
CAP = 25 * 1024 * 1024


def wide(specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """The specs of what is sent: at least float32. A mean of bfloat16 numbers, rounded in transit, would lose what
    ranks have learned in a few steps."""
    return widened(specs, torch.float32)


class TensorExchange:
    """Averages tensors over the ranks, through ``reduction``, fragment by fragment.

    ``tensors`` are the current ones, and ``runs`` of neighbours are the fragments. :meth:`start` sends some of them;
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
        self.runs = runs
        layout, self._numbers = _plan(self.specs, runs)
        parameters = [
            tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor.detach(), False)
            for tensor in tensors
        ]
        self._buckets = [Bucket(plan, parameters, self.specs, communicator.allocate) for plan in layout.buckets]
        self._running: list[Handle] = []
        reduction.rebuilt(layout)

    @torch.no_grad()
    def start(
        self, fragments: Sequence[int], tensors: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor] | None
    ) -> None:
        """Start sending ``tensors``, or what they lack of ``anchors``. All ranks send the same."""
        try:
            for bucket in self._buckets_of(fragments):
                self._fill(bucket, tensors, anchors)
                self._running.append(self.reduction.start(bucket, self._communicator, self._divisor))
        except BaseException:
            self._running = []
            self.reduction.window_ended(succeeded=False)
            raise

    def _fill(self, bucket: Bucket, tensors: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor] | None) -> None:
        bucket.reopen()
        for slot, view in zip(bucket.plan.slots, bucket.views, strict=True):
            if anchors is None:
                view.copy_(tensors[slot.parameter])
            else:
                torch.sub(anchors[slot.parameter], tensors[slot.parameter], out=view)
        scale = self.reduction.prescale(bucket, self._communicator, self._divisor)
        if scale != 1.0:
            bucket.payload.mul_(scale)

    def wait(self) -> None:
        """Wait until all that was started has arrived, or raise why it has not."""
        handles, self._running = self._running, []
        succeeded = False
        try:
            for handle in handles:
                handle.wait()
            succeeded = True
        finally:
            if handles:
                self.reduction.window_ended(succeeded=succeeded)

    def results(self, fragments: Sequence[int]) -> dict[int, torch.Tensor]:
        """The means, by the index of their tensors. They lie in buckets, and are valid until the next start."""
        return {
            slot.parameter: view
            for bucket in self._buckets_of(fragments)
            for slot, view in zip(bucket.plan.slots, bucket.views, strict=True)
        }

    def _buckets_of(self, fragments: Sequence[int]) -> list[Bucket]:
        return [self._buckets[number] for fragment in fragments for number in self._numbers[fragment]]


@torch.no_grad()
def merge_into(tensor: torch.Tensor, value: torch.Tensor, sent: torch.Tensor | None) -> None:
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
        # The last bucket of a round has control flags; communication hooks recognize the last bucket by it.
        layout = plan_layout(specs, run, BucketCaps.uniform(CAP), control=1)
        first = len(plans)
        plans += [dataclasses.replace(plan, index=first + plan.index) for plan in layout.buckets]
        numbers.append(list(range(first, len(plans))))
    return BucketLayout(buckets=tuple(plans), sparse=()), numbers


# -- buffers -----------------------------------------------------------------------------------------------------------


class AveragedBuffers:
    """The buffers of ``replica`` that have a mean. Modules may replace them by other tensors of the same shape."""

    def __init__(self, replica: Replica, communicator: Communicator) -> None:
        self._replica = replica
        named = {name: each for name, each in replica.named_buffers.items() if each.is_floating_point()}
        self._specs = [ParameterSpec.of(name, buffer) for name, buffer in named.items()]
        # Those that are being sent, as they were where that is needed.
        self._sent: list[torch.Tensor | None] = []
        self._exchange: TensorExchange | None = None
        if named:
            runs = [range(len(named))]
            self._exchange = TensorExchange(list(named.values()), self._specs, runs, Mean(), communicator)

    def start(self, *, keep: bool) -> None:
        """Start sending them. ``keep``: they change before they are merged."""
        if self._exchange is None:
            return
        buffers = self._current()
        self._sent = [buffer.clone() if keep else None for buffer in buffers]
        self._exchange.start([0], buffers, None)

    def wait(self) -> None:
        """Wait for the means, if they were sent."""
        if self._exchange is not None:
            self._exchange.wait()

    def finish(self) -> None:
        """Write the means back, if they were sent, and add what has been learned since."""
        sent, self._sent = self._sent, []
        if self._exchange is not None and sent:
            means = self._exchange.results([0])
            for index, buffer in enumerate(self._current()):
                merge_into(buffer, means[index], sent[index])

    def _current(self) -> list[torch.Tensor]:
        named = self._replica.named_buffers
        return [named[spec.name] for spec in self._specs]

    @property
    def misfit(self) -> str | None:
        """What keeps the buffers from being averaged, in words: one has a different shape now, or is gone."""
        named = self._replica.named_buffers
        for spec in self._specs:
            found = named.get(spec.name)
            if found is None or tuple(found.shape) != spec.shape:
                came = "is gone" if found is None else f"has shape {tuple(found.shape)} now"
                return f"buffer {spec.name!r}, of shape {spec.shape} when LocalSteps was made, {came}"
        return None


# -- the outer optimizer -----------------------------------------------------------------------------------------------


class Outer:
    """Anchors, and the optimizer that updates them."""

    def __init__(self, anchors: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.anchors, self.optimizer = list(anchors), optimizer

    @torch.no_grad()
    def reset(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set the anchors to the current parameters."""
        for anchor, parameter in zip(self.anchors, parameters, strict=True):
            anchor.copy_(parameter)

    def step(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Update the anchors for which there are gradients."""
        try:
            for index, gradient in gradients.items():
                self.anchors[index].grad = gradient
            self.optimizer.step()
        finally:
            # The gradients lie in buckets. Optimizers skip anchors that have none.
            for index in gradients:
                self.anchors[index].grad = None


def make_outer(
    factory: OuterFactory | None, parameters: Sequence[torch.Tensor], specs: Sequence[ParameterSpec], *, exact: bool
) -> Outer | None:
    """The outer optimizer over anchors of ``specs``, or None where only the mean of the parameters is wanted.

    A mean that is not ``exact`` is a mean of differences, which needs anchors to be added to.
    """
    if factory is None:
        if exact:
            return None
        factory = functools.partial(torch.optim.SGD, lr=1.0)
    if not callable(factory):
        raise ConfigurationError(
            "outer makes an optimizer of parameters, as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, "
            f"nesterov=True) does, got {factory!r}"
        )
    anchors = [
        nn.Parameter(parameter.detach().to(spec.dtype, copy=True))
        for parameter, spec in zip(parameters, specs, strict=True)
    ]
    try:
        optimizer = factory(list(anchors))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"outer could not make an optimizer of the parameters: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"outer must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = {id(anchor) for anchor in anchors}
    if own != {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}:
        raise ConfigurationError("outer must make an optimizer of all parameters that it is given, and of no other")
    return None if exact and _is_averaging(optimizer) else Outer(anchors, optimizer)


def _is_averaging(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step from an anchor by the outer gradient always ends at the mean of the parameters."""
    return type(optimizer) is torch.optim.SGD and all(
        not isinstance(group["lr"], torch.Tensor)
        and group["lr"] == 1.0
        and not (group["momentum"] or group["weight_decay"] or group["nesterov"] or group["maximize"])
        for group in optimizer.param_groups
    )
