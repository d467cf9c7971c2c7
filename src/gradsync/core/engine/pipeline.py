"""The bucket pipeline: buckets start in one order, the same on all ranks, and finish in that order.

::

    FILLING ──all chunks full──▶ READY ──its turn, start──▶ REDUCING ──finish──▶ REDUCED

Gradients become ready in any order, and a bucket may be full long before its turn; it then waits. This alone rules out
mismatched collectives. Callers with nothing left to wait for call :meth:`Pipeline.flush`.
"""

import enum
import logging
from collections.abc import Sequence

import torch

from gradsync.base.errors import LateGradientError, PeerFailedError
from gradsync.communicator import Communicator, Handle
from gradsync.communicator.logs import log_errors
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.chunk import LATE_REMEDY, Chunk
from gradsync.core.bucket.control_flags import Requests, set_control_flags
from gradsync.core.bucket.norm import BucketNorms
from gradsync.core.engine.flag_reader import FlagReader, ReductionNotice
from gradsync.core.engine.observer import Observers
from gradsync.core.engine.state import CollectiveSection
from gradsync.core.reduction import Reduction
from gradsync.core.window.skip_vote import SkipVote

__all__ = ["BucketState", "Pipeline"]

LOGGER = logging.getLogger("gradsync")

# The version of a bucket in which nothing was scaled yet.
NOT_SCALED = -1


class BucketState(enum.Enum):
    """How far a bucket has come."""

    FILLING = "filling"
    READY = "ready"
    REDUCING = "reducing"
    REDUCED = "reduced"


class Pipeline:
    """The buckets of one synchronizer, and the progress of each through its reduction."""

    def __init__(self, communicator: Communicator, reduction: Reduction, skip_vote: SkipVote) -> None:
        self.communicator = communicator
        self.skip_vote = skip_vote
        self.observer: Observers | None = None
        self.buckets: list[Bucket] = []
        # The sum over ranks is divided by ``divisor``; before that, this rank's gradients are multiplied by
        # ``local_scale``, the weight of its micro-batches. See :mod:`gradsync.core.window.weights`.
        self.divisor, self.local_scale = float(communicator.world_size), 1.0
        self._check = None if skip_vote.holds_back else skip_vote.check
        # Where there is no bucket, because there are no dense gradients, the control flags are sent alone.
        self._lone_control = torch.zeros(communicator.world_size + Requests.PLACES, device=communicator.device)
        self._notice = ReductionNotice(reduction)
        self.flags = FlagReader(communicator, skip_vote, self._notice)
        # The part of a synchronization on this rank that must run as a whole. See [Note: an interrupt].
        self.section = CollectiveSection()
        self.reduce_with(reduction)
        self.set_buckets([])

    def __repr__(self) -> str:
        states = [self.state_of(bucket) for bucket in self.buckets]
        counts = ", ".join(f"{states.count(each)} {each.value}" for each in BucketState if each in states)
        return f"Pipeline({counts or 'no'} buckets; {self.reduction!r} over {self.communicator!r})"

    def reduce_with(self, reduction: Reduction) -> None:
        """Replace the reduction, between two windows; :meth:`set_buckets` must follow."""
        self.flags.await_window_end()
        self.reduction = self._notice.reduction = reduction
        # Some communicators write into a bucket so that its version changes (Gloo does on GPUs), and torch's hooks may.
        # Versions then reveal nothing about late gradients, and gradients must be counted.
        self.changes_versions = not (reduction.carries_tail or reduction.scatters)

    def set_buckets(self, buckets: Sequence[Bucket], observer: Observers | None = None) -> None:
        """Switch to different buckets."""
        self.flags.release_buckets()
        self.buckets = list(buckets)
        self.observer = observer
        self._last = len(self.buckets) - 1
        self._scales: list[float] = []
        self.reset()

    def reset(self) -> None:
        """Return to the state in which nothing is in flight, and nothing was gathered."""
        # Whatever prevented the last window from ending.
        self.conclude(succeeded=False)
        self.flags.reset()
        self.section.reset()
        self._overlapping = self._batched = False
        self._failed_rank: int | None = None
        self._tails_handle: Handle | None = None
        self._next = 0
        self._finished = 0
        self._pending: list[tuple[Bucket, Handle | None]] = []
        self._overdue: list[tuple[Bucket, Chunk]] = []
        self._versions = [NOT_SCALED] * len(self.buckets)
        for bucket in self.buckets:
            bucket.reopen()
        self._missing = [len(bucket.chunks) for bucket in self.buckets]

    def recount(self) -> None:
        """Count the full chunks again: some have become full by other ways than :meth:`chunk_full`."""
        self._missing = [sum(not chunk.full for chunk in bucket.chunks) for bucket in self.buckets]

    def state_of(self, bucket: Bucket) -> BucketState:
        """How far the bucket has come."""
        if bucket.index >= self._next:
            return BucketState.FILLING if self._missing[bucket.index] else BucketState.READY
        return BucketState.REDUCED if bucket.index < self._finished else BucketState.REDUCING

    def progress(self) -> str:
        """The progress of the buckets, in words. Other threads ask while a backward runs."""
        started, finished, buckets = self._next, self._finished, self.buckets
        if not buckets:
            return "no buckets"
        words = f"{started} of {len(buckets)} buckets started, {finished} finished"
        if finished < started:
            return f"{words}; the next to finish is {buckets[finished].describe()}"
        return f"{words}; the next to start is {buckets[started].describe()}" if started < len(buckets) else words

    @property
    def complete(self) -> bool:
        """Whether all buckets have been finished, so that no rank waits for another any more."""
        return self._finished == len(self.buckets) and (bool(self.buckets) or self._tails_handle is not None)

    @property
    def _tails_apart(self) -> bool:
        """Whether tails, and with them the control flags, are sent separately."""
        return not self.buckets or not self.reduction.carries_tail

    @property
    def control(self) -> torch.Tensor:
        """The control flags: in the last bucket, or alone where there is none."""
        return self.buckets[-1].control if self.buckets else self._lone_control

    # -- stage 3: during backward --------------------------------------------------------------------------------

    def divide(self, divisor: float, local_scale: float) -> None:
        """Set what the mean of this synchronization divides by; ranks have agreed on it, or will have."""
        if (divisor, local_scale) != (self.divisor, self.local_scale) or not self._scales:
            self.divisor, self.local_scale = divisor, local_scale
            self._scales = [
                local_scale * self.reduction.prescale(bucket, self.communicator, divisor) for bucket in self.buckets
            ]

    def begin(self, *, overlapping: bool, batched: bool) -> None:
        """Begin a synchronization. ``overlapping``: buckets may start before backward has ended.

        ``batched``: only the version of a bucket can reveal a gradient that comes too late, as gradients are not
        counted.
        """
        self._overlapping, self._batched = overlapping, batched
        while overlapping and self._next < self._last and not self._missing[self._next]:
            self._start(self.buckets[self._next])

    def chunk_overdue(self, bucket: Bucket, chunk: Chunk) -> None:
        """Note that a chunk's last gradient in the learned order is ready, but not all are: check it again later."""
        self._overdue.append((bucket, chunk))
        self._recheck_overdue()

    def _recheck_overdue(self) -> None:
        for candidate in list(self._overdue):
            if candidate in self._overdue and candidate[1].check_all_ready():
                self._overdue.remove(candidate)
                self.chunk_full(*candidate)

    def chunk_full(self, bucket: Bucket, chunk: Chunk) -> None:
        """Gather a chunk whose gradients are all ready, and start the buckets that are now full and due.

        Not the last bucket, which holds the control flags.
        """
        number = bucket.index
        if self.observer is not None:
            self.observer.chunk_full(bucket)
        if self._overlapping:
            if self._batched and self._versions[number] not in (NOT_SCALED, bucket.buffer._version):
                self._refuse_late(bucket)
            chunk.gather_scaled(self._scales[number])
            self._versions[number] = bucket.buffer._version
        else:
            # It may not be the last time: this rank accumulates, or the same parameter may get more gradients.
            chunk.gather()
        self._missing[number] -= 1
        if not self._missing[number]:
            if self.observer is not None:
                self.observer.bucket_ready(bucket)
            while self._overlapping and self._next < self._last and not self._missing[self._next]:
                self._start(self.buckets[self._next])
        if self._overdue:
            self._recheck_overdue()

    def _start(self, bucket: Bucket) -> None:
        number = bucket.index
        if self._batched and self._versions[number] not in (NOT_SCALED, bucket.buffer._version):
            self._refuse_late(bucket)
        for chunk in bucket.chunks:
            if not chunk.scaled:
                chunk.gather_scaled(self._scales[number])
        handle = None
        with self.section:
            self._next = number + 1
            if self._check is not None:
                self._check.check_bucket(bucket)
            if bucket.absent:
                bucket.compact()
            if bucket.plan.control:
                self._vote()
            if not bucket.absent or bucket.sends:
                # Not a method: one more call for every bucket.
                self._notice.is_due, self._notice.correction = True, 1.0
                handle = self.reduction.start(bucket, self.communicator, self.divisor)
                if LOGGER.isEnabledFor(logging.DEBUG):
                    LOGGER.debug(
                        "rank %d: start %s in %s", self.communicator.rank, bucket.describe(), handle.describe()
                    )
            self._pending.append((bucket, handle))
        self._versions[number] = bucket.buffer._version
        if handle is not None and self.observer is not None:
            self.observer.bucket_started(bucket, handle)

    def _refuse_late(self, bucket: Bucket) -> None:
        """Raise if autograd has written since gradients were scaled: the views share the bucket's version."""
        raise LateGradientError(
            f"a parameter of {bucket.describe()} received a further gradient when its gradient was already on its way "
            f"to the other ranks. {LATE_REMEDY}"
        )

    # -- stage 5: after backward ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Start all remaining buckets, full or not: backward has ended. Slots without a gradient contribute zeros.

        Late gradients are looked for before the control flags are sent: [Note: a failed backward] in :mod:`.backward`.
        """
        while self._next < self._last:
            self._start(self.buckets[self._next])
        for bucket, _ in self._pending if self._batched and not self.changes_versions else ():
            if self._versions[bucket.index] != bucket.buffer._version:
                self._refuse_late(bucket)
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
        if (self.reduction.scatters or not self.buckets) and self._tails_handle is None:
            self._send_tails()

    def finish(self, *, correction: float | torch.Tensor | None = None, norms: BucketNorms | None = None) -> None:
        """Wait for all buckets; afterwards every gradient is the mean. Raises if a rank's backward failed.
        ``correction`` multiplies means that were computed before the divisor was known."""
        if self._tails_apart:
            self._receive_tails()
        if correction is not None:
            self._notice.correction = correction
        for bucket, handle in self._pending:
            # Windows in which gradients are counted anyway find out whether the communicator changes versions.
            self.changes_versions |= not self._batched and self._versions[bucket.index] != bucket.buffer._version
            self._wait(bucket, handle)
            if correction is not None:
                bucket.payload.mul_(correction)
            bucket.finish()
            if norms is not None:
                norms.note(bucket)
            self._finished = bucket.index + 1
            if self.observer is not None:
                self.observer.bucket_finished(bucket)
        self.flags.received(self.control)

    def abandon(self) -> None:
        """Complete a synchronization whose backward failed here, so that no rank is left waiting.

        The other ranks may have started all buckets. This one starts the missing ones, with its vote in the control
        flags. If that fails too, the communicator itself is gone (or the reduction raises on every rank alike).
        """
        self._failed_rank = self.communicator.rank
        # The contents of buckets are worthless anyway, and must not be refused again.
        self._batched = False
        with log_errors("sending the remaining buckets failed"):
            # It may have failed before ranks had agreed on the divisor.
            self.divide(self.divisor, self.local_scale)
            self.flush()
            if self._tails_apart:
                self._receive_tails()
        for bucket, handle in self._pending:
            # If one fails, still wait for the others: they write into the buckets.
            with log_errors(f"waiting for {bucket.describe()} failed"):
                self._wait(bucket, handle)

    def _wait(self, bucket: Bucket, handle: Handle | None) -> None:
        if handle is None:
            return
        try:
            handle.wait()
        except PeerFailedError as error:
            raise type(error)(f"{error} [{bucket.describe()}]") from error
        if LOGGER.isEnabledFor(logging.DEBUG):
            LOGGER.debug("rank %d: finish %s in %s", self.communicator.rank, bucket.describe(), handle.describe())

    def _send_tails(self) -> None:
        """Send the tails that the reduction does not carry, all in one collective."""
        self._vote()
        tails = self._tails
        self._sent_tails = torch.cat([tail.to(tails[-1].device, torch.float32) for tail in tails])
        with self.section:
            self._tails_handle = self.communicator.all_reduce(self._sent_tails)

    def _receive_tails(self) -> None:
        """Wait for the tails.

        Those not sent yet are sent when the reduction has nothing more to send: a communication hook may start
        collectives from the callbacks of its futures, and one of the engine's in between would be paired with a
        different one on other ranks.
        """
        if self._tails_handle is None:
            for bucket, handle in self._pending:
                self._wait(bucket, handle)
            self._send_tails()
        assert self._tails_handle is not None
        self._tails_handle.wait()
        for tail, summed in zip(
            self._tails, self._sent_tails.split([tail.numel() for tail in self._tails]), strict=True
        ):
            tail.copy_(summed)

    @property
    def _tails(self) -> list[torch.Tensor]:
        return [bucket.tail for bucket in self.buckets] or [self._lone_control]

    @torch.no_grad()
    def correct(self, correction: float | torch.Tensor) -> None:
        """Multiply the means by a factor that became known after they had arrived."""
        self._notice.correction = self._notice.correction * correction
        for bucket in self.buckets:
            bucket.payload.mul_(correction)

    def conclude(self, *, succeeded: bool = True) -> None:
        """Note that nothing can happen to the means any more.

        On an accelerator it is not known yet whether they are valid.
        """
        if not self.flags.has_unread:
            self._notice.send(succeeded=succeeded)

    def await_end(self) -> None:
        """Wait until the reduction knows how the last window ended: its state is requested."""
        self.flags.await_window_end()

    def _vote(self) -> None:
        set_control_flags(self.control, self._failed_rank, self.flags.requests)
        self.skip_vote.mark(self.control)
