"""The control flags in the tail of the last bucket: votes on failed backwards, and requests to all ranks.

Sometimes only one rank knows that a parameter is trained again, that it counts micro-batches in a window where none did
before, or that its own gradients must not be used. It must not start a collective for that: the others would not. So
each kind of request has a place in the control flags, a rank that needs it sets a mark there, and all ranks read the
same sum and do the same after the buckets. A rank whose backward failed marks the place of its own number.

On an accelerator reading would make the host wait, so only those ranks read at once that have a request, or have
nothing else to do. They mark that, too, and every rank marks one more place: where both sums are equal, all ranks know
the requests and can carry them out.

[Note: late failures] For the same reason ranks learn of a failed backward only in the next window, and raise at its
end. The rank that failed does not raise again. To keep replicas equal, no rank may step on that window, so the ranks
that are about to raise mark it as late.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from gradsync.base.errors import PeerFailedError

__all__ = [
    "HostCopy",
    "RequestPlace",
    "Requests",
    "failed_ranks",
    "raise_if_failed",
    "raise_if_unknown",
    "reads_at_once",
    "set_control_flags",
]


class HostCopy:
    """A copy of the current values of ``numbers``, to be read later."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[float]:
        self._event.synchronize()
        numbers: list[float] = self._copy.tolist()
        return numbers


def reads_at_once(device: torch.device) -> bool:
    """Whether the host may read what was received: on an accelerator it would wait, and no longer run ahead."""
    return device.type == "cpu"


class RequestPlace(enum.IntEnum):
    """The place of each kind of request in the control flags, counted from their end.

    Before them each rank has a place, which it marks if its backward failed. :func:`step_gate` relies on the order.
    """

    # What all ranks must know, no matter which rank marks it; see :mod:`gradsync.core.engine.step_guard`.
    LATE = -6
    # A skip vote, weights that were not announced, and a parameter that is trained again.
    SKIP = -5
    WEIGHTS = -4
    TRAINED = -3
    # Marked by the ranks that read the control flags at once, and by every rank.
    KNOWN = -2
    EVERYBODY = -1


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests to carry out after the buckets.

    ``weights``: sums of weights; ``trained``: which parameters are trained; ``rejected``: which ranks reject the
    window, and why. ``late``: no rank steps on it; see [Note: late failures]. ``known``: this rank reads the control
    flags at once, or, if it was read, all ranks do.
    """

    weights: bool = False
    trained: bool = False
    rejected: bool = False
    late: bool = False
    known: bool = True

    # How many places they take in the control flags.
    PLACES: ClassVar[int] = len(RequestPlace)

    @classmethod
    def read(cls, control: Sequence[float]) -> Self:
        """The requests of all ranks, and whether all ranks know of them."""
        return cls(
            weights=control[RequestPlace.WEIGHTS] > 0,
            trained=control[RequestPlace.TRAINED] > 0,
            rejected=control[RequestPlace.SKIP] > 0,
            late=control[RequestPlace.LATE] > 0,
            known=control[RequestPlace.KNOWN] == control[RequestPlace.EVERYBODY],
        )

    @property
    def unknown(self) -> bool:
        """Whether there is a request that not all ranks know of."""
        return (self.weights or self.trained or self.rejected) and not self.known

    @property
    def marked(self) -> list[RequestPlace]:
        """The places that this rank marks: every rank marks the last one."""
        asked = {
            RequestPlace.LATE: self.late,
            RequestPlace.SKIP: self.rejected,
            RequestPlace.WEIGHTS: self.weights,
            RequestPlace.TRAINED: self.trained,
            RequestPlace.KNOWN: self.known,
            RequestPlace.EVERYBODY: True,
        }
        return [place for place, is_marked in asked.items() if is_marked]


# What happened to gradients where this rank learns of it one window late; empty where it learns in time.
STEPPED = (
    " An optimizer that gradsync does not see may have used them since then, and parameters may differ over ranks by "
    "now: go on from the last checkpoint."
)
NOT_STEPPED = " No optimizer step was taken on them: the one since then has changed nothing."


@torch.no_grad()
def set_control_flags(control: torch.Tensor, failed_rank: int | None, requests: Requests) -> None:
    """Record whether this rank's backward has failed, and what it requests."""
    control.zero_()
    marked = [*([] if failed_rank is None else [failed_rank]), *(control.numel() + place for place in requests.marked)]
    for place in marked:
        # Assigning a number would make an accelerator's host wait.
        control[place : place + 1].fill_(1)


def failed_ranks(control: Sequence[float]) -> list[int]:
    """The ranks whose backward failed, by these control flags."""
    return [rank for rank, vote in enumerate(control[: -Requests.PLACES]) if vote > 0]


def raise_if_failed(failed: Sequence[int], since: str = "") -> None:
    """Raise an error that names the ranks whose backward failed, if any. ``since``: what happened to the gradients."""
    if failed:
        names = ", ".join(f"rank {rank}" for rank in failed)
        raise PeerFailedError(
            f"the backward of {names} failed, so these gradients are not the mean over all ranks.{since} See "
            "the error there; call zero_grad() before the next backward"
        )


def raise_if_unknown(requests: Requests, since: str = "") -> None:
    """Raise if there are requests that not all ranks know of, because some do not read the control flags at once."""
    if not requests.unknown:
        return
    if requests.rejected:
        raise PeerFailedError(
            "a rank abstains from a window. On an accelerator the others do not learn of it in time, so gradients are "
            f"not the mean over all ranks.{since} Wrap the model with on_bad_step='skip', which has all "
            "ranks wait for the control flags, and call zero_grad() before the next backward"
        )
    what = "train a parameter that was frozen before" if requests.trained else "count the micro-batches of a window"
    raise PeerFailedError(
        f"some ranks {what} and others do not. On an accelerator these do not learn of it in time, so gradients are "
        f"not the mean over all ranks.{since} Do it on all ranks in the same window, and call zero_grad() before "
        "the next backward"
    )


@torch.no_grad()
def step_gate(control: torch.Tensor, flags: list[torch.Tensor]) -> torch.Tensor:
    """A tensor on the device of ``control`` that is 1.0 if no rank may step on its window, else 0.0.

    ``flags`` are numbers on the host that are nonzero once the communicator has failed.
    """
    numbers = control.float()
    asked = control.numel() + RequestPlace.SKIP
    # The votes, and after them whether some rank is late.
    bad = numbers[:asked].sum()
    unknown = numbers[RequestPlace.EVERYBODY] - numbers[RequestPlace.KNOWN]
    bad = torch.addcmul(bad, numbers[asked : RequestPlace.KNOWN].sum(), unknown)
    for flag in flags:
        bad = bad + flag.to(control.device, non_blocking=True)
    return torch.gt(bad, 0, out=torch.empty_like(bad))
