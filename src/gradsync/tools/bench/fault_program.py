"""The program of a rank in a fault trial: a small training in which a fault hits one rank, and notes of what it sees.

``python -m gradsync.tools.bench.fault_program SETTINGS``, with settings in JSON, under the launcher of a setup. The
loop is the same for all setups whose ranks are restarted together: only wrapping differs, and they continue from the
newest checkpoint. Nobody knows when a lost rank of an elastic setup comes back: its training ends some windows after
it has, or after many without it.
"""

import hashlib
import importlib
import json
import logging
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.base.environment import times_restarted
from gradsync.base.files import whole_file
from gradsync.core.engine import ReplicaCheck, SyncPolicy
from gradsync.tools.bench.peers import (
    DDP,
    TUNED,
    Accelerate,
    Gradsync,
    MakeOptimizer,
    Peer,
    WrappedModel,
    torchft_manager,
)

__all__ = ["CASES", "PROGRAM", "RANKS", "Fault", "TogetherAgain", "TrialSettings"]

PROGRAM = "gradsync.tools.bench.fault_program"
ELASTIC, TORCHFT = "gradsync elastic", "torchft"
RANKS, HOST = 3, "127.0.0.1"
# A variable that says which rank it is, where torchrun has started it alone.
REPLICA = "REPLICA_GROUP_ID"
# How long a rank is stopped that is let go on: longer than it takes gradsync to say so.
PAUSE_SECONDS = 7.0
# Steps before the fault: what a wrapper learns in its first steps is learned by then. And after it, if they go on.
EARLIEST, LATEST, AFTERWARDS = 8, 16, 14
# Windows after the fault, with or without the rank that it hit: longer than it takes to start it again.
MOST_AFTERWARDS = 600
# Within a step, about as long as one takes.
MOST_DELAY = 0.05
FINGERPRINTS_EVERY = 5
# Less than a group has for a collective, so that the barrier speaks first.
MONITORED = timedelta(seconds=8)
EVENTS, CHECKPOINT = "events.jsonl", "checkpoint.pt"
CHECKPOINT_EVERY = 5
# So that a step has a middle in which something can happen.
THINKING_SECONDS = 0.02
WIDTH, DEPTH, BATCH = 256, 6, 8
# All of the first ranks are known to the lighthouse by then.
FIRST_HEARTBEATS = 0.5

CUT_LINK, WRONG_NUMBERS = "cut link", ("NaN", "bit flip")
# Faults by name, in words.
CASES = {
    "kill -9": "one rank is killed",
    "os._exit": "one rank ends its process with os._exit(7)",
    "exception": "backward raises on one rank",
    "SIGSTOP": "one rank is stopped, for good",
    "pause": f"one rank is stopped, and goes on after {PAUSE_SECONDS:g} s",
    "NaN": "the gradients of one rank are NaN, in one step",
    "bit flip": "one bit of a parameter flips on one rank",
    CUT_LINK: "the link of one host is cut",
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
        """How many steps the run has in all."""
        return self.step + AFTERWARDS


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings of a trial: ``peer`` is who synchronizes, ``timeout`` the seconds that its group has for a
    collective."""

    peer: str
    folder: str
    timeout: float
    fault: Fault

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "TrialSettings":
        fields = json.loads(text)
        return cls(**{**fields, "fault": Fault(**fields["fault"])})


class Events(logging.Handler):
    """Lines of a file that all ranks of all lives append to, with the time of a clock that all of them share.

    Warnings of this process are among them.
    """

    def __init__(self, folder: Path, rank: int, life: int) -> None:
        super().__init__(logging.WARNING)
        self.rank, self.life = rank, life
        self._descriptor = os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._common = {"rank": rank, "life": life, "process": os.getpid()}
        logging.getLogger().addHandler(self)

    def note(self, what: str, **more: Any) -> None:
        line = json.dumps({"at": time.monotonic(), "what": what, **self._common, **more}) + "\n"
        os.write(self._descriptor, line.encode())

    def emit(self, record: logging.LogRecord) -> None:
        self.note("warned", text=record.getMessage())


class FaultError(Exception):
    """The error that a fault raises on purpose."""


class FaultInjector:
    """Injects the fault, once, on the rank that it is meant for, and notes the moment."""

    def __init__(self, fault: Fault, model: nn.Module, events: Events) -> None:
        self._fault, self._events = fault, events
        self._parameter = list(model.parameters())[2]
        self._is_due = events.life == 0 and events.rank == fault.victim

    def before(self, step: int) -> None:
        if not self._is_due or step != self._fault.step:
            return
        self._is_due = False
        if self._fault.case in ("exception", "NaN"):
            self._hook = self._parameter.register_hook(self._invalidate)
        elif self._fault.case == "bit flip":
            self._note()
            # The lowest bit of an exponent: a number that is half or twice as large.
            with torch.no_grad():
                self._parameter.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 23)
        else:
            threading.Thread(target=self._strike, name="fault", daemon=True).start()

    def _strike(self) -> None:
        time.sleep(self._fault.delay)
        self._note()
        if self._fault.case == "os._exit":
            os._exit(7)
        if self._fault.case != CUT_LINK:
            os.kill(os.getpid(), signal.SIGKILL if self._fault.case == "kill -9" else signal.SIGSTOP)

    def _invalidate(self, gradient: Tensor) -> Tensor:
        self._hook.remove()
        self._note()
        if self._fault.case == "exception":
            raise FaultError("raised on purpose, in backward")
        return gradient * float("nan")

    def _note(self) -> None:
        self._events.note("fault", step=self._fault.step)


# -- the training of a rank -------------------------------------------------------------------------------------------


def _fingerprints() -> ReplicaCheck:
    return ReplicaCheck(every=FINGERPRINTS_EVERY, on_mismatch="repair")


@dataclass(frozen=True, kw_only=True)
class _Checked(Peer):
    """torch's wrapper, no backward without all ranks, and no step with a gradient that is not finite."""

    name: str = TUNED

    def wrap(self, model: nn.Module, optimizer: MakeOptimizer, *, window: int = 1) -> WrappedModel:
        wrapped = DDP().wrap(model, optimizer, window=window)
        backward = wrapped.backward

        def checked(loss: Tensor) -> None:
            dist.monitored_barrier(timeout=MONITORED, wait_all_ranks=True)
            backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), math.inf, error_if_nonfinite=True)

        wrapped.backward = checked
        return wrapped


# With what gradsync has against wrong numbers switched on.
GUARDED = Gradsync(settings={"on_bad_step": "skip", "replica_check": _fingerprints()})
WRAPPERS: dict[str, Peer] = {peer.name: peer for peer in (GUARDED, DDP(), _Checked(), Accelerate())}


def main(text: str) -> None:
    settings = TrialSettings.read(text)
    torch.set_num_threads(1)
    train = {ELASTIC: _train_elastic, TORCHFT: _train_with_torchft}.get(settings.peer, _train)
    rank = int(os.environ["RANK"] if train is _train else os.environ.get(REPLICA, os.environ["RANK"]))
    events = Events(Path(settings.folder), rank, times_restarted())
    if train is _train:
        dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout))
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    try:
        step = train(settings, model, events, FaultInjector(settings.fault, model, events))
    except Exception as error:
        events.note("raised", text=f"{type(error).__name__}: {error}")
        raise
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    events.note("ended", step=step, digest=digest, finite=bool(parameters.isfinite().all()))
    if train is _train:
        dist.destroy_process_group()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _forward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(BATCH, WIDTH)).square().mean()
    time.sleep(THINKING_SECONDS)
    return loss


def _seed(events: Events) -> None:
    torch.manual_seed(1000 * events.life + events.rank)


def _train(settings: TrialSettings, model: nn.Module, events: Events, injector: FaultInjector) -> int:
    """The steps of ranks that are restarted together. The number of the last one."""
    wrapped = WRAPPERS[settings.peer].wrap(model, make_optimizer)
    parts = {"model": model, "optimizer": wrapped.optimizer}
    checkpoint, step = Path(settings.folder) / CHECKPOINT, 0
    with suppress(FileNotFoundError):
        state = torch.load(checkpoint, weights_only=True)
        _load(parts, state)
        step = int(state["step"])
    events.note("began", step=step)
    _seed(events)
    while step < settings.fault.steps:
        injector.before(step)
        wrapped.optimizer.zero_grad()
        wrapped.backward(_forward(wrapped.model))
        wrapped.optimizer.step()
        step += 1
        events.note("step", step=step, skipped=bool(getattr(wrapped.model, "step_was_skipped", False)))
        _keep(events, step, checkpoint, parts)
    return step


def _states(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


def _load(parts: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for name, part in parts.items():
        part.load_state_dict(state[name])


def _keep(events: Events, step: int, checkpoint: Path, parts: Mapping[str, Any]) -> None:
    if events.rank == 0 and step % CHECKPOINT_EVERY == 0:
        with whole_file(checkpoint) as file:
            torch.save({"step": step, **_states(parts)}, file)


# -- elastic ranks -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class TogetherAgain:
    """How many windows there were since the fault, and how many of them with all ranks. It is part of what newcomers
    take over, so that all end with the same window."""

    fault: Fault
    windows: int = 0
    together: int = 0

    @property
    def is_over(self) -> bool:
        return self.together >= AFTERWARDS or self.windows >= MOST_AFTERWARDS

    def count(self, step: int, ranks: int) -> None:
        """Count: ``step`` windows are done, the last one by ``ranks`` ranks."""
        if step > self.fault.step:
            self.windows += 1
            self.together += ranks == RANKS

    def state_dict(self) -> dict[str, int]:
        return {"windows": self.windows, "together": self.together}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.windows, self.together = int(state["windows"]), int(state["together"])


def _train_elastic(settings: TrialSettings, model: nn.Module, events: Events, injector: FaultInjector) -> int:
    # Here, because restarts are timed, and other ranks do without.
    from gradsync.accelerator import Accelerator
    from gradsync.accelerator.settings import DistributedDataParallelKwargs
    from gradsync.health.elastic import Elastic

    policy = SyncPolicy(on_bad_step="skip", replica_check=_fingerprints())
    accelerator = Accelerator(
        cpu=True,
        elastic=Elastic(timeout=settings.timeout),
        kwargs_handlers=[DistributedDataParallelKwargs(policy=policy)],
    )
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    together = TogetherAgain(fault=settings.fault)
    accelerator.register_for_checkpointing(together)
    elastic: Any = accelerator.elastic
    events.note("began", step=0)
    _seed(events)
    for attempt in elastic.attempts(sys.maxsize):
        is_done = False
        with attempt as step:
            injector.before(step)
            accelerator.backward(_forward(wrapped))
            optimizer.step()
            together.count(step + 1, accelerator.num_processes)
            skipped = bool(wrapped.step_was_skipped)
            optimizer.zero_grad()
            is_done = True
        events.note("step", step=elastic.step, skipped=skipped if is_done else True)
        if together.is_over:
            break
    return int(elastic.step)


def _train_with_torchft(settings: TrialSettings, model: nn.Module, events: Events, injector: FaultInjector) -> int:
    torchft: Any = importlib.import_module("torchft")
    optimizer, together = make_optimizer(model.parameters()), TogetherAgain(fault=settings.fault)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "standing": together}
    manager = torchft_manager(
        HOST,
        timeout=timedelta(seconds=settings.timeout),
        load_state_dict=partial(_load, parts),
        state_dict=partial(_states, parts),
        min_replica_size=1,
        replica_id=f"replica_{events.rank}",
    )
    wrapped, stepping = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, optimizer)
    # Where all ranks fail with one, nobody is left to heal from.
    parts["manager"], checkpoint = manager, Path(settings.folder) / CHECKPOINT
    with suppress(FileNotFoundError):
        _load(parts, torch.load(checkpoint, weights_only=True))
    _begin_together(Path(settings.folder), events)
    _seed(events)
    while not together.is_over:
        before = manager.current_step()
        injector.before(before)
        stepping.zero_grad()
        _forward(wrapped).backward()
        stepping.step()
        step = manager.current_step()
        if step > before:
            together.count(step, manager.num_participants())
        events.note("step", step=step, skipped=step == before)
        _keep(events, step, checkpoint, parts)
    manager.shutdown(wait=False)
    return int(manager.current_step())


def _begin_together(folder: Path, events: Events) -> None:
    """Begin when all ranks are there: one rank is a quorum, and would begin before the others have started."""
    (folder / f"here-{events.rank}").touch()
    while len(list(folder.glob("here-*"))) < RANKS:
        time.sleep(0.05)
    events.note("began", step=0)
    if events.life == 0:
        time.sleep(FIRST_HEARTBEATS)


if __name__ == "__main__":
    main(sys.argv[1])
