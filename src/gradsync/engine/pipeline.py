"""Buckets start in one order, the same on all ranks, and finish in that order.

Gradients become ready in any order, and a bucket may be full long before its turn; it then waits. That alone makes
mismatched collectives impossible. Whoever has nothing left to wait for calls :meth:`Pipeline.flush`.
"""

import contextlib
from collections.abc import Sequence

import torch

from gradsync.bucket.bucket import Bucket, BucketState
from gradsync.bucket.norm import BucketNorms
from gradsync.communicator import Communicator, Handle
from gradsync.engine.observer import Observer
from gradsync.errors import PeerFailedError
from gradsync.reduction import Reduction

__all__ = ["Pipeline"]


class Pipeline:
    """The buckets of one synchronization on their way over the wire."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        reduction: Reduction,
        observer: Observer | None = None,
    ) -> None:
        self.buckets = list(buckets)
        self.communicator = communicator
        self.reduction = reduction
        self.observer = observer
        self.divisor = float(communicator.world_size)
        # What this rank's gradients are multiplied with beside: weights of micro-batches, see gradsync.window.window.
        self.local_scale = 1.0
        self.wire_is_seen = not reduction.carries_tail
        self._next = 0
        self._pending: list[tuple[Bucket, list[Handle]]] = []
        self._failed_rank: int | None = None
        self._tails_sent = False
        self._deferred_ballot: _DeferredBallot | None = None

    def scale(self, bucket: Bucket) -> float:
        """What gradients are multiplied with while they are settled."""
        return self.local_scale * self.reduction.landing_scale(bucket, self.communicator, self.divisor)

    def start_ready(self) -> None:
        """Start all buckets whose turn has come and which are full, but for the last one, which holds the ballot."""
        while self._next < len(self.buckets) - 1 and self.buckets[self._next].state is BucketState.READY:
            self._start(self.buckets[self._next])

    def flush(self, *, counted: bool) -> None:
        """Backward has ended: start everything that is left, full or not. Slots without a gradient contribute zeros.

        ``counted`` says that every gradient was counted while it landed, so that none can have come too late.
        Otherwise the versions of the buckets tell, and they are looked at before the ballot goes: see
        [Note: a failed backward] in the backward engine.
        """
        while self._next < len(self.buckets) - 1:
            self._start(self.buckets[self._next])
        if not counted and not self.wire_is_seen:
            for bucket, _ in self._pending:
                if bucket.touched:
                    bucket.refuse_touched()
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])

    def finish(
        self, *, counted: bool, correction: float | torch.Tensor | None = None, norms: BucketNorms | None = None
    ) -> None:
        """Wait for all buckets; afterwards every gradient is the mean. Raises when a rank's backward had failed.

        ``correction`` is what means are multiplied with that were computed before the divisor was known.
        """
        if not self.reduction.carries_tail:
            self._exchange_tails()
        while self._pending:
            bucket, handles = self._pending[0]
            # Some wires write into the bucket so that it shows (Gloo does on GPUs). Then its version tells nothing, and
            # gradients must be counted. The windows in which they are counted anyway find out.
            self.wire_is_seen |= counted and bucket.touched
            while handles:
                handles[0].wait()
                del handles[0]
            if correction is not None:
                bucket.payload.mul_(correction)
            bucket.finish()
            if norms is not None:
                norms.note(bucket)
            del self._pending[0]
            if self.observer is not None:
                self.observer.bucket_finished(bucket)
        self._close()
        self._raise_for_failed_ranks()

    def abandon(self) -> None:
        """Bring a synchronization whose backward failed here to its end, so that no rank is left waiting.

        The other ranks may have started all buckets. This one starts those that are missing, with its vote in the
        ballot, and everybody learns that the gradients are worthless. If that fails too, the wire itself is gone (or
        the reduction raises on every rank alike), and there is nobody left to tell.
        """
        self._failed_rank = self.communicator.rank
        for bucket in self.buckets:
            # What lies in it is worthless anyway, and must not be refused again.
            bucket.watched = False
        with contextlib.suppress(Exception):
            self.flush(counted=True)
            if not self.reduction.carries_tail and not self._tails_sent:
                self._exchange_tails()
        for _, handles in self._pending:
            for handle in handles:
                # One that fails must not keep the others from being waited for: they still write into the buckets.
                with contextlib.suppress(Exception):
                    handle.wait()
        self._failed_rank = None
        self._close()
        for bucket in self.buckets:
            bucket.reopen()

    def _close(self) -> None:
        self._pending = []
        self._next = 0
        self._tails_sent = False

    def _exchange_tails(self) -> None:
        """Send the tails that the reduction does not carry, all in one, once it has nothing more to send itself.

        A communication hook may start further collectives from the callbacks of its futures. One of the engine's in
        between would meet another one on the other ranks.
        """
        for _, handles in self._pending:
            while handles:
                handles[0].wait()
                del handles[0]
        if self._failed_rank is not None:
            self.buckets[-1].ballot[self._failed_rank] = 1
        self._tails_sent = True
        tails = [bucket.tail for bucket in self.buckets]
        shared = torch.cat([tail.to(tails[-1].device, torch.float32) for tail in tails])
        self.communicator.all_reduce(shared).wait()
        for tail, summed in zip(tails, shared.split([tail.numel() for tail in tails]), strict=True):
            tail.copy_(summed)

    def check_deferred(self) -> None:
        """Raise if an earlier synchronization on an accelerator turns out to have failed. Never waits."""
        if self._deferred_ballot is not None and self._deferred_ballot.arrived():
            votes, self._deferred_ballot = self._deferred_ballot.votes(), None
            _raise_for(votes)

    def _start(self, bucket: Bucket) -> None:
        bucket.settle(self.scale(bucket))
        self._next += 1
        bucket.load_tail(failed_rank=self._failed_rank)
        bucket.state = BucketState.REDUCING
        bucket.mark_version()
        handles: list[Handle] = []
        self._pending.append((bucket, handles))
        if not bucket.has_wire:
            return
        handles.append(self.reduction.start(bucket, self.communicator, self.divisor))
        if self.observer is not None:
            self.observer.bucket_started(bucket, handles[0])
        bucket.mark_version()

    def _raise_for_failed_ranks(self) -> None:
        if not self.buckets:
            return
        ballot = self.buckets[-1].ballot
        if ballot.device.type == "cpu":
            _raise_for(ballot.tolist())
        else:
            self._deferred_ballot = _DeferredBallot(ballot)


class _DeferredBallot:
    """The ballot of an accelerator's bucket, on its way to the host while backward goes on."""

    def __init__(self, ballot: torch.Tensor) -> None:
        self._copy = torch.empty(ballot.shape, dtype=ballot.dtype, pin_memory=True)
        self._copy.copy_(ballot, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._event.query())

    def votes(self) -> list[float]:
        votes: list[float] = self._copy.tolist()
        return votes


def _raise_for(votes: list[float]) -> None:
    failed = [rank for rank, vote in enumerate(votes) if vote > 0]
    if failed:
        names = ", ".join(f"rank {rank}" for rank in failed)
        raise PeerFailedError(
            f"the backward of {names} failed, so these gradients are not the mean over all ranks. See the error "
            "there; call zero_grad() before the next backward"
        )
