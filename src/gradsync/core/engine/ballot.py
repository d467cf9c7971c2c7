"""The control flags in the last bucket: one vote per rank, nonzero where its backward failed."""

from collections.abc import Sequence

import torch

from gradsync.base.errors import PeerFailedError
from gradsync.core.bucket.requests import Requests

__all__ = ["failed_ranks", "mark_ballot", "raise_for", "raise_for_unheard"]

# What happened to gradients where this rank hears one window late; empty where it hears in time.
STEPPED = (
    " An optimizer that gradsync does not see may have used them since then, and parameters may differ over ranks by "
    "now: go on from the last checkpoint."
)
NOT_STEPPED = " No optimizer step was taken on them: the one since then has changed nothing."


@torch.no_grad()
def mark_ballot(ballot: torch.Tensor, failed_rank: int | None, requests: Requests) -> None:
    """Record whether this rank's backward has failed, and what it requests."""
    ballot.zero_()
    marked = [*([] if failed_rank is None else [failed_rank]), *(ballot.numel() + place for place in requests.marked)]
    for place in marked:
        # Assigning a number would make an accelerator's host wait.
        ballot[place : place + 1].fill_(1)


def failed_ranks(ballot: Sequence[float]) -> list[int]:
    """The ranks whose backward failed."""
    return [rank for rank, vote in enumerate(ballot[: -Requests.PLACES]) if vote > 0]


def raise_for(failed: Sequence[int], since: str = "") -> None:
    """Raise an error that names the ranks whose backward failed, if any. ``since``: what happened to the gradients."""
    if failed:
        names = ", ".join(f"rank {rank}" for rank in failed)
        raise PeerFailedError(
            f"the backward of {names} failed, so these gradients are not the mean over all ranks.{since} See "
            "the error there; call zero_grad() before the next backward"
        )


def raise_for_unheard(requests: Requests, since: str = "") -> None:
    """Where not all ranks read requests at once: raise if there are some that other ranks have not heard of."""
    if not requests.unheard:
        return
    if requests.vetoed:
        raise PeerFailedError(
            "a rank abstains from a window. On an accelerator the others do not hear of it in time, so gradients are "
            f"not the mean over all ranks.{since} Wrap the model with on_veto='skip-window', which has all "
            "ranks wait for the ballot, and call zero_grad() before the next backward"
        )
    what = "train a parameter that was frozen before" if requests.trained else "count the micro-batches of a window"
    raise PeerFailedError(
        f"some ranks {what} and others do not. On an accelerator these do not hear of it in time, so gradients are not "
        f"the mean over all ranks.{since} Do it on all ranks in the same window, and call zero_grad() before "
        "the next backward"
    )
