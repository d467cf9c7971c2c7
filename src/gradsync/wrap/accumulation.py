"""Windows as users write them: ``accumulate``, ``backward`` with a weight, ``no_sync``; on wrapper and handle."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from gradsync.bucket.norm import checked_norm
from gradsync.communicator import Choice
from gradsync.engine.clipping import clip_norm
from gradsync.engine.synchronizer import Synchronizer
from gradsync.errors import ConfigurationError, GradsyncError
from gradsync.window.weights import checked_weight

__all__ = ["Accumulation", "MicroBatch", "MicroBatches", "backward_through", "framed"]

Batch = TypeVar("Batch")
_NO_MORE: Any = object()


def framed(batches: Iterable[Batch], frame: Callable[[bool], AbstractContextManager[None]]) -> Iterator[Batch]:
    """The batches of one window, each inside ``frame(last)``. A window without any is framed all the same."""
    iterator = iter(batches)
    batch = next(iterator, _NO_MORE)
    if batch is _NO_MORE:
        with frame(True):
            return
    while batch is not _NO_MORE:
        following = next(iterator, _NO_MORE)
        with frame(following is _NO_MORE):
            yield batch
        batch = following


class MicroBatch:
    """One micro-batch of a window, as a context. Leaving the last one finishes the window, with or without a backward.

    ``synchronizes`` says that a micro-batch before the last synchronizes too.
    """

    def __init__(self, owner: "Accumulation", *, last: bool, synchronizes: bool = False) -> None:
        self._owner = owner
        self._last = last
        self._synchronizes = last or synchronizes

    def __enter__(self) -> None:
        synchronizer = self._owner.synchronizer
        weights = synchronizer.window.weights
        self._outer = (synchronizer.enabled, weights.deferred)
        self._synchronizations = synchronizer.synchronizations
        synchronizer.enabled = self._synchronizes
        weights.deferred = self._synchronizes and not self._last
        weights.enter_block()
        synchronizer.expect_backward()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        synchronizer = self._owner.synchronizer
        weights = synchronizer.window.weights
        try:
            if self._synchronizes and synchronizer.synchronizations == self._synchronizations:
                self._finish(failed=kind is not None, interrupted=kind is not None and not issubclass(kind, Exception))
        finally:
            synchronizer.enabled, weights.deferred = self._outer
            weights.leave_block(last=self._last)

    def _finish(self, *, failed: bool, interrupted: bool) -> None:
        """The other ranks are waiting, or will: take part, or let them hear why not."""
        if interrupted:
            return
        if failed:
            self._owner.synchronizer.fail()
            return
        try:
            self._owner.synchronizer.take_part()
        except GradsyncError:
            self._owner.synchronizer.fail()
            raise


class MicroBatches:
    """One micro-batch of several models, as a context.

    Their collectives must come in the same order on all ranks, also on one that has a backward of only some of them, or
    of none. So nothing is sent while they run: the models are synchronized one after the other, in the order in which
    they were named, when the block is left, or when an optimizer is about to step.
    """

    def __init__(self, owners: "Sequence[Accumulation]", *, last: bool, synchronizes: bool = False) -> None:
        self._synchronizers = [owner.synchronizer for owner in owners]
        self._last = last
        self._synchronizes = last or synchronizes
        self._finished = False

    def __enter__(self) -> None:
        self._outer = [(each.enabled, each.window.weights.deferred) for each in self._synchronizers]
        for synchronizer in self._synchronizers:
            weights = synchronizer.window.weights
            synchronizer.enabled = False
            weights.deferred = self._synchronizes and not self._last
            weights.enter_block()
            synchronizer.expect_backward()
            synchronizer.finish_block = self._finish if self._synchronizes else None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._synchronizes and not self._finished:
                if kind is None:
                    self._finish()
                elif issubclass(kind, Exception):
                    for synchronizer in self._synchronizers:
                        synchronizer.fail()
        finally:
            for synchronizer, (enabled, deferred) in zip(self._synchronizers, self._outer, strict=True):
                synchronizer.finish_block = None
                synchronizer.enabled, synchronizer.window.weights.deferred = enabled, deferred
                synchronizer.window.weights.leave_block(last=self._last)

    def _finish(self) -> None:
        """Synchronize all of them, whatever becomes of one: the other ranks do so too."""
        if self._finished:
            return
        self._finished = True
        errors = []
        for synchronizer in self._synchronizers:
            try:
                synchronizer.take_part()
            except GradsyncError as error:
                synchronizer.fail()
                errors.append(error)
        if errors:
            raise errors[0]


def backward_through(owners: "Sequence[Accumulation]", loss: torch.Tensor, weight: Any = None, **options: Any) -> None:
    """:meth:`Accumulation.backward` of a loss that several models share."""
    synchronizers = [owner.synchronizer for owner in owners]
    before = [synchronizer.synchronizations for synchronizer in synchronizers]
    try:
        seed = _count(synchronizers, loss, weight)
        for synchronizer in synchronizers:
            synchronizer.announce_backward()
        loss.backward(seed, **options)
    except Exception:
        for synchronizer, count in zip(synchronizers, before, strict=True):
            # Inside accumulate() the others are told when the block is left.
            if synchronizer.enabled and synchronizer.synchronizations == count and not synchronizer.in_block:
                synchronizer.fail()
        raise
    finally:
        for synchronizer in synchronizers:
            synchronizer.announced = False


def _count(synchronizers: Sequence[Synchronizer], loss: torch.Tensor, weight: Any) -> torch.Tensor | None:
    """Count the backward in every window; returns what it is to start from."""
    if weight is None:
        for synchronizer in synchronizers:
            synchronizer.window.weights.add_plain(announced=True)
        return None
    number, unit = checked_weight(weight), None
    for synchronizer in synchronizers:
        unit = synchronizer.window.weights.add(number, unit)
    return torch.full_like(loss, number / (unit or 1.0))


class Accumulation:
    """What :class:`DistributedDataParallel` and the handle of ``synchronize_gradients`` have in common."""

    synchronizer: Synchronizer
    # What carries the gradients, and why that.
    wire: Choice

    @overload
    def accumulate(self, batches: Iterable[Batch]) -> Iterator[Batch]: ...

    @overload
    def accumulate(self, *, last: bool) -> AbstractContextManager[None]: ...

    def accumulate(self, batches: Any = None, *, last: bool | None = None) -> Any:
        """Frame the micro-batches of a window. Only the last one synchronizes, once, and the mean is over all of them.

        ``for batch in model.accumulate(batches):`` is a whole window; the iterator knows which batch is the last.
        ``with model.accumulate(last=…):`` is one micro-batch, for loops that know it themselves.

        Ranks may have different numbers of micro-batches in a window, or none. A micro-batch without a backward counts
        nothing.
        """
        if (batches is None) == (last is None):
            raise ConfigurationError(
                "accumulate() needs either the batches of a window, as in `for batch in model.accumulate(batches)`, or "
                "last=True or last=False, as in `with model.accumulate(last=number == 7)`"
            )
        if last is not None:
            return MicroBatch(self, last=bool(last))
        if not isinstance(batches, Iterable):
            raise ConfigurationError(
                f"accumulate() expected the batches of a window, got {type(batches).__name__}. Did you mean "
                "accumulate(last=…)?"
            )
        return self._micro_batches(batches)

    def _micro_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return framed(batches, lambda last: MicroBatch(self, last=last))

    def backward(self, loss: torch.Tensor, weight: Any = None, **options: Any) -> None:
        """``loss.backward()`` of a micro-batch whose loss is the mean over ``weight`` items, such as tokens.

        After the window the gradient is ``Σ w·∇loss / Σ w`` over all micro-batches of all ranks. Without a weight every
        micro-batch counts the same. Weights must be given to all backwards of a window or to none.
        """
        backward_through([self], loss, weight, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in here, and backwards of forwards in here, accumulate on this rank alone."""
        return self.synchronizer.switched(enabled=False)

    def force_sync(self) -> AbstractContextManager[None]:
        """Backwards in here synchronize, also those of forwards that ran under ``no_sync``."""
        return self.synchronizer.switched(enabled=True, forced=True)

    def local_steps(self) -> AbstractContextManager[None]:
        """Optimizer steps in here may use gradients of this rank alone, as local SGD wants."""
        return self.synchronizer.switched(steps_locally=True)

    def synchronize(self) -> None:
        """Average what has accumulated, now. All ranks must do so, here or in their backward."""
        self.synchronizer.synchronize()

    def discard(self) -> None:
        """Give up what the window has accumulated on this rank. It counts nothing."""
        for parameter in self.synchronizer.parameters:
            parameter.grad = None
        self.synchronizer.window.discard()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the averaged gradients so that their norm is at most ``max_norm``; returns the norm before."""
        return clip_norm(self.synchronizer.parameters, *checked_norm(max_norm, norm_type), error_if_nonfinite)
