"""Skip votes: a rank votes to skip the window if its gradients are not finite, it abstains, or its backward failed.

::

    backward        every rank checks its own gradients, bucket by bucket         FiniteCheck
    control flags   say that there is a skip vote; all ranks read the same        core/bucket/control_flags.py
    afterwards      all learn which rank it was, and why                          SkipVote.gather_votes

Then all ranks do the same, as ``on_bad_step`` says:

raise        :class:`~gradsync.BadStepError` on all ranks, including the one that has voted to skip.
skip         backward ends as usual, and the next optimizer step changes nothing.
drop-rank    the mean is over the other ranks. If all have voted to skip, the window is skipped.

[Note: a failed backward is never dropped] Its error reaches the user's code on that rank alone, which zeroes gradients
and may not step. If the others stepped, replicas would differ from there on. So the window is skipped.

[Note: what is left of a skipped window] A hook cannot cancel a step, but an optimizer leaves parameters without a
gradient alone, along with their state. So the gradients are removed right before the step, and not sooner: code that
runs between backward and step finds gradients that are all zeros, or all NaN if some rank's were not finite. A
``GradScaler`` needs that: by what it finds it counts a step as good or lowers its scale, and it raises if it finds
nothing.

[Note: finite gradients] A sum over ranks does not tell whose numbers it came from, so every rank checks its own, bucket
by bucket, right before they are sent. On a CPU the sum of a bucket is enough, at the speed of memory: one number that
is not finite makes the sum not finite. Finite numbers may overflow in it, so this is only a suspicion, and a rare one;
the extremes of each gradient then show whether it is true, and which parameter it is.

On an accelerator the host must not wait, and learns of it from the control flags, which the device itself sets. There
the extremes are computed right away, in one operation for all gradients of a bucket.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gradsync.base.errors import BadStepError
from gradsync.communicator import Communicator
from gradsync.communicator.agreement import gather_bytes
from gradsync.communicator.logs import join_names, rank_name
from gradsync.core.bucket import Bucket
from gradsync.core.bucket.control_flags import RequestPlace, reads_at_once

__all__ = ["ON_BAD_STEP", "FiniteCheck", "OnBadStep", "SkipVote", "WindowVerdict", "invalidate"]

LOGGER = logging.getLogger("gradsync")


class FiniteCheck:
    """Checks in one window whether this rank's gradients are finite, and remembers which are not."""

    def __init__(self) -> None:
        # Parameters by their index in the model; and the extremes of gradients, until they are read.
        self._found: dict[int, str] = {}
        self._unread: list[tuple[Bucket, list[int], torch.Tensor]] = []

    def forget(self) -> None:
        """Drop all findings: another window begins."""
        self._found.clear()
        self._unread.clear()

    @torch.no_grad()
    def check_bucket(self, bucket: Bucket) -> None:
        """Check a bucket whose gradients are complete, but still this rank's own."""
        if reads_at_once(bucket.plan.device):
            if not math.isfinite(bucket.payload.sum().item()):
                self._note(bucket, [slot for slot, view in enumerate(bucket.views) if not _is_finite(view)])
            return
        slots = [slot for slot, view in enumerate(bucket.views) if view.numel()]
        if slots:
            extremes = torch.stack(torch._foreach_norm([bucket.views[slot] for slot in slots], math.inf))
            self._unread.append((bucket, slots, extremes))

    @torch.no_grad()
    def check_outside(self, outside: Iterable[tuple[int, str, torch.Tensor | None]]) -> None:
        """Check gradients that have no place in a bucket: the parameter's index, its name, the gradient."""
        for index, name, gradient in outside:
            if gradient is not None and not _is_finite(gradient._values() if gradient.is_sparse else gradient):
                self._found[index] = name

    def mark(self, place: torch.Tensor) -> None:
        """Mark ``place`` in the control flags, if anything was found."""
        if self._found:
            place.fill_(1)
        for _, _, extremes in self._unread:
            place.logical_or_(~extremes.to(place.device).isfinite().all())

    @property
    def first(self) -> str | None:
        """The first parameter of the model whose gradient is not finite. On an accelerator the host waits for it."""
        unread, self._unread = self._unread, []
        for bucket, slots, extremes in unread:
            are_finite = extremes.isfinite().tolist()
            self._note(bucket, [slot for slot, is_finite in zip(slots, are_finite, strict=True) if not is_finite])
        return self._found[min(self._found)] if self._found else None

    def _note(self, bucket: Bucket, slots: Iterable[int]) -> None:
        for slot in slots:
            self._found[bucket.plan.slots[slot].parameter] = bucket.specs[slot].name


def _is_finite(gradient: torch.Tensor) -> bool:
    """Whether all numbers are finite, by the extremes: on a CPU many times as fast as checking each number."""
    if not gradient.numel():
        return True
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(gradient))


OnBadStep = Literal["raise", "skip", "drop-rank"]
ON_BAD_STEP = ("raise", "skip", "drop-rank")

# The prefix of a rank's reason when it is sent.
ABSTAINS, NOT_FINITE, STILL = b"a", b"n", b"s"


@dataclass(frozen=True, kw_only=True)
class WindowVerdict:
    """The agreement of all ranks: how many are left out of the mean, or that there is none and the window is skipped.

    ``finite``: all gradients were.
    """

    dropped: int = 0
    finite: bool = True

    @property
    def skips(self) -> bool:
        return self.dropped == 0


class SkipVote:
    """This rank's vote on a window, and what it has learned of the others'."""

    def __init__(self, on_bad_step: OnBadStep | None, communicator: Communicator) -> None:
        self._on_bad_step = on_bad_step
        self._communicator = communicator
        self._abstention: str | None = None
        self._keeps_rejecting = False
        # Only those who request the check pay for it.
        self.check = None if on_bad_step is None else FiniteCheck()
        # No bucket may start before all were checked: a dropped rank must not have sent any.
        self.holds_back = on_bad_step == "drop-rank"
        # All ranks wait for the control flags, even on an accelerator, to learn of a skip vote before the step.
        self.reads_at_once = on_bad_step is not None
        # A failed backward on another rank is not an error here: the window is skipped.
        self.tolerates = on_bad_step in ("skip", "drop-rank")

    @property
    def votes_to_skip(self) -> bool:
        """Whether this rank votes to skip, whatever its gradients are."""
        return self._abstention is not None or self._keeps_rejecting

    @property
    def abstains(self) -> bool:
        """Whether this rank contributes nothing to the window."""
        return self._abstention is not None

    def abstain(self, reason: str) -> None:
        """Record that this rank contributes nothing to the window."""
        self._abstention = reason

    def keep_rejecting(self) -> None:
        """Vote to skip: the window was rejected in an earlier synchronization, and its gradients are still there."""
        self._keeps_rejecting = True

    def forget(self) -> None:
        """Drop the vote and what was found: the synchronization is over."""
        self._abstention, self._keeps_rejecting = None, False
        if self.check is not None:
            self.check.forget()

    def mark(self, control: torch.Tensor) -> None:
        """Vote to skip in the control flags, if any gradient was found that is not finite."""
        if self.check is not None:
            self.check.mark(control[control.numel() + RequestPlace.SKIP])

    @property
    def reason(self) -> bytes:
        """The reason why this rank votes to skip; empty if it does not."""
        if self._abstention is not None:
            return ABSTAINS + self._abstention.encode()
        if self._keeps_rejecting:
            return STILL
        first = None if self.check is None else self.check.first
        return b"" if first is None else NOT_FINITE + first.encode()

    # -- the votes of all ranks ------------------------------------------------------------------------------------

    def gather_votes(self) -> WindowVerdict:
        """Learn who votes to skip and why, once the control flags say that somebody does, and decide what follows.

        That may be a :class:`BadStepError` on all ranks. Collective.
        """
        reasons = gather_bytes(self._communicator, self.reason)
        votes = {rank: reason for rank, reason in enumerate(reasons) if reason}
        why = join_names([self._describe(rank, reason) for rank, reason in votes.items() if reason != STILL] or [""])
        if self._on_bad_step == "raise":
            raise BadStepError(
                f"{why}, so these gradients are not the mean over all ranks. Call zero_grad() before the next backward"
            )
        finite = not any(reason.startswith(NOT_FINITE) for reason in reasons)
        drops = self.holds_back and len(votes) < len(reasons) and STILL not in votes.values()
        if drops:
            self._warn(f"{why}: the mean of this window is over the other ranks")
            return WindowVerdict(dropped=len(votes))
        if why:
            self._warn(f"{why}: this window is skipped on all ranks, and no optimizer steps on it")
        return WindowVerdict(finite=finite)

    def tolerate(self, failed: Sequence[int]) -> WindowVerdict:
        """Skip the window, as the control flags say that the backwards of the ``failed`` ranks failed.

        These do not take part here.
        """
        names = join_names([rank_name(self._communicator.group, rank) for rank in failed])
        present = next((rank for rank in range(self._communicator.world_size) if rank not in failed), 0)
        self._warn(f"the backward of {names} failed: this window is skipped on all ranks", by=present)
        return WindowVerdict()

    def _describe(self, rank: int, reason: bytes) -> str:
        name, text = rank_name(self._communicator.group, rank), reason[1:].decode()
        if reason.startswith(NOT_FINITE):
            return f"the gradient of parameter {text!r} on {name} is not finite"
        return f"{name} abstains ({text})" if text else f"{name} abstains"

    def _warn(self, text: str, by: int = 0) -> None:
        if self._communicator.rank == by:
            LOGGER.warning(text)


@torch.no_grad()
def invalidate(buckets: Sequence[Bucket], outside: Sequence[torch.nn.Parameter], *, finite: bool) -> None:
    """Leave nothing of a window's gradients that could be used. See [Note: what is left of a skipped window]."""
    value = 0.0 if finite else float("nan")
    # Not the padding between gradients, which nothing would clear.
    gradients = [view for bucket in buckets for view in bucket.views]
    gradients += [parameter.grad for parameter in outside if parameter.grad is not None]
    for gradient in gradients:
        (gradient._values() if gradient.is_sparse else gradient).fill_(value)
