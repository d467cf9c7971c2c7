"""Steps to measure: a window of micro-batches as users write it, and the settings to choose before it is timed.

Models are scaled down so that many rounds fit into minutes, and a default of 25 MiB, made for whole models, would put
all of a scaled one into one bucket. So torch's wrapper gets the best of several fractions of the gradients, by trial.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import StrEnum

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.core.bucket.sizes import TUNED_AFTER
from gradsync.observe.timeline import Timeline
from gradsync.tools.bench.device import Device
from gradsync.tools.bench.measure import LateParts, Parts, Rounds, Step
from gradsync.tools.bench.peers import DDP, TUNED, Peer, Wrapped
from gradsync.tools.bench.workload import Workload

__all__ = [
    "Forward",
    "Pattern",
    "best_bucket_mb",
    "optimizer_step",
    "plain_step",
    "repeated",
    "settle",
    "timed_step",
    "tuned_ddp",
    "window_step",
]

MIB = 2**20
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


def optimizer_step(wrapped: Wrapped) -> None:
    wrapped.optimizer.step()
    wrapped.optimizer.zero_grad()


def window_step(wrapped: Wrapped, forward: Forward, *, count: int, pattern: Pattern) -> Step:
    """A step of ``count`` micro-batches and one update."""
    micro_batch = {
        Pattern.EVERY: _every,
        Pattern.IMPROPER: _improper,
        Pattern.NO_SYNC: _no_sync,
        Pattern.ACCUMULATE: _accumulate,
    }[pattern]

    def step() -> None:
        for number in range(1, count + 1):
            micro_batch(wrapped, forward, number == count)
        optimizer_step(wrapped)

    return step


def plain_step(workload: Workload, peer: Peer) -> Step:
    """One micro-batch, synchronized, and an update, under this peer."""
    return window_step(workload.wrap(peer), workload.forward, count=1, pattern=Pattern.EVERY)


def repeated(step: Callable[[], object], times: int) -> Step:
    def repeat() -> None:
        for _ in range(times):
            step()

    return repeat


def _every(wrapped: Wrapped, forward: Forward, last: bool) -> None:
    wrapped.backward(forward(wrapped.model))


def _improper(wrapped: Wrapped, forward: Forward, last: bool) -> None:
    loss = forward(wrapped.model)
    with nullcontext() if last else wrapped.no_sync():
        wrapped.backward(loss)


def _no_sync(wrapped: Wrapped, forward: Forward, last: bool) -> None:
    with nullcontext() if last else wrapped.no_sync():
        wrapped.backward(forward(wrapped.model))


def _accumulate(wrapped: Wrapped, forward: Forward, last: bool) -> None:
    if wrapped.accumulate is None:
        raise ConfigurationError("this peer has no accumulate(); ask for the pattern no_sync instead")
    with wrapped.accumulate(last):
        (wrapped.framed_backward or wrapped.backward)(forward(wrapped.model))


def timed_step(wrapped: Wrapped, forward: Forward, device: Device, timeline: Timeline | None = None) -> Step:
    """A step of one micro-batch that says how long its parts took.

    ``timeline`` knows how much of backward was waiting for the wire, in the last step of a block; without it backward
    is one part.
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


def settle(step: Step, *, windows: int = 1, after: int = TUNED_AFTER[-1]) -> None:
    """Run until gradsync has chosen its bucket sizes, as it does in the first windows of a training.

    ``windows`` is how many of them a step has; ``after`` so many it has chosen everything.
    """
    for _ in range(-(-(after + 1) // windows)):
        step()


def tuned_ddp(rounds: Rounds, workload: Workload, *, shares: Sequence[int] = SHARES, warmup: int = 3) -> DDP:
    """torch's wrapper at its best, with the bucket size that suits it."""
    return DDP(name=TUNED, tuned=True, bucket_mb=best_bucket_mb(rounds, workload, shares=shares, warmup=warmup))


def best_bucket_mb(
    rounds: Rounds, workload: Workload, *, tuned: bool = True, shares: Sequence[int] = SHARES, warmup: int = 3
) -> float:
    """The size in MiB with which torch's DDP was fastest in a few rounds; noted among the facts of the cell."""
    whole = workload.nbytes / MIB
    sizes = {round(whole / share, 3) for share in shares} | ({DEFAULT} if whole > DEFAULT else set())
    steps = {f"{size:g}": plain_step(workload, DDP(tuned=tuned, bucket_mb=size)) for size in sorted(sizes)}
    best = rounds.best(steps, warmup=warmup)
    rounds.fact("DDP bucket MiB", f"{best}, the best of {', '.join(steps)}")
    return float(best)
