"""The setups compared, and the program of their ranks: a small training in which a fault hits one rank.

*Stock* is a script that follows the tutorials. *Tuned* is what torch offers against the same faults: a new store for
every restart of the ranks, without which ranks that torchrun restarts read the addresses of the dead ones from it; a
monitored barrier before every backward, which names the ranks that do not arrive; and a check of the gradients' norm
before every step, which raises if it is not finite. (``TORCH_DISTRIBUTED_DEBUG=DETAIL`` would name ranks, too, but
torch 2.13's wrapper crashes under it, here at least.) *Elastic* are setups whose ranks continue without a lost one:
torchft's own wrapper, and ``Accelerator(elastic=…)``.

``python -m gradsync.tools.bench.faults.program SETTINGS``, with settings in JSON, under the launcher of the setup. The
loop is the same for all whose ranks are restarted together: only wrapping differs, and they continue from the newest
checkpoint. Nobody knows when a lost rank of an elastic setup comes back: its training ends some windows after it has,
or after many without it.
"""

import hashlib
import importlib
import importlib.util
import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradsync.base.files import whole_file
from gradsync.core.engine import ReplicaCheck, SyncPolicy
from gradsync.tools.bench.faults.judging import AFTERWARDS, CUT_LINK, RANKS, ElasticJudge, Fault, Judge, inject
from gradsync.tools.bench.peers import DDP, OURS, TUNED, Accelerate, Gradsync, MakeOptimizer, Peer, WrappedModel

__all__ = [
    "AGAINST_FAULTS",
    "CHECKPOINT_EVERY",
    "ELASTIC",
    "EVENTS",
    "FINGERPRINTS_EVERY",
    "MONITORED",
    "PROGRAM",
    "REPLICA",
    "RESTARTS",
    "SETUPS",
    "TORCHFT",
    "TogetherAgain",
    "TrialSettings",
]

ELASTIC, TORCHFT = "gradsync elastic", "torchft"
PROGRAM = "gradsync.tools.bench.faults.program"
RESTARTS = 3
# A variable that says which rank it is, where torchrun has started it alone.
REPLICA = "REPLICA_GROUP_ID"
FINGERPRINTS_EVERY = 5
# Less than a group has for a collective, so that the barrier speaks first.
MONITORED = timedelta(seconds=8)
EVENTS, CHECKPOINT = "events.jsonl", "checkpoint.pt"
CHECKPOINT_EVERY = 5
# So that a step has a middle in which something can happen.
THINKING_SECONDS = 0.02
WIDTH, DEPTH, BATCH = 256, 6, 8
# Windows after the fault, with or without the rank that it hit: longer than it takes to start it again.
MOST_AFTERWARDS = 600
HOST = "127.0.0.1"
# All of the first ranks are known to the lighthouse by then.
FIRST_HEARTBEATS = 0.5


# -- the setups -------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One of the setups compared. ``launcher`` are the arguments of Python that start its ranks, before the settings;
    ``variables`` what these find in the environment; ``judge`` says what going on is. ``needs`` is a module."""

    name: str
    launcher: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    judge: type[Judge] = Judge
    needs: str = ""

    def absent(self, case: str) -> str | None:
        """Why it cannot take part, or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return "not installed"
        return "not measured between hosts" if case == CUT_LINK and self.judge is ElasticJudge else None


AGAINST_FAULTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _calling(module: str, call: str) -> tuple[str, str]:
    """Python's arguments for the call of a function."""
    return "-c", f"import sys; from gradsync.tools.{module} import {call.partition('(')[0]}; sys.exit({call})"


_TORCHRUN = (
    *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
    *(f"--max-restarts={RESTARTS}", "-m", PROGRAM),
)
# The launchers of `gradsync train`, and of `gradsync train --elastic`.
_OURS = _calling("cli.launching", f"run_ranks_of({PROGRAM!r}, sys.argv[1:], nproc={RANKS}, max_restarts={RESTARTS})")
_OURS_ELASTIC = _calling(
    "cli.launching",
    f"run_elastic_ranks_of({PROGRAM!r}, sys.argv[1:], nproc={RANKS}, ranks={RANKS}, min_ranks=1)",
)
_REPLICAS = _calling("bench.faults.trials", "run_replicas(sys.argv[1])")
SETUPS = {
    each.name: each
    for each in (
        Setup(name=OURS, launcher=_OURS),
        Setup(name=DDP().name, launcher=_TORCHRUN),
        Setup(name=TUNED, launcher=_TORCHRUN, variables=AGAINST_FAULTS),
        Setup(name=Accelerate().name, launcher=_TORCHRUN, needs=Accelerate().needs),
        # gradsync's lighthouse is that of torchft.
        Setup(name=ELASTIC, launcher=_OURS_ELASTIC, judge=ElasticJudge, needs=TORCHFT),
        Setup(name=TORCHFT, launcher=_REPLICAS, judge=ElasticJudge, needs=TORCHFT),
    )
}


# -- a rank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings of a trial: ``peer`` is who synchronizes, ``timeout`` the seconds that its group has for a
    collective."""

    peer: str
    folder: str
    timeout: float
    fault: Fault

    def as_json(self) -> str:
        return json.dumps({**vars(self), "fault": vars(self.fault)})

    @classmethod
    def read(cls, text: str) -> "TrialSettings":
        fields = json.loads(text)
        return cls(**{**fields, "fault": Fault(**fields["fault"])})


class Events(logging.Handler):
    """Lines of a file that all ranks of all lives append to, with the time of a clock that all of them share."""

    def __init__(self, folder: Path, rank: int, life: int) -> None:
        super().__init__(logging.WARNING)
        self.rank, self.life = rank, life
        self._descriptor = os.open(folder / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._common = {"rank": rank, "life": life, "process": os.getpid()}

    @classmethod
    def listening(cls, folder: Path, rank: int, life: int) -> "Events":
        """Notes whatever is warned of in this process, too."""
        events = cls(folder, rank, life)
        logging.getLogger().addHandler(events)
        return events

    def note(self, what: str, **more: Any) -> None:
        line = json.dumps({"at": time.monotonic(), "what": what, **self._common, **more}) + "\n"
        os.write(self._descriptor, line.encode())

    def emit(self, record: logging.LogRecord) -> None:
        self.note("warned", text=record.getMessage())


class FaultInjector:
    """Injects the fault, once, on the rank that it is meant for."""

    def __init__(self, fault: Fault, model: nn.Module, events: Events) -> None:
        self._fault, self._model, self._events = fault, model, events
        self._is_due = events.life == 0 and events.rank == fault.victim

    def before(self, step: int) -> None:
        if self._is_due and step == self._fault.step:
            self._is_due = False
            inject(self._fault, self._model, lambda: self._events.note("fault", step=step))


def main(text: str) -> None:
    settings = TrialSettings.read(text)
    torch.set_num_threads(1)
    train = {ELASTIC: _train_elastic, TORCHFT: _train_with_torchft}.get(settings.peer, _train)
    rank = int(os.environ["RANK"] if train is _train else os.environ.get(REPLICA, os.environ["RANK"]))
    events = Events.listening(Path(settings.folder), rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
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

    limit, store = timedelta(seconds=settings.timeout), TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=partial(_load, parts),
        state_dict=partial(_states, parts),
        min_replica_size=1,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        replica_id=f"replica_{events.rank}",
        hostname=HOST,
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
