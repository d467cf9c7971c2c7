"""Early updates: shares that are updated and gathered while backward still runs, ahead of ``step()``.

Reduce-scatters are half of the bytes of a step. When the next forward is too short for the other half, the link has
time left in backward. So some shares are updated as soon as their mean is there, and gathered at once, into memory
beside the bucket. Neither gradients nor parameters change by it: ``step()`` uses an early update if it would have
computed the same, and otherwise undoes it and does what it always does. The result would differ if, since then,

- options of a parameter group, gradients (clipped, unscaled), or the parameters themselves have changed;
- means have been corrected for weights that were known late, or the backward has failed on some rank;
- a parameter turned out to be used by no rank, and must not be updated.

This may hold on one rank only, so all agree on it, with one number per step. After an undo, early updates pause.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from gradsync.communicator import Communicator, Handle, Together
from gradsync.core.bucket import Bucket
from gradsync.core.reduction.shared_gradient import SharedGradient
from gradsync.optim.sharded.options import Options, copied, same
from gradsync.optim.sharded.segments import Before, Segments
from gradsync.optim.sharded.share import Share

__all__ = ["EarlyUpdates"]

# Steps without early updates after the first undo; doubled after every further one.
PAUSE = 2
LONGEST_PAUSE = 1 << 16


class _Update:
    """One share, updated early. Kept from window to window, for its memory."""

    def __init__(self, share: Share, segments: Segments, wire: Communicator) -> None:
        self.share = share
        self._segments, self.before = segments, Before(segments, share)
        size, dtype = share.gathered.numel(), share.gathered.dtype
        self.gathered = wire.allocate(size, dtype, share.gathered.device)[:size]
        own = slice(wire.rank * share.plan.share, (wire.rank + 1) * share.plan.share)
        self.own = self.gathered[own]
        self.views = share.bucket.views_of(self.gathered)
        # Done when the update has been made, or never will be.
        self.making: Handle | None = None
        self.gathering: Handle | None = None
        self.is_made = False
        # Where the new share is.
        self.made = self.own
        self.options: Options = []
        self._versions = (0, 0)

    def make(self, options: Options) -> None:
        """Update the share with its mean."""
        self.options = copied(options)
        if not self.before.fits(self._segments):
            self.before = Before(self._segments, self.share)
        self._segments.load([self.share])
        self.before.take()
        self.made = self.share.flat
        if self.share.is_in_place:
            # Parameters must not change: update a copy of them, which is needed anyway.
            self.made = self.own.copy_(self.share.flat)
        self._segments.update(self.options, self.before.segments, self.made)
        self.is_made = True

    def note_versions(self) -> None:
        """From now on only the user writes into the gradients."""
        self._versions = _versions(self.share.bucket)

    def holds(self, options: Options) -> bool:
        """Whether a step with ``options`` would compute the same from it, now."""
        return (
            self.is_made
            and self._versions == _versions(self.share.bucket)
            and same(self.options, options)
            and all(
                isinstance(part.parameter.grad, SharedGradient) for each in self.before.segments for part in each.parts
            )
            and self.share.is_current(self.before.flat)
        )

    def undo(self) -> None:
        if self.is_made:
            self.before.restore(self.made)
            self.is_made = False


class EarlyUpdates:
    """The early updates of one optimizer. ``options`` returns the current options of the parameter groups; ``started``
    is notified of gathers."""

    def __init__(
        self, wire: Communicator, options: Callable[[], Options], started: Callable[[Bucket, Handle], None]
    ) -> None:
        self._wire, self._options, self._started = wire, options, started
        self._lock = threading.Lock()
        self._updates: dict[int, _Update] = {}
        # Of the running window: whether there are any, the same on all ranks; and whether they are valid here.
        self.are_asked_for = False
        self._hold = False
        self._verdict: Verdict | None = None
        self.pause, self._steps_to_pause = PAUSE, 0
        # The number of steps that could use what was made, and of those that could not.
        self.held = self.undone = 0

    def plan(self, early: Sequence[int], segments: Segments) -> None:
        """From now on update the shares of these buckets early. On all ranks alike, between two windows."""
        self.forget()
        # In this order on all ranks: with some communicators all ranks allocate memory together.
        self._updates = {index: _Update(segments.shares[index], segments, self._wire) for index in early}

    def forget(self) -> None:
        """Buckets or segments are going away."""
        self.withdraw()
        self._updates = {}

    # -- in backward ---------------------------------------------------------------------------------------------

    def window_began(self) -> None:
        """The ranks are negotiating before the first bucket."""
        self._hear()
        self.withdraw()
        self.are_asked_for, self._hold = False, True

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        """Its reduce-scatter is in flight: if it is an early bucket, update and gather its share right after."""
        update = self._updates.get(bucket.index)
        if update is None or self._steps_to_pause:
            return
        self.are_asked_for = True
        update.making = handle.then(partial(self._make, update))
        update.gathering = update.making.then(partial(self._gather, update))

    def _make(self, update: _Update) -> None:
        with self._lock:
            if self._hold:
                update.make(self._options())
                if update.made is not update.own:
                    update.own.copy_(update.made)

    def _gather(self, update: _Update) -> Handle:
        """Gather whatever has happened here: the other ranks do."""
        handle = self._wire.all_gather(update.gathered, update.own)
        self._started(update.share.bucket, handle)
        return handle

    def received(self) -> None:
        """Means are complete, and the user may change them."""
        for update in self._updates.values():
            update.note_versions()

    # -- in the step ---------------------------------------------------------------------------------------------

    def claim(self) -> dict[Share, torch.Tensor]:
        """The shares that were updated as this step would do it, and where the new ones are. Unless all are valid, all
        are undone, and the result is empty."""
        options = self._options()
        for update in self._updates.values() if self.are_asked_for else ():
            assert update.making is not None
            update.making.wait()
        made = [update for update in self._updates.values() if update.is_made]
        if not self._hold or not all(update.holds(options) for update in made):
            self.withdraw()
            return {}
        for update in made:
            update.is_made = False
        return {update.share: update.made for update in made}

    def agree(self, communicator: Communicator, *, hold: bool) -> "Verdict":
        """Whether they are valid on all ranks; if not, all gather them again. Collective."""
        self._verdict = Verdict(communicator, list(self._updates.values()), hold=hold)
        return self._verdict

    def is_early(self, share: Share) -> bool:
        """Whether an early update was requested in this window, the same on all ranks."""
        return self.are_asked_for and share.plan.index in self._updates

    def stepped(self) -> None:
        """A step is over, on all ranks."""
        if not self.are_asked_for:
            self._steps_to_pause = max(0, self._steps_to_pause - 1)
        self.are_asked_for = False

    def _hear(self) -> None:
        """Wait until all ranks know the result, before the next window."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        if verdict.holds():
            self.held += 1
        else:
            self._steps_to_pause = min(self.pause << self.undone, LONGEST_PAUSE)
            self.undone += 1

    def withdraw(self) -> None:
        """Discard what was made. (The gathers in flight have no owner, and end by themselves.)"""
        with self._lock:
            self._hold = False
            for update in self._updates.values():
                update.undo()


class Verdict:
    """The agreement of all ranks on their early updates, and what follows from it: in the background, at the same
    position in the order of collectives on all ranks, whatever each of them is doing."""

    def __init__(self, communicator: Communicator, updates: Sequence[_Update], *, hold: bool) -> None:
        self._communicator, self._updates = communicator, updates
        self._failed = torch.tensor([float(not hold)], device=communicator.device)
        self._handle = communicator.all_reduce(self._failed, "max").then(self._gather_again)

    def _gather_again(self) -> Handle | None:
        if self._failed.item() == 0.0:
            return None
        for update in self._updates:
            update.share.put_down()
        # The parameters that the next forward needs first were reduced last.
        shares = sorted((update.share for update in self._updates), key=lambda share: -share.plan.index)
        return Together([self._communicator.all_gather(share.gathered, share.sent) for share in shares])

    def holds(self) -> bool:
        """Wait for it."""
        self._handle.wait()
        return bool(self._failed.item() == 0.0)

    def arrive(self, share: Share) -> Sequence[torch.Tensor]:
        """Wait for the parameters of an early share; returns where they are."""
        update = next(update for update in self._updates if update.share is share)
        if not self.holds():
            return share.gathered_views
        assert update.gathering is not None
        update.gathering.wait()
        return update.views


def _versions(bucket: Bucket) -> tuple[int, int]:
    return bucket.buffer._version, bucket.wire._version
