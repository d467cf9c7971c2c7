"""Gradient accumulation as users write it: ``accumulate``, weighted ``backward``, ``no_sync``, for both front ends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from gradsync.base.errors import ConfigurationError, GradsyncError, MisuseError
from gradsync.communicator import Choice
from gradsync.core.bucket.norm import checked_norm
from gradsync.core.engine.blocks import Block
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.window.weights import checked_weight
from gradsync.observe import Explanation, explain_model
from gradsync.parallel.clipping import clip_norm
from gradsync.parallel.replica import Replica

__all__ = ["Accumulation", "MicroBatches", "backward_through", "framed"]

Batch = TypeVar("Batch")
_NO_MORE: Any = object()


def framed(batches: Iterable[Batch], frame: Callable[[bool], AbstractContextManager[None]]) -> Iterator[Batch]:
    """Yield the batches of one window, each inside ``frame(last)``. An empty window is framed too."""
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


class MicroBatches:
    """Context manager for one micro-batch of a window, of one model or several.

    Leaving the last one finishes the window, with or without a backward. ``synchronizes`` means that a micro-batch
    before the last synchronizes too. The collectives of several models must come in the same order on all ranks, even
    on a rank that runs a backward for only some of them, or for none. So nothing is sent while the block runs: the
    models are synchronized one after the other, in the order in which they were named, when the block is left or when
    an optimizer is about to step.

    [Note: a loop that is left] In ``for batch in model.accumulate(batches)`` the block does not see what the loop body
    raises: the iterator is closed, either at once or when it is collected. That is no time for a collective. What the
    others must learn about the last micro-batch, they learn when this rank next touches the model.
    """

    def __init__(self, owners: "Sequence[Accumulation]", *, last: bool, synchronizes: bool = False) -> None:
        self._synchronizers = [owner.synchronizer for owner in owners]
        several = len(self._synchronizers) > 1
        finish_all = self._finish if several and (last or synchronizes) else None
        self._block = Block(last=last, synchronizes=last or synchronizes, finish_all=finish_all)

    def __enter__(self) -> None:
        self._finished = False
        for synchronizer in self._synchronizers:
            synchronizer.pending_work.enter(self._block)
        # Entering may have ended an earlier window that the other ranks had not yet heard about.
        self._before = [synchronizer.ends for synchronizer in self._synchronizers]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self._block.synchronizes:
            # In the last micro-batch the others learn of it because this rank takes part.
            for synchronizer in self._synchronizers:
                synchronizer.raised(error, "a block of accumulate()")
        try:
            if self._block.synchronizes:
                # The other ranks are waiting, or will be: take part, or tell them why not.
                if kind is None:
                    self._finish()
                elif issubclass(kind, Exception):
                    for synchronizer in self._unfinished():
                        synchronizer.pending_work.fail()
                elif issubclass(kind, GeneratorExit):
                    for synchronizer in self._unfinished():
                        synchronizer.pending_work.fail_later()
            elif kind is None:
                for synchronizer in self._synchronizers:
                    synchronizer.pending_work.stand_in_for_forward(ends_window=False)
        finally:
            for synchronizer in self._synchronizers:
                synchronizer.pending_work.leave(self._block)

    def _unfinished(self) -> list[Synchronizer]:
        """The models that no backward has synchronized or tried to: a failure that was caught was already reported."""
        if self._finished:
            return []
        pairs = zip(self._synchronizers, self._before, strict=True)
        return [synchronizer for synchronizer, before in pairs if synchronizer.ends == before]

    def _finish(self) -> None:
        """Synchronize all that remain, even if one fails: the other ranks do the same."""
        unfinished = self._unfinished()
        self._finished = True
        errors = []
        for synchronizer in unfinished:
            before = synchronizer.ends
            try:
                synchronizer.pending_work.take_part()
            except GradsyncError as error:
                if synchronizer.ends == before:
                    synchronizer.pending_work.fail()
                errors.append(error)
        if errors:
            raise errors[0]


def backward_through(
    owners: "Sequence[Accumulation]", loss: torch.Tensor, weight: Any = None, unit: float | None = None, **options: Any
) -> None:
    """Run :meth:`Accumulation.backward` for a loss shared by several models; without a weight, each counts in that
    unit."""
    synchronizers = [owner.synchronizer for owner in owners]
    before = [synchronizer.ends for synchronizer in synchronizers]
    try:
        for synchronizer in synchronizers:
            synchronizer.window.expect_backward()
        seed = _count(synchronizers, loss, weight, unit)
        with ExitStack() as announced:
            for synchronizer in synchronizers:
                announced.enter_context(synchronizer.announced())
            loss.backward(seed, **options)
    except Exception:
        for synchronizer, count in zip(synchronizers, before, strict=True):
            # Inside accumulate() the others are told when the block is left.
            if synchronizer.owes_backward and synchronizer.ends == count and not synchronizer.in_block:
                synchronizer.pending_work.fail()
        raise


def _count(
    synchronizers: Sequence[Synchronizer], loss: torch.Tensor, weight: Any, unit: float | None
) -> torch.Tensor | None:
    """Count the backward in every window; returns the gradient to start it from."""
    if weight is None:
        units = [each.window.weights.add_plain(announced=True, unit=unit) for each in synchronizers]
        if len(set(units)) > 1:
            raise MisuseError(
                "this loss is shared by models of which one has had a loss.backward() in its window and another an "
                "accelerator.backward(loss). Run all backwards of a window as accelerator.backward(loss)"
            )
        return None if units[0] == 1.0 else torch.full_like(loss, 1.0 / units[0])
    number, unit = checked_weight(weight), None
    for synchronizer in synchronizers:
        unit = synchronizer.window.weights.add(number, unit)
    return torch.full_like(loss, number / (unit or 1.0))


class Accumulation:
    """The methods that :class:`DistributedDataParallel` and ``synchronize_gradients`` attachments have in common."""

    synchronizer: Synchronizer
    replica: Replica
    # The transport of the gradients, and why it was chosen.
    transport: Choice

    @overload
    def accumulate(self, batches: Iterable[Batch]) -> Iterator[Batch]: ...

    @overload
    def accumulate(self, *, last: bool) -> AbstractContextManager[None]: ...

    def accumulate(self, batches: Any = None, *, last: bool | None = None) -> Any:
        """Frame the micro-batches of a window. Only the last one synchronizes, once, and the mean is over all of them.

        ``for batch in model.accumulate(batches):`` is a whole window; the iterator knows which batch is the last.
        ``with model.accumulate(last=…):`` is one micro-batch, for loops that know it themselves.

        Ranks may have different numbers of micro-batches in a window, or none. A micro-batch without a backward does
        not count.
        """
        if (batches is None) == (last is None):
            raise ConfigurationError(
                "accumulate() needs either the batches of a window, as in `for batch in model.accumulate(batches)`, or "
                "last=True or last=False, as in `with model.accumulate(last=number == 7)`"
            )
        if last is not None:
            return MicroBatches([self], last=bool(last))
        if not isinstance(batches, Iterable):
            raise ConfigurationError(
                f"accumulate() expected the batches of a window, got {type(batches).__name__}. Did you mean "
                "accumulate(last=…)?"
            )
        return framed(batches, lambda last: MicroBatches([self], last=last))

    def backward(self, loss: torch.Tensor, weight: Any = None, **options: Any) -> None:
        """Run ``loss.backward()`` for a micro-batch whose loss is the mean over ``weight`` items, such as tokens.

        After the window the gradient is ``Σ w·∇loss / Σ w`` over all micro-batches of all ranks. Without a weight every
        micro-batch counts the same. Give weights to all backwards of a window or to none.
        """
        backward_through([self], loss, weight, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in this block, and backwards of forwards run in it, accumulate on this rank only."""
        return self.synchronizer.switched(enabled=False)

    def force_sync(self) -> AbstractContextManager[None]:
        """Backwards in this block synchronize, even those of forwards that ran under ``no_sync``."""
        return self.synchronizer.switched(enabled=True, forced=True)

    def local_steps(self) -> AbstractContextManager[None]:
        """Allow optimizer steps in this block to use this rank's own gradients, as local SGD requires."""
        return self.synchronizer.switched(steps_locally=True)

    def synchronize(self) -> None:
        """Average what has accumulated, now. All ranks must do so, here or in their backward."""
        self.synchronizer.synchronize()

    def discard(self) -> None:
        """Discard what this rank has accumulated in the window. It counts for nothing."""
        self.synchronizer.clear()

    def abstain(self, reason: str = "") -> None:
        """Take the place of a backward: this rank contributes nothing to the window and discards what it accumulated.

        The other ranks learn of it from the control flags, and all do what ``on_bad_step`` says; if it is not set, they
        skip the window. After an error in backward they already know. Under ``no_sync``, call it once for each backward
        that is left out.
        """
        self.synchronizer.pending_work.abstain(reason)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last optimizer step changed nothing because its window was skipped. The same on all ranks.

        Optimizers and schedulers cannot tell: ``if not model.step_was_skipped: scheduler.step()``.
        """
        return self.synchronizer.window.step_was_skipped

    def explain(self, *, all_ranks: bool = False) -> Explanation:
        """Where the time of the last steps went, and what to change: ``print(model.explain())``.

        By default it reports on this rank alone and communicates with no other, so it may be called under
        ``if rank == 0:``; waiting for another rank then looks like communication time. With ``all_ranks=True`` it
        compares the steps of all ranks. All ranks must then call it, between two steps; unless it was measured when the
        model was wrapped, they time a few all-reduces.
        """
        replica, communicator = self.replica, self.synchronizer.communicator
        return explain_model(replica.recorder, communicator, replica.device, all_ranks=all_ranks)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the averaged gradients so that their norm is at most ``max_norm``; returns the norm before scaling."""
        return clip_norm(self.synchronizer.parameters, *checked_norm(max_norm, norm_type), error_if_nonfinite)
