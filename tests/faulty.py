"""A rank of a training to which something happens at a moment drawn at random: the other end of tests/faults.py.

What came of it is left in a file: the error, when it came, what was said before, and the parameters at the end. Times
are those of the machine's monotonic clock, which all its processes share.

It trains over Gloo, or over NCCL on a GPU that the ranks share. There the host runs ahead of the device, and meets it
where ``waits`` says: in ``torch.cuda.synchronize()``, in ``.item()``, or only in gradsync.
"""

import functools
import hashlib
import json
import logging
import os
import random
import signal
import sys
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
from gradsync.health.watch import detector
from gradsync.tools.lab.system import enter_host

__all__ = ["SURVIVED", "Fault", "Host", "survive", "train"]

# A loop that nothing happens to ends after so many steps.
STEPS = 120
PLACES = ("data", "forward", "loss", "backward", "optimizer")
WAITS = ("synchronize", "item", "")
# What a training survives, by the name under which :func:`survive` tells of it: an error in backward that is caught,
# and gradients that are not finite.
SURVIVED = ("caught, fused AdamW", "caught, SGD", "NaN, raise", "NaN, skip", "NaN, drop-rank")
WINDOWS = 8


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
    device: str = "cpu"
    waits: str = ""

    def __str__(self) -> str:
        where = f" in {self.place}" if self.place else f" {1e3 * self.after:.1f} ms into its step {self.step}"
        what = f"{self.kind} of rank {self.victim} of {self.ranks} on {self.hosts} host(s){where}"
        return what if self.device == "cpu" else f"{what}, on {self.device}, waiting in {self.waits or 'gradsync'}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a rank runs; the machine itself if it has no namespace."""

    namespace: str = ""
    name: str = ""
    addresses: dict[str, str]


class _Warnings(logging.Handler):
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
        layers, self.model, self.optimizer = _made(fault, fused=fault.device != "cpu" and fault.waits != "item")
        layers[1].weight.register_hook(lambda _: self._trouble("backward"))
        layers[1].register_forward_pre_hook(lambda *_: self._trouble("forward"))
        self.optimizer.register_step_pre_hook(lambda *_: self._trouble("optimizer"))
        torch.manual_seed(self.rank)
        self._number = 0

    def step(self) -> None:
        self._number += 1
        if self._is_struck and not self.fault.place:
            threading.Timer(self.fault.after, self._strike).start()
        self._trouble("data")
        batch = torch.randn(4, 64).to(self.fault.device)
        loss = self.model(batch).square().mean()
        self._trouble("loss")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.fault.waits == "synchronize":
            torch.cuda.synchronize()
        elif self.fault.waits == "item":
            loss.item()
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


def _made(
    fault: Fault, *, fused: bool, on_bad_step: Any = None
) -> tuple[list[nn.Linear], gradsync.DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, device=fault.device) for _ in range(4)]
    model = gradsync.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02, on_bad_step=on_bad_step)
    kind = functools.partial(torch.optim.AdamW, fused=True) if fused else torch.optim.SGD
    return layers, model, kind(model.parameters(), lr=0.01)


def _digest(model: nn.Module) -> str:
    parameters = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(parameters).hexdigest()


def _begin(fault: Fault) -> _Warnings:
    torch.set_num_threads(1)
    detector.SLOW_SECONDS = fault.warned
    warned = _Warnings()
    logging.getLogger("gradsync").addHandler(warned)
    if fault.device != "cpu":
        torch.cuda.set_device(0)
    backend = "gloo" if fault.device == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=fault.timeout))
    return warned


def train(fault: Fault, folder: Path, host: Host) -> None:
    """One rank, by torchrun's variables. It ends as a script would: by its end, or by the error."""
    if host.namespace:
        enter_host(host.namespace, host.name, host.addresses)
    warned = _begin(fault)
    loop, outcome = _Loop(fault, folder), dict[str, Any]()
    try:
        for _ in range(STEPS if fault.kind in ("none", "pause", "link down and up") else 1_000_000):
            loop.step()
        outcome["digest"] = _digest(loop.model)
        dist.barrier()
    except Exception as error:
        outcome.update(error=type(error).__name__, message=str(error), at=time.monotonic())
        raise
    finally:
        outcome["warnings"] = warned.lines
        (folder / f"rank-{loop.rank}").write_text(json.dumps(outcome))


# -- what is survived -------------------------------------------------------------------------------------------------


def survive(fault: Fault, folder: Path, host: Host, seeds: int) -> None:
    """One rank through all of :data:`SURVIVED`, so many times each: what each came to is left in a file."""
    warned = _begin(fault)
    outcome = {}
    for case in SURVIVED:
        for seed in range(seeds):
            outcome[f"{case} {seed}"] = _survive(case, random.Random(f"{case} {seed}"), fault, warned)
    (folder / f"rank-{dist.get_rank()}").write_text(json.dumps(outcome))
    dist.barrier()


class _PurposeError(Exception):
    """The one that the victim raises in backward."""


def _survive(case: str, chance: random.Random, fault: Fault, warned: _Warnings) -> dict[str, Any]:
    """When the fault struck whom, what this rank raised and heard by then and since, and the parameters at the end."""
    kind, _, how = case.partition(", ")
    on_bad_step = how if kind == "NaN" else None
    layers, model, optimizer = _made(fault, fused=how == "fused AdamW", on_bad_step=on_bad_step)
    victim, window = chance.randrange(fault.ranks), chance.randrange(2, WINDOWS - 2)
    is_struck, lines, at = False, len(warned.lines), 0.0

    def explode(_: torch.Tensor) -> None:
        if is_struck and kind == "caught":
            raise _PurposeError

    layers[1].weight.register_hook(explode)
    torch.manual_seed(dist.get_rank())
    raised, digests = [], []
    for number in range(WINDOWS):
        is_struck = number == window and dist.get_rank() == victim
        batch = torch.randn(4, 64).to(fault.device)
        try:
            loss = model(batch).square().mean()
            if number == window:
                at = time.monotonic()
            if is_struck and kind == "NaN":
                loss = loss * float("nan")
            loss.backward()
            optimizer.step()
        except (gradsync.PeerFailedError, _PurposeError) as error:
            raised.append((number, type(error).__name__, str(error), time.monotonic()))
        optimizer.zero_grad()
        digests.append(_digest(model))
    return {
        "victim": victim,
        "window": window,
        "at": at,
        "raised": raised,
        "warnings": warned.lines[lines:],
        "digests": digests,
    }


if __name__ == "__main__":
    # A script as users write them: whatever has happened, it destroys its group.
    try:
        train(Fault(**json.loads(sys.argv[1])), Path(sys.argv[2]), Host(addresses={}))
    finally:
        dist.destroy_process_group()
