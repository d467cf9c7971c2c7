"""Windows as users write them: ``accumulate``, ``backward`` with a weight, ``no_sync``; on wrapper and attachment."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from gradsync.base.errors import ConfigurationError, GradsyncError, MisuseError
from gradsync.communicator import Choice
from gradsync.core.bucket.norm import checked_norm
from gradsync.core.engine.blocks import Block
from gradsync.core.engine.clipping import clip_norm
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.core.window.weights import checked_weight
from gradsync.observe.explain.explanation_text import Explanation
from gradsync.observe.explain.model import explain_model
from gradsync.parallel.replica import Replica

__all__ = ["Accumulation", "MicroBatches", "backward_through", "framed"]

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


class MicroBatches:
    """One micro-batch of a window, of one model or several, as a context.

    Leaving the last one finishes the window, with or without a backward. ``synchronizes`` says that a micro-batch
    before the last synchronizes too. The collectives of several models must come in the same order on all ranks, also
    on one that has a backward of only some of them, or of none. So nothing is sent while they run: the models are
    synchronized one after the other, in the order in which they were named, when the block is left, or when an
    optimizer is about to step.

    [Note: a loop that is left] Of ``for batch in model.accumulate(batches)`` the block does not see what its body
    raises: the iterator is closed, at once or whenever it is collected. That is no time for a collective. What the
    others must hear of the last micro-batch, they hear when this rank next touches the model.
    """

    def __init__(self, owners: "Sequence[Accumulation]", *, last: bool, synchronizes: bool = False) -> None:
        self._synchronizers = [owner.synchronizer for owner in owners]
        several = len(self._synchronizers) > 1
        finish_all = self._finish if several and (last or synchronizes) else None
        self._block = Block(last=last, synchronizes=last or synchronizes, finish_all=finish_all)

    def __enter__(self) -> None:
        self._finished = False
        for synchronizer in self._synchronizers:
            synchronizer.enter_block(self._block)
        # Entering may have ended a window before, of which the others had still to hear.
        self._before = [synchronizer.ends for synchronizer in self._synchronizers]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self._block.synchronizes:
            # In the last micro-batch the others hear of it by taking part.
            for synchronizer in self._synchronizers:
                synchronizer.raised(error, "a block of accumulate()")
        try:
            if self._block.synchronizes:
                # The other ranks are waiting, or will: take part, or let them hear why not.
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
                synchronizer.leave_block(self._block)

    def _unfinished(self) -> list[Synchronizer]:
        """Those that no backward has synchronized, or tried to: a failure that was caught has been told to all."""
        if self._finished:
            return []
        pairs = zip(self._synchronizers, self._before, strict=True)
        return [synchronizer for synchronizer, before in pairs if synchronizer.ends == before]

    def _finish(self) -> None:
        """Synchronize all that are left, whatever becomes of one: the other ranks do so too."""
        unfinished = self._unfinished()
        self._finished = True
        errors = []
        for synchronizer in unfinished:
            before = synchronizer.ends
            try:
                synchronizer.take_part()
            except GradsyncError as error:
                if synchronizer.ends == before:
                    synchronizer.pending_work.fail()
                errors.append(error)
        if errors:
            raise errors[0]


def backward_through(
    owners: "Sequence[Accumulation]", loss: torch.Tensor, weight: Any = None, unit: float | None = None, **options: Any
) -> None:
    """:meth:`Accumulation.backward` of a loss that several models share; without a weight, in that unit."""
    synchronizers = [owner.synchronizer for owner in owners]
    before = [synchronizer.ends for synchronizer in synchronizers]
    try:
        for synchronizer in synchronizers:
            synchronizer.expect_backward()
        seed = _count(synchronizers, loss, weight, unit)
        with ExitStack() as announced:
            for synchronizer in synchronizers:
                announced.enter_context(synchronizer.engine.announced())
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
    """Count the backward in every window; returns what it is to start from."""
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
    """What :class:`DistributedDataParallel` and the attachment of ``synchronize_gradients`` have in common."""

    synchronizer: Synchronizer
    replica: Replica
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
            return MicroBatches([self], last=bool(last))
        if not isinstance(batches, Iterable):
            raise ConfigurationError(
                f"accumulate() expected the batches of a window, got {type(batches).__name__}. Did you mean "
                "accumulate(last=…)?"
            )
        return self._micro_batches(batches)

    def _micro_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return framed(batches, lambda last: MicroBatches([self], last=last))

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
        self.synchronizer.clear()

    def abstain(self, reason: str = "") -> None:
        """In the place of a backward: this rank has nothing for the window, and gives up what it has accumulated.

        The other ranks hear of it in the ballot, and all do what ``on_veto`` says; without that they skip the window.
        After an error in backward they have heard already. Under ``no_sync`` call it once for each backward that is
        left out.
        """
        self.synchronizer.abstain(reason, self._miss_forward)

    def _miss_forward(self) -> bool:
        """Take part in what the others do in every forward, where this rank has run none: in a join they count who has
        data. Whether there was such a thing."""
        return False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer changed nothing, because its window was vetoed. The same on all ranks.

        Optimizers and schedulers do not know: ``if not model.step_was_skipped: scheduler.step()``.
        """
        return self.synchronizer.window.step_was_skipped

    def explain(self, *, all_ranks: bool = False) -> Explanation:
        """Where the time of the last steps went, and what to change: ``print(model.explain())``.

        By itself it tells of this rank alone and needs no other, so that ``if rank == 0:`` may stand before it; then
        waiting for another rank looks like wire. With ``all_ranks=True`` the steps of all ranks are laid beside each
        other, and all ranks must call it, between two steps; unless that was done when the model was wrapped, they time
        a few all-reduces.
        """
        replica, communicator = self.replica, self.synchronizer.engine.communicator
        return explain_model(replica.recorder, communicator, replica.device, all_ranks=all_ranks)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the averaged gradients so that their norm is at most ``max_norm``; returns the norm before."""
        return clip_norm(self.synchronizer.parameters, *checked_norm(max_norm, norm_type), error_if_nonfinite)
