"""Reads the control flags of each window, and tells the reduction how the window ended.

On a CPU the flags are read as they arrive. On an accelerator the host would have to wait for the device, so it only
starts a copy of them, and reads that when it must:

==================  ==================================================================================
await_requests      before collectives that some rank has requested; a rank without gradients, always
gate_step           before the step of an optimizer that cannot be gated on the device
await_window_end    before the state of the reduction is used
read_late           before the flags of the next window are sent, on every rank: no rank raises earlier or later
==================  ==================================================================================
"""

from collections.abc import Sequence

import torch

from gradsync.base.errors import PeerFailedError
from gradsync.communicator import Communicator
from gradsync.communicator.collective import copy_failure
from gradsync.core.bucket.control_flags import (
    NOT_STEPPED,
    STEPPED,
    HostCopy,
    Requests,
    failed_ranks,
    raise_if_failed,
    raise_if_unknown,
    reads_at_once,
    step_gate,
)
from gradsync.core.reduction import Reduction
from gradsync.core.window.skip_vote import SkipVote

__all__ = ["FlagReader", "ReductionNotice"]


class ReductionNotice:
    """Notifies the reduction, once per window, of how a window ended whose buckets it was given."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        # Whether it was given a bucket and not yet notified; and what the means were multiplied by since.
        self.is_due = False
        self.correction: float | torch.Tensor = 1.0

    def send(self, *, succeeded: bool) -> None:
        """Notify the reduction, if that is due."""
        if self.is_due:
            self.is_due = False
            self.reduction.window_ended(succeeded=succeeded, correction=self.correction)


class FlagReader:
    """The control flags that one synchronizer has received, read now or later."""

    def __init__(self, communicator: Communicator, skip_vote: SkipVote, notice: ReductionNotice) -> None:
        self._communicator, self._skip_vote, self._notice = communicator, skip_vote, notice
        # The flags of the last window, on an accelerator, until they are read: on their way to the host, and in the
        # bucket they came with.
        self._unread: HostCopy | None = None
        self._control: torch.Tensor | None = None
        # Computed from those on the device, when an optimizer is about to step. See [Note: the step gate] in
        # :mod:`.step_guard`.
        self._gate: torch.Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget requests and failures: the window is over. Flags that were not read yet still will be."""
        # What this rank requests, and once the flags were read what any rank requests; and whose backward failed.
        self.requests = Requests()
        self.failed: list[int] = []

    @property
    def has_unread(self) -> bool:
        """Whether flags have arrived that the host has not read."""
        return self._unread is not None

    def received(self, control: torch.Tensor) -> None:
        """Read the summed flags, or start copying them to the host. Raises if a rank's backward failed."""
        if reads_at_once(control.device):
            self._evaluate(control.tolist())
        else:
            self.require_alive()
            self._unread, self._control, self._gate = HostCopy(control), control, None

    def require_alive(self) -> None:
        """Raise the failure of the communicator, if there is one.

        On an accelerator its kernels were aborted, and have left behind something that is not a mean, before the host
        may have noticed.
        """
        failure = self._communicator.failure
        if failure is not None:
            raise copy_failure(failure)

    def release_buckets(self) -> None:
        """Take the flags out of the bucket they came with, which is about to go: a step may still be gated by them."""
        if self._control is not None:
            self._control = self._control.clone()

    # -- on an accelerator -----------------------------------------------------------------------------------------

    def await_requests(self) -> None:
        """Wait for the requests of all ranks.

        Raises if only some ranks wait for them: nothing can be done then that requires all ranks.
        """
        if self._unread is not None:
            self._evaluate(self._take_unread(), late=True)

    def read_late(self) -> PeerFailedError | None:
        """The failure in the last window's flags, if they were not read yet.

        All ranks call this before the next flags are sent: a rank that raised at a time of its own would be a window
        behind the others.
        """
        if self._unread is not None:
            since = STEPPED if self._gate is None else NOT_STEPPED
            try:
                _, requests = self._checked(self._take_unread(), since, late=True)
                self._notice.send(succeeded=not requests.late)
            except PeerFailedError as error:
                return error
        return None

    def await_window_end(self) -> None:
        """Notify the reduction of how the last window ended: its state is requested, or it is about to be replaced.

        On an accelerator the host waits for that. What it reads is still raised later, where all ranks raise it.
        """
        if self._unread is not None and self._notice.is_due:
            votes = self._unread.wait()
            try:
                self.require_alive()
                self._checked(votes, late=True)
            except PeerFailedError:
                self._notice.send(succeeded=False)
            self._notice.send(succeeded=True)

    def gate_step(self, *, gated: bool) -> torch.Tensor | None:
        """Keep an optimizer from a step on gradients that are not the mean, where the flags were not read yet.

        If the step can be ``gated``, returns a tensor on the device that is 1.0 if it must change nothing. Otherwise
        the host waits, and raises if needed.
        """
        control = self._control
        if control is None or self._communicator.world_size == 1:
            return None
        if control.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if gated:
            if self._gate is None:
                self._gate = step_gate(control, getattr(self._communicator, "failure_flags", []))
            return self._gate
        self.await_requests()
        self._notice.send(succeeded=not self.requests.late)
        return None

    # -- reading ---------------------------------------------------------------------------------------------------

    def _take_unread(self) -> list[float]:
        assert self._unread is not None
        votes, self._unread, self._control = self._unread.wait(), None, None
        self.require_alive()
        return votes

    def _evaluate(self, votes: Sequence[float], *, late: bool = False) -> None:
        self.failed, self.requests = self._checked(votes, late=late)

    def _checked(self, votes: Sequence[float], since: str = "", *, late: bool) -> tuple[list[int], Requests]:
        """The failed ranks, and the requests of all ranks.

        Raises if a rank's backward has failed, unless that is tolerated; or, if the flags were not read as they arrived
        (``late``), if some rank requested what not all ranks know of.
        """
        failed, requests = failed_ranks(votes), Requests.read(votes)
        try:
            if not self._skip_vote.tolerates:
                raise_if_failed(failed, since)
            if late:
                raise_if_unknown(requests, since)
        except PeerFailedError:
            self._notice.send(succeeded=False)
            raise
        return failed, requests
