"""The pipeline from the means of shares to the parameters of all ranks: update, gather, wait.

Mostly in ``step()``; some before it, see :mod:`gradsync.optim.sharded.early`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from gradsync.communicator import (
    Communicator,
    Handle,
    HierarchicalCommunicator,
    SharedMemoryCommunicator,
    scattering_over,
)
from gradsync.core.bucket import Bucket
from gradsync.core.engine.synchronizer import Synchronizer
from gradsync.optim.sharded.early import EarlyUpdates
from gradsync.optim.sharded.gather import Gather, Gathers
from gradsync.optim.sharded.options import Options
from gradsync.optim.sharded.pace import Pace, plan_early
from gradsync.optim.sharded.segments import Segment, Segments
from gradsync.optim.sharded.share import Share

__all__ = ["GatherPipeline"]


class GatherPipeline:
    """The work in flight of one sharded optimizer; ``options()`` returns the current options of its groups. It follows
    reduce-scatters: :class:`~gradsync.core.reduction.mean.Follower`."""

    def __init__(self, synchronizer: Synchronizer, options: Callable[[], Options]) -> None:
        self._synchronizer = synchronizer
        self._communicator = synchronizer.engine.communicator
        self._options = options
        # Used by reduce-scatters, and by gathers between them.
        self.wire = scattering_over(self._communicator, synchronizer.parameters[0].device)
        self.early = EarlyUpdates(self.wire, options, self._tell)
        self.pace = Pace()
        self.segments: Segments | None = None
        self._gathers = Gathers(synchronizer.parameters[0].device)
        # Ranks that share memory are faster in the communicator's own memory, where parameters do not lie.
        sharing = SharedMemoryCommunicator, HierarchicalCommunicator
        self._through_bucket = isinstance(self._communicator, sharing)

    def take(self, segments: Segments | None) -> None:
        """Buckets were rebuilt, or parameter groups cut the shares differently; None if no shares are left."""
        self.early.forget()
        self.pace.restart()
        self.segments = segments

    def let_go(self) -> None:
        """Release the buckets, which are about to go."""
        self.early.forget()
        if self.segments is not None:
            self.segments.let_go()

    # -- in backward -----------------------------------------------------------------------------------------------

    def window_began(self) -> None:
        """The ranks are negotiating before the first bucket, and may add to it."""
        if self.segments is not None and self._may_be_early and self.pace.window_began():
            self._plan(self.segments)
        self.early.window_began()

    @property
    def _may_be_early(self) -> bool:
        """False on an accelerator: the host does not know in time whether an early update is valid."""
        tuner = self._synchronizer.engine.options.tuner
        return self.wire.device.type == "cpu" and (tuner is None or tuner.finished)

    def _plan(self, segments: Segments) -> None:
        sizes = [share.gathered.nbytes for share in segments.shares]
        reduced = sum(share.flat.nbytes for share in segments.shares) * self.wire.world_size
        times = self.pace.agree(self._communicator)
        if not segments.are_placed:
            self._place(segments)
        self.early.plan(plan_early(times, sizes, gathered=sum(sizes) / max(reduced, 1)), segments)

    def bucket_started(self, bucket: Bucket, handle: Handle) -> None:
        """The reduce-scatter of the bucket was started."""
        self.pace.bucket_started()
        self.early.bucket_started(bucket, handle)

    def window_ended(self, *, well: bool) -> None:
        """Unless ``well``, the means are not, or not exactly, what was received."""
        if not well:
            self.early.withdraw()

    # -- in the step -----------------------------------------------------------------------------------------------

    def step(self, others: Sequence[nn.Parameter], update_others: Callable[[], None]) -> None:
        """Update this rank's shares, and have all ranks gather them, in the order in which the next forward needs them.

        ``others`` have no place in a bucket. They are part of the same step: no reader gets them without the rest.
        """
        segments = self.segments
        if segments is None:
            update_others()
            return
        self._synchronizer.engine.sharing.use_up(self._synchronizer.buckets)
        by_need = segments.shares[::-1]

        def make(gathers: Sequence[Gather]) -> None:
            update_others()
            self._make(segments, dict(zip(by_need, gathers, strict=False)))

        self._gathers.change([*(share.bucket.parameters for share in by_need), others], make)

    def _make(self, segments: Segments, gathers: Mapping[Share, Gather]) -> None:
        self._place(segments)
        claimed = self.early.claim()
        changing = segments.prepare([share for share in segments.shares if share not in claimed])
        # From here on parameters are neither old nor new.
        for share, made in claimed.items():
            if made is not share.flat:
                share.flat.copy_(made)
        # The bucket that started last holds what is needed first. It is sent while the others are updated. But where it
        # is an early one, ranks agree on all early ones before it: by then all must be up to date.
        by_need = segments.shares[::-1]
        first = [] if self.early.is_early(by_need[0]) else by_need[:1]
        for shares in first, by_need[len(first) :]:
            self._update([segment for segment in changing if segment.share in shares], segments)
            self._send(shares, gathers, hold=bool(claimed))
        self.early.stepped()
        self.pace.stepped()

    def _place(self, segments: Segments) -> None:
        segments.place(self._synchronizer.parameters, through_bucket=self._through_bucket)

    def _update(self, changing: Sequence[Segment], segments: Segments) -> None:
        try:
            segments.update(self._options(), changing)
        except BaseException as error:
            # The others have updated their shares, and wait for this one.
            self.wire.abort(f"its optimizer raised {type(error).__name__}: {error}")
            raise

    def _send(self, shares: Sequence[Share], gathers: Mapping[Share, Gather], *, hold: bool) -> None:
        """Have all ranks gather them, in this order. ``hold``: this rank's early updates are valid."""
        verdict = None
        for share in shares:
            if self.early.is_early(share):
                # Only when it is needed: in transit it would be as late as any other.
                verdict = verdict or self.early.agree(self._communicator, hold=hold)
                arrive = partial(verdict.arrive, share)
            else:
                arrive = partial(_arrive, share, self._gather(share, self._communicator))
            gathers[share].started(partial(self._hand_over, share, arrive))

    def _gather(self, share: Share, communicator: Communicator) -> Handle:
        share.put_down()
        # Not through the reduce-scatter communicator: where there is one, Gloo's own gather uses less of a core here.
        handle = communicator.all_gather(share.gathered, share.sent)
        self.pace.gather_started(handle)
        self._tell(share.bucket, handle)
        return handle

    def _tell(self, bucket: Bucket, handle: Handle) -> None:
        """Notify the engine's observers."""
        observer = self._synchronizer.engine.observer
        if observer is not None:
            observer.gather_started(bucket, handle)

    # -- and after it ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all parameters have their new values."""
        self._gathers.finish()

    def _hand_over(self, share: Share, arrive: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Wait for the new parameters of a bucket, and replace the old ones with them."""
        observer = self._synchronizer.engine.observer
        if observer is not None:
            observer.gather_needed(share.bucket)
        began = time.perf_counter()
        views = arrive()
        self.pace.waited(time.perf_counter() - began)
        if observer is not None:
            observer.gather_arrived(share.bucket)
        share.receive(views)

    def settle(self) -> None:
        """Complete the last step, because its state and parameters are needed."""
        self.early.withdraw()
        self.flush()


def _arrive(share: Share, handle: Handle) -> Sequence[torch.Tensor]:
    handle.wait()
    return share.gathered_views
