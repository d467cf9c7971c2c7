"""What ranks say of their backwards in the last bucket: a vote each, which is not zero where it failed."""

from collections.abc import Sequence

import torch

from gradsync.bucket.requests import Requests
from gradsync.errors import PeerFailedError

__all__ = ["DeferredBallot", "raise_for"]


class DeferredBallot:
    """The ballot of an accelerator's bucket, on its way to the host while backward goes on."""

    def __init__(self, ballot: torch.Tensor) -> None:
        self._copy = torch.empty(ballot.shape, dtype=ballot.dtype, pin_memory=True)
        self._copy.copy_(ballot, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> list[float]:
        self._event.synchronize()
        ballot: list[float] = self._copy.tolist()
        return ballot


def raise_for(ballot: Sequence[float], *, late: bool = False) -> None:
    """Name the ranks whose backward failed, if there are any. ``late``: an optimizer may have stepped since."""
    failed = [rank for rank, vote in enumerate(ballot[: -Requests.PLACES]) if vote > 0]
    if failed:
        names = ", ".join(f"rank {rank}" for rank in failed)
        stepped = (
            " An optimizer step since then has used them: go on from the last checkpoint, or accept one bad step."
            if late
            else ""
        )
        raise PeerFailedError(
            f"the backward of {names} failed, so these gradients are not the mean over all ranks.{stepped} See the "
            "error there; call zero_grad() before the next backward"
        )
