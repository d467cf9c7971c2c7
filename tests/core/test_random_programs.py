"""Programs drawn at random, in which ranks do what they can do wrong: nobody waits in vain, and no mean is wrong.

In every window each rank has micro-batches of its own, or none, and perhaps a fault somewhere in them; the handler is
that of docs/failures.md. What must come of a window follows from what the ranks have said in it.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync import DistributedDataParallel, MisuseError, PeerFailedError
from gradsync.communicator import choose_communicator
from tests.core.common import TINY, Line, gradients, still
from tests.fuse import Explosion
from tests.ranks import ThreadRanks

pytestmark = pytest.mark.timeout(120)

RANKS = 3
POLICIES = (None, "raise", "skip", "drop-rank")
# Where a loop over micro-batches has its synchronization: in one backward, in a block, in the last of an iterator.
STYLES = ("plain", "blocks", "iterator")
FAULTS = ("", "", "", "abstain", "batch", "forward", "backward")
# What a rank tries after it has abstained, in vain.
AFTERWARDS = ("", "abstain", "backward")


@dataclass(frozen=True)
class Share:
    """What a rank does in a window: the x of its micro-batches, None where it leaves the forward out, and a fault; what
    it tries after it has abstained, and whether it zeroes where there is nothing to zero."""

    batches: tuple[float | None, ...]
    fault: str
    at: int
    afterwards: str
    zeroes: bool

    @property
    def place(self) -> int:
        """The micro-batch that has the fault."""
        return min(self.at, len(self.batches) - 1)

    @property
    def is_faulty(self) -> bool:
        return bool(self.fault) and bool(self.batches)

    def word(self, style: str) -> str:
        """What the other ranks hear: that it went well, that this rank abstains, or that it failed."""
        if not self.is_faulty:
            return "well"
        last = self.place == len(self.batches) - 1
        in_last_block = last and style == "blocks" and self.fault != "abstain"
        reaches_backward = self.fault == "backward" and self.batches[self.place] is not None
        if self.fault in ("forward", "backward") and self.batches[self.place] is None:
            return "well"
        return "failed" if in_last_block or (last and reaches_backward) else "abstains"


@dataclass(frozen=True)
class Window:
    style: str
    shares: tuple[Share, ...]
    set_to_none: bool


@st.composite
def windows(draw: st.DrawFn) -> Window:
    style = draw(st.sampled_from(STYLES))
    x = st.integers(1, 9).map(float)
    # Outside of accumulate() every rank has a backward that synchronizes, and gradients add up.
    batches = st.lists(x if style == "plain" else st.none() | x, min_size=style == "plain", max_size=3).map(tuple)
    share = st.builds(
        Share,
        batches=batches,
        fault=st.sampled_from(FAULTS),
        at=st.integers(0, 2),
        afterwards=st.sampled_from(AFTERWARDS),
        zeroes=st.booleans(),
    )
    return Window(style, draw(st.tuples(*[share] * RANKS)), draw(st.booleans()))


# -- a rank -----------------------------------------------------------------------------------------------------------


class Rank:
    """Runs its shares, as a careful loop would."""

    def __init__(self, on_bad_step: Any) -> None:
        self.rank = choose_communicator().rank
        self.model = DistributedDataParallel(Line(counts=True), bucket_cap_mb=TINY, on_bad_step=on_bad_step)
        self.optimizer = still(self.model)
        self.loss: torch.Tensor | None = None

    def run(self, window: Window) -> Any:
        """What the window has left: gradients, or that it was skipped."""
        share = window.shares[self.rank]
        self.loss = None
        if share.zeroes:
            self.model.zero_grad(set_to_none=not window.set_to_none)
        try:
            {"plain": self._plain, "blocks": self._blocks, "iterator": self._iterate}[window.style](share)
        except (ValueError, torch.OutOfMemoryError, Explosion):
            self.model.zero_grad()
            try:
                self.model.abstain("the handler's")
                self._try_afterwards(share)
            except PeerFailedError:
                self._try_afterwards(share)
                self.model.zero_grad()
        except PeerFailedError:
            self.model.zero_grad()
        came = gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=window.set_to_none)
        return "skipped" if self.model.step_was_skipped else came

    def _plain(self, share: Share) -> None:
        for number in range(len(share.batches)):
            last = number == len(share.batches) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                self._work(share, number)

    def _blocks(self, share: Share) -> None:
        numbers = range(len(share.batches)) or [-1]
        for number in numbers:
            with self.model.accumulate(last=number == len(share.batches) - 1):
                if number >= 0:
                    self._work(share, number)

    def _iterate(self, share: Share) -> None:
        for number in self.model.accumulate(range(len(share.batches))):
            self._work(share, number)

    def _work(self, share: Share, number: int) -> None:
        fault = share.fault if share.is_faulty and number == share.place else ""
        x = share.batches[number]
        if fault == "batch":
            raise ValueError("a bad batch")
        if fault == "abstain":
            raises = self.model.synchronizer.enabled and not self.model.synchronizer.in_block
            try:
                self.loss = None if x is None else self.model(x)
                self.model.abstain("a bad batch")
            finally:
                if raises:
                    self._try_afterwards(share)
            if share.zeroes and not raises:
                self.model.zero_grad()
            return
        if x is not None:
            self.model(x, fails=fault == "forward", lit=fault == "backward").backward()

    def _try_afterwards(self, share: Share) -> None:
        if share.afterwards == "abstain" or (share.afterwards == "backward" and self.loss is not None):
            with pytest.raises(MisuseError):
                self.model.abstain("again") if share.afterwards == "abstain" else self.loss.backward()


def run_program(on_bad_step: Any, program: Sequence[Window]) -> list[Any]:
    rank = Rank(on_bad_step)
    return [rank.run(window) for window in program]


# -- what must come of it ---------------------------------------------------------------------------------------------


def expected(window: Window, on_bad_step: Any) -> Any:
    """Gradients, "skipped", or "nothing" where all have raised and zeroed."""
    words = [share.word(window.style) for share in window.shares]
    if "failed" in words:
        return "skipped" if on_bad_step in ("skip", "drop-rank") else "nothing"
    taking_part = [share for share, word in zip(window.shares, words, strict=True) if word == "well"]
    if "abstains" in words:
        if on_bad_step == "raise":
            return "nothing"
        if on_bad_step != "drop-rank" or not taking_part:
            return "skipped"
    batches = [x for share in taking_part for x in share.batches if x is not None]
    if window.style == "plain":
        # Gradients of a rank add up, and their sums are averaged.
        return [sum(x + number for x in batches) / len(taking_part) for number in range(3)]
    return [sum(x + number for x in batches) / len(batches) for number in range(3)] if batches else "nothing"


def check(came: Any, wanted: Any) -> None:
    if wanted == "nothing":
        assert came != "skipped"
        assert all(not each for each in came), came
    else:
        assert came == (wanted if wanted == "skipped" else pytest.approx(wanted, rel=1e-12))


@given(on_bad_step=st.sampled_from(POLICIES), program=st.lists(windows(), min_size=1, max_size=4))
def test_whatever_ranks_do_every_window_is_right(on_bad_step: Any, program: list[Window]) -> None:
    for seen in ThreadRanks(RANKS).run(run_program, on_bad_step, program):
        for window, came in zip(program, seen, strict=True):
            check(came, expected(window, on_bad_step))
