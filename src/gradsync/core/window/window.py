"""The window between two optimizer steps: what has happened in it, how it ended, and what would make its mean wrong.

A window is *counted* when its micro-batches are framed by ``accumulate()`` or run through ``backward(loss, weight=…)``:
its gradient is then the weighted mean over all micro-batches of all ranks, see :mod:`gradsync.core.window.weights`.
Otherwise it is as in torch's DDP: gradients add up, and the sum is averaged over the ranks.

[Note: the same window] A rank that abstains takes part at once, where its backward would have, and the other ranks have
ended the window. If it abstained a second time, or ran the backward of its forward after all, that would count as its
part in their next window, and from then on it would be one window ahead. So a further ``abstain()`` needs evidence that
the window has ended here too: a step, gradients that were zeroed, a forward, or a block of ``accumulate()``.

[Note: tampering] A window accumulates in the buckets. Nothing else may write there between its micro-batches: zeroing
loses what was accumulated, clipping scales part of a sum. Neither can be observed while it happens, but both leave a
trace: a gradient that is gone, or the version of a bucket's memory. The check costs two comparisons per bucket, and as
many for each gradient that has no place in one.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from gradsync.base.errors import MisuseError
from gradsync.communicator import Communicator
from gradsync.core.bucket.bucket import Bucket
from gradsync.core.bucket.chunk import gradients_of
from gradsync.core.window.weights import Weights

__all__ = ["GradientSnapshot", "Reported", "Window", "WindowState", "has_nonzero_gradients", "has_unattached_gradients"]


class _Seen(NamedTuple):
    """A gradient, and the version of the memory it lies in."""

    parameter: torch.nn.Parameter
    gradient: torch.Tensor
    memory: torch.Tensor
    version: int


class GradientSnapshot:
    """Notes which gradients there are and the versions of their memory, to tell later whether anything has changed.

    Of each bucket it notes one gradient; outside of buckets, all.
    """

    def __init__(self) -> None:
        self._seen: list[_Seen] = []

    def note(self, buckets: Iterable[Bucket], outside: Iterable[torch.nn.Parameter] = ()) -> None:
        """Remember the current state of the buckets, and of the gradients of the parameters ``outside``."""
        self._seen = []
        for bucket in buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is view:
                    self._seen.append(_Seen(parameter, view, bucket.buffer, bucket.buffer._version))
                    break
        for parameter in outside:
            gradient = parameter.grad
            if gradient is not None:
                self._seen.append(_Seen(parameter, gradient, gradient, gradient._version))

    def renew(self) -> None:
        """Note the current versions: all writes since were the engine's own."""
        self._seen = [each._replace(version=each.memory._version) for each in self._seen]

    def forget(self) -> None:
        self._seen = []

    @property
    def has_lost(self) -> bool:
        """Whether a gradient that existed is gone."""
        return any(each.parameter.grad is not each.gradient for each in self._seen)

    @property
    def has_lost_bucket(self) -> bool:
        """Whether a gradient that existed in a bucket is gone: autograd replaces sparse ones, which lie outside."""
        return any(each.parameter.grad is not each.gradient for each in self._seen if each.memory is not each.gradient)

    @property
    def has_changed(self) -> bool:
        """Whether a gradient was changed."""
        return any(each.memory._version != each.version for each in self._seen)

    @property
    def is_unchanged(self) -> bool:
        """Whether there were gradients, and all are unchanged."""
        return bool(self._seen) and not self.has_lost and not self.has_changed


def has_nonzero_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any gradient is nonzero. Reads values: only for building an error."""
    gradients = (parameter.grad for parameter in parameters)
    return any(bool(gradient.any()) for gradient in gradients if gradient is not None)


def has_unattached_gradients(buckets: Iterable[Bucket]) -> bool:
    """Whether some gradient lies outside its bucket."""
    return any(
        parameter.grad is not None and parameter.grad is not view
        for bucket in buckets
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    )


class Reported(enum.Enum):
    """What this rank has reported to the others in the place of a backward."""

    FAILED = "its backward failed"
    ABSTAINED = "it abstains"


class WindowState(enum.Enum):
    """What has happened since the last optimizer step."""

    CLOSED = "nothing"
    OPEN = "a forward, no gradient yet"
    UNSYNCHRONIZED = "gradients of this rank alone"
    SYNCHRONIZED = "means"


class Window:
    """The current window of one synchronizer: this rank's part of it, its outcome, and what the others know of it.

    A parameter is absent from a window if every forward of the window has announced it as absent, as modules do that
    leave layers out.
    """

    def __init__(self, communicator: Communicator, outside: Callable[[], Sequence[torch.nn.Parameter]] = tuple) -> None:
        # What has happened since the last optimizer step.
        self.state = WindowState.CLOSED
        # Parameters whose gradients have no place in a bucket.
        self._outside = outside
        self.weights = Weights(communicator)
        self._snapshot = GradientSnapshot()
        self._means = GradientSnapshot()
        # Ranks have agreed that no step may use these gradients; and whether the last step was skipped for that reason.
        self.is_rejected = self.step_was_skipped = False
        # Whether backwards run inside the step of an optimizer.
        self.is_stepped_by_closure = False
        # Windows that all ranks have synchronized, and failures that all of them know of.
        self.synchronizations = self.failures = 0
        # Whether no rank waits for this one in the running synchronization any more, however it ends here.
        self.exchanged = False
        # What the others know of the window that has ended last, if nothing has begun since.
        self.reported: Reported | None = None
        # How often this rank has abstained. The backwards of forwards that ran before the last time are refused.
        self.abstentions = 0
        # Whether it has abstained from the last window, and the gradients then: zeroing them ends the window.
        self._abstained = False
        self._left = GradientSnapshot()
        # Whether a forward ran in this window, and in the running micro-batch of accumulate().
        self.any_forward = self.any_in_block = False
        # A forward has begun, whether or not it completed, and no backward has ended since.
        self.awaits_backward = False
        # Whether the backward of the last forward will synchronize; None once that backward has ended.
        self.last_synchronizes: bool | None = None
        self._absent_now: set[int] | None = None
        self._absent: set[int] | None = None

    def __repr__(self) -> str:
        return f"Window({self.state.name.lower()}: {self.state.value}; {self.weights!r})"

    def begin_backward(self, buckets: Sequence[Bucket], *, late: bool = False) -> None:
        """Record that a backward begins, which has been counted. ``late``: it has already left its first gradient."""
        # A skip vote applies to the existing gradients: where they were zeroed, a new window begins.
        self.is_rejected = self.stays_rejected
        if self.weights.counting:
            self._require_untouched(continues=self.weights.backwards > 1, late=late)
            if self.weights.synchronized:
                self._add_to_mean(buckets, late=late)

    def backward_ended(self, buckets: Sequence[Bucket], *, arrived: bool) -> None:
        """Record that a backward has ended whose gradients are this rank's alone."""
        if arrived:
            self.state = WindowState.UNSYNCHRONIZED
        else:
            self.weights.take_back_plain()
        if self.weights.counting:
            self._snapshot.note(buckets, self._outside())

    def begin_synchronization(self) -> None:
        """Record that what has accumulated is about to be averaged, without a further backward."""
        self.is_rejected = self.stays_rejected
        if self.state is WindowState.UNSYNCHRONIZED and self.weights.counting:
            self._require_untouched(continues=True, late=False)

    def rejected(self, buckets: Sequence[Bucket]) -> None:
        """Record that ranks have agreed to skip the window. None of its counts carry over to the next one."""
        self.state = WindowState.SYNCHRONIZED
        self._means.note(buckets, self._outside())
        self._snapshot.forget()
        self.weights.reset()
        self.is_rejected = True

    def synchronized(self, buckets: Sequence[Bucket]) -> None:
        """Record that the gradients are means now."""
        self.state = WindowState.SYNCHRONIZED
        self._means.note(buckets, self._outside())
        self.weights.expect_same_total()
        if self.weights.counting:
            self._snapshot.note(buckets, self._outside())
            if not self.weights.in_block:
                # A window without accumulate() ends with its synchronization.
                self.weights.reset()

    def means_left_buckets(self) -> None:
        """Forget that the means were in the buckets: the engine has moved them elsewhere."""
        self._means.forget()

    def reopen(self, buckets: Sequence[Bucket], *, accumulated: bool) -> None:
        """Continue in a window that was saved, whose gradients are in the buckets again."""
        if accumulated:
            self.state = WindowState.UNSYNCHRONIZED
            self._snapshot.note(buckets, self._outside())

    def optimizer_stepped(self) -> None:
        """Record the optimizer's step, or that the window ends without one: nothing has happened since."""
        self.state = WindowState.CLOSED
        self.is_rejected = False
        self.weights.reset()

    def discard(self) -> None:
        """Forget the window, whatever has happened in it."""
        self.optimizer_stepped()
        self._snapshot.forget()
        self._means.forget()

    def refuse_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise if an optimizer would step on this rank's own gradients."""
        if self.state is WindowState.UNSYNCHRONIZED and has_nonzero_gradients(parameters):
            raise MisuseError(
                "optimizer.step() was called on gradients that only this rank has: every backward since the last "
                "step ran under no_sync() or in accumulate(last=False). Step after the window's last backward, which "
                "runs outside no_sync() or in accumulate(last=True), or call synchronize() first; for steps that are "
                "meant to be local, wrap them in local_steps()"
            )

    @property
    def may_zero(self) -> bool:
        """Whether zeroing would lose nothing that the window still needs."""
        if self.state is WindowState.UNSYNCHRONIZED:
            return False
        return not self.weights.counting or self.weights.synchronized

    @property
    def has_means(self) -> bool:
        """Whether the gradients are the last synchronized ones: not zeroed since, and perhaps recomputed."""
        return self.state is WindowState.SYNCHRONIZED and not self._means.has_lost

    @property
    def stays_rejected(self) -> bool:
        """Whether the gradients that ranks have agreed to skip still exist."""
        return self.is_rejected and self._means.is_unchanged

    @property
    def finished(self) -> bool:
        """Whether gradients, if there are any, are the means of the whole window."""
        return self.state is not WindowState.UNSYNCHRONIZED and not self.weights.deferred

    def changed_by_engine(self) -> None:
        """Accept that the engine itself has scaled the means: this is not tampering."""
        if self._snapshot.has_changed:
            self._snapshot.renew()

    def replace_gradients(
        self, replace: Callable[[], bool], buckets: Sequence[Bucket], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Call ``replace``, by which the engine replaces gradients of ``parameters``: this is not tampering either.

        ``replace`` returns whether it has replaced any.
        """
        unchanged = self._snapshot.is_unchanged
        if replace() and unchanged:
            self._snapshot.note(buckets, [*self._outside(), *parameters])

    def _require_untouched(self, *, continues: bool, late: bool) -> None:
        """Require that the gradients are as the window's last backward left them; or gone, if it only begins."""
        snapshot = self._snapshot
        if continues:
            lost = snapshot.has_lost_bucket if late else snapshot.has_lost
            if lost or (snapshot.has_changed and not late):
                what = "zeroed" if lost else "changed (zeroed in place, clipped or unscaled)"
                raise MisuseError(
                    f"gradients were {what} inside an unfinished window, so its mean would be wrong. Zero, unscale and "
                    "clip after the window's last backward; to give a window up, call discard()"
                )
        elif self.state is WindowState.UNSYNCHRONIZED:
            raise MisuseError(
                "a window begins with gradients that were accumulated before it, by backwards without weight outside "
                "accumulate(). Run all backwards of a window inside accumulate(), or zero the gradients before it"
            )
        elif snapshot.is_unchanged:
            raise MisuseError(
                "a window begins, but the means of the window before are still there and would be added to it. Call "
                "zero_grad() between two windows"
            )

    @torch.no_grad()
    def _add_to_mean(self, buckets: Sequence[Bucket], *, late: bool) -> None:
        """Undo the division by which gradients are means, for a further backward in the last micro-batch."""
        factor = self.weights.undo_mean()
        if factor is not None and late:
            raise MisuseError(
                "a second backward in the last micro-batch of a window began at a parameter, not at an output of the "
                "model, and was noticed too late. Run it as model.backward(loss), or add the losses up"
            )
        if factor is not None:
            for bucket in buckets:
                bucket.payload.mul_(factor)
            for gradient in gradients_of(self._outside()):
                if gradient is not None:
                    (gradient._values() if gradient.is_sparse else gradient).mul_(factor)

    @property
    def ends(self) -> int:
        """How many synchronizations have ended, successfully or not."""
        return self.synchronizations + self.failures

    # -- forwards --------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Record that a forward with gradients on is about to run."""
        self.begin_next()
        self.any_forward = self.any_in_block = self.awaits_backward = True
        self._absent_now = set()

    def end_forward(self, has_gradients: Callable[[], bool], *, synchronizes: bool) -> None:
        """Record that a forward has run. ``synchronizes``: its backward will."""
        self.last_synchronizes = synchronizes
        if self._absent_now is not None:
            self._absent = self._absent_now if self._absent is None else self._absent & self._absent_now
            self._absent_now = None
        # Zeroed gradients close a window too: a scaler may have skipped its step.
        if synchronizes and (
            self.state is WindowState.CLOSED or (self.state is WindowState.SYNCHRONIZED and not has_gradients())
        ):
            self.state = WindowState.OPEN
            self.is_rejected = False

    def record_missed_forward(self) -> None:
        """Record that this rank has taken part in a forward of the others without running one of its own."""
        self.any_forward = self.any_in_block = True

    def announce_absent(self, indices: Iterable[int]) -> None:
        """Note parameters that the running forward leaves out. Has no effect outside a forward."""
        if self._absent_now is not None:
            self._absent_now.update(indices)

    def announce_all_absent(self, count: int) -> None:
        """Note all parameters as left out, by a rank without data."""
        self._absent = set(range(count))

    @property
    def absent(self) -> set[int]:
        """The parameters that no forward of the window has used."""
        return self._absent or set()

    def end_backward(self) -> None:
        """Clear what belongs to one backward only: it is over, whatever its outcome."""
        self.awaits_backward = False
        self.last_synchronizes = None

    def end_synchronization(self) -> None:
        """Clear what belongs to one synchronization only: it is over, whatever its outcome."""
        self.any_forward = self.awaits_backward = False
        self._absent = None

    # -- abstaining: see [Note: the same window] -------------------------------------------------------------------

    def abstained(self, buckets: Sequence[Bucket]) -> None:
        """Record that all ranks know that this one abstains, and that the window is over for them."""
        self.abstentions += 1
        self._abstained, self.reported = True, Reported.ABSTAINED
        self._left.note(buckets, self._outside())

    def begin_next(self) -> None:
        """Begin a window that the other ranks do not know of: everything from here on belongs to it."""
        self.reported = None
        self.end_abstention()

    def end_abstention(self) -> None:
        """Begin a window after the one from which this rank has abstained: everything from here on belongs to it."""
        self._abstained = False
        self._left.forget()

    @property
    def has_abstained(self) -> bool:
        """Whether this rank may no longer contribute to the window."""
        if self._abstained and (self._left.has_lost or self._left.has_changed):
            self.end_abstention()
        return self._abstained

    def refuse_second_abstention(self) -> None:
        if self.has_abstained:
            raise MisuseError(
                "abstain() was called a second time in one window, of which all ranks know by the first, or by "
                "an error in backward. If it is meant for the next window, end this one first: call optimizer.step() "
                "on this rank as on the others (it changes nothing where the window is skipped), or zero_grad()"
            )

    def expect_backward(self) -> None:
        """Refuse the backward that is about to run if this rank has abstained instead."""
        if self.has_abstained:
            self.refuse_backward()

    def refuse_backward(self) -> None:
        """Refuse the backward of a forward that ran before the abstention."""
        raise MisuseError(
            "a backward has reached a forward from which this rank has abstained: abstain() stands in the place of the "
            "backward, and the other ranks have ended the window by now. Drop this loss, and end the window on this "
            "rank as on the others, with optimizer.step() or zero_grad()"
        )
