"""A rank of a training to which something happens at a moment drawn at random: the other end of tests/faults.py.

What came of it is left in a file: the error, when it came, what was said before, and the parameters at the end. Times
are those of the machine's monotonic clock, which all its processes share.
"""

import hashlib
import json
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.lab.system import enter_host
from gradsync.watch import judge

__all__ = ["Fault", "Host", "train"]

# A loop that nothing happens to ends after so many steps.
STEPS = 120
PLACES = ("data", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``victim`` does, or has done to it, what ``kind`` says, so many seconds ``after`` its step ``step`` began."""

    kind: str
    ranks: int
    hosts: int
    victim: int
    step: int
    after: float
    # Where in the loop it raises.
    place: str = ""
    # Of the group, and when a rank is warned about.
    timeout: float
    warned: float

    def __str__(self) -> str:
        where = f" in {self.place}" if self.place else f" {1e3 * self.after:.1f} ms into its step {self.step}"
        return f"{self.kind} of rank {self.victim} of {self.ranks} on {self.hosts} host(s){where}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a rank runs; the machine itself if it has no namespace."""

    namespace: str = ""
    name: str = ""
    addresses: dict[str, str]


class _Heard(logging.Handler):
    """What the logger says on this rank, and when."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))


class TroubleError(Exception):
    """The one that the victim raises."""


class _Loop:
    """A training whose gradients travel in several buckets."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self._folder = fault, folder
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64) for _ in range(4)]
        self.model = gradsync.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        layers[1].weight.register_hook(lambda _: self._trouble("backward"))
        torch.manual_seed(self.rank)
        self._number = 0

    def step(self) -> None:
        self._number += 1
        if self._is_struck and not self.fault.place:
            threading.Timer(self.fault.after, self._strike).start()
        self._trouble("data")
        batch = torch.randn(4, 64)
        self._trouble("forward")
        output = self.model(batch)
        self._trouble("loss")
        output.square().mean().backward()
        self._trouble("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        # As long as a step of a larger model takes: moments fall into all parts of it.
        time.sleep(0.002)

    @property
    def _is_struck(self) -> bool:
        return self.rank == self.fault.victim and self._number == self.fault.step

    def _trouble(self, place: str) -> None:
        if self._is_struck and self.fault.place == place:
            self._note()
            raise TroubleError("no luck")

    def _strike(self) -> None:
        self._note()
        kind = self.fault.kind
        if kind == "os._exit":
            os._exit(3)
        elif kind == "kill -9":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ("SIGSTOP", "pause"):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _note(self) -> None:
        """In one go: whoever finds the file finds all of it."""
        whole = self._folder / "struck.part"
        whole.write_text(str(time.monotonic()))
        whole.rename(self._folder / "struck")

    def digest(self) -> str:
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())
        return hashlib.sha256(parameters).hexdigest()


def train(fault: Fault, folder: Path, host: Host) -> None:
    """One rank, by torchrun's variables. It ends as a script would: by its end, or by the error."""
    if host.namespace:
        enter_host(host.namespace, host.name, host.addresses)
    torch.set_num_threads(1)
    judge.SLOW_SECONDS = fault.warned
    heard = _Heard()
    logging.getLogger("gradsync").addHandler(heard)
    dist.init_process_group("gloo", timeout=timedelta(seconds=fault.timeout))
    loop, outcome = _Loop(fault, folder), dict[str, Any]()
    try:
        for _ in range(STEPS if fault.kind in ("none", "pause", "link down and up") else 1_000_000):
            loop.step()
        outcome["digest"] = loop.digest()
        dist.barrier()
    except Exception as error:
        outcome.update(error=type(error).__name__, said=str(error), at=time.monotonic())
        raise
    finally:
        outcome["heard"] = heard.lines
        (folder / f"rank-{loop.rank}").write_text(json.dumps(outcome))
