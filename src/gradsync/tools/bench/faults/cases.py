"""The faults that a rank may suffer, and the moment of each, drawn from a seed."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "CUT_LINK", "PAUSE_SECONDS", "Case", "Fault", "hurt"]

# How long a rank is stopped that is let go on: longer than it takes gradsync to say so.
PAUSE_SECONDS = 7.0
# Steps before the fault: what a wrapper learns in its first steps is learned by then. And after it, if they go on.
EARLIEST, LATEST, AFTERWARDS = 8, 16, 14
# Within a step, about as long as one takes.
MOST_DELAY = 0.05
CUT_LINK = "cut link"


@dataclass(frozen=True, kw_only=True)
class Case:
    """``name`` of a fault. ``ends``: the ranks cannot go on without a restart. ``is_inside``: it happens in a step, at
    no other moment."""

    name: str
    words: str
    ends: bool = True
    is_inside: bool = False


CASES = {
    case.name: case
    for case in (
        Case(name="kill -9", words="one rank is killed"),
        Case(name="os._exit", words="one rank ends its process with os._exit(7)"),
        Case(name="exception", words="backward raises on one rank", is_inside=True),
        Case(name="SIGSTOP", words="one rank is stopped, for good"),
        Case(name="pause", words=f"one rank is stopped, and goes on after {PAUSE_SECONDS:g} s", ends=False),
        Case(name="NaN", words="the gradients of one rank are NaN, in one step", ends=False, is_inside=True),
        Case(name="bit flip", words="one bit of a parameter flips on one rank", ends=False, is_inside=True),
        Case(name=CUT_LINK, words="the link of one host is cut"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which fault hits which rank, in which step and how many seconds into it."""

    case: str
    victim: int
    step: int
    delay: float

    @classmethod
    def draw(cls, case: str, seed: int, ranks: int) -> "Fault":
        chance = random.Random(f"{case} {seed}")
        return cls(
            case=case,
            victim=chance.randrange(ranks),
            step=chance.randint(EARLIEST, LATEST),
            delay=round(chance.uniform(0.0, MOST_DELAY), 4),
        )

    @property
    def steps(self) -> int:
        """How many the run has in all."""
        return self.step + AFTERWARDS

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


class FaultError(Exception):
    """Raised on purpose."""


def hurt(fault: Fault, model: nn.Module, told: Callable[[], None]) -> None:
    """Inject the fault on this rank, in the step that begins now. ``told`` is called right before."""
    if CASES[fault.case].is_inside:
        _inside(fault, model, told)
        return
    thread = threading.Thread(target=_later, args=(fault, told), name="fault", daemon=True)
    thread.start()


def _later(fault: Fault, told: Callable[[], None]) -> None:
    time.sleep(fault.delay)
    told()
    if fault.case == "os._exit":
        os._exit(7)
    if fault.case != CUT_LINK:
        os.kill(os.getpid(), signal.SIGKILL if fault.case == "kill -9" else signal.SIGSTOP)


def _inside(fault: Fault, model: nn.Module, told: Callable[[], None]) -> None:
    parameter = list(model.parameters())[2]
    if fault.case == "bit flip":
        told()
        # The lowest bit of an exponent: a number that is half or twice as large.
        with torch.no_grad():
            parameter.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 23)
        return

    def invalidate(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        told()
        if fault.case == "exception":
            raise FaultError("raised on purpose, in backward")
        return gradient * float("nan")

    handle = parameter.register_hook(invalidate)
