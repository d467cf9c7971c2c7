"""A window of micro-batches as users write it: synchronized every time, with ``no_sync``, or with ``accumulate``."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum

import torch

from gradsync.bench.measure import Parts, Step
from gradsync.bench.peers import Peer, Wrapped
from gradsync.bench.real_workload import RealWorkload
from gradsync.bench.workload import Workload
from gradsync.bucket.tuner import TUNED_AFTER
from gradsync.errors import ConfigurationError

__all__ = ["Forward", "Pattern", "optimizer_step", "plain_step", "repeated", "settle", "timed_step", "window_step"]

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


def plain_step(workload: Workload | RealWorkload, peer: Peer) -> Step:
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


def timed_step(wrapped: Wrapped, forward: Forward, exposed: Callable[[], float] | None = None) -> Step:
    """A step of one micro-batch that says how long its parts took.

    ``exposed`` reads, after backward, how much of it was waiting for the wire; without it backward is one part.
    """

    def step() -> Parts:
        began = time.perf_counter()
        loss = forward(wrapped.model)
        forward_done = time.perf_counter()
        wrapped.backward(loss)
        backward_done = time.perf_counter()
        optimizer_step(wrapped)
        done = time.perf_counter()
        waited = 0.0 if exposed is None else exposed()
        return {
            "forward": forward_done - began,
            "backward": backward_done - forward_done - waited,
            "exposed": waited,
            "optimizer": done - backward_done,
        }

    return step


def settle(step: Step, *, windows: int = 1) -> None:
    """Run until gradsync has chosen its bucket sizes, as it does in the first windows of a training.

    ``windows`` is how many of them a step has.
    """
    for _ in range(-(-(max(TUNED_AFTER) + 1) // windows)):
        step()
