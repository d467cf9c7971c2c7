"""The program of an elastic rank: the same small training, with torchft's own wrapper or with gradsync's elastic ranks.

``python -m gradsync.tools.bench.faults.elastic_program SETTINGS``, under the launcher of either. Nobody knows when the
rank with the fault comes back. The training ends some windows after it has, or after many without it.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gradsync.accelerator import Accelerator
from gradsync.accelerator.settings import DistributedDataParallelKwargs
from gradsync.base.files import whole_file
from gradsync.core.engine import Fingerprints, SyncPolicy
from gradsync.health.elastic import Elastic
from gradsync.tools.bench.faults.cases import AFTERWARDS, Fault, hurt
from gradsync.tools.bench.faults.contenders import FINGERPRINTS_EVERY, REPLICA, TORCHFT
from gradsync.tools.bench.faults.judging import RANKS
from gradsync.tools.bench.faults.program import (
    BATCH,
    CHECKPOINT,
    CHECKPOINT_EVERY,
    THINKING_SECONDS,
    WIDTH,
    Events,
    Settings,
    make_model,
    make_optimizer,
    note_end,
)

__all__ = ["Standing", "main"]

# Windows after the fault, with or without the rank that it hit: longer than it takes to start it again.
MOST_AFTERWARDS = 600
HOST = "127.0.0.1"
# All of the first ranks are known to the lighthouse by then.
FIRST_HEARTBEATS = 0.5


@dataclass(kw_only=True)
class Standing:
    """How many windows there were since the fault, and how many of them with all ranks. It is part of what newcomers
    take over, so that all end with the same window."""

    fault: Fault
    windows: int = 0
    together: int = 0

    @property
    def is_over(self) -> bool:
        return self.together >= AFTERWARDS or self.windows >= MOST_AFTERWARDS

    def count(self, step: int, ranks: int) -> None:
        """``step`` windows are done, the last one by so many ranks."""
        if step > self.fault.step:
            self.windows += 1
            self.together += ranks == RANKS

    def state_dict(self) -> dict[str, int]:
        return {"windows": self.windows, "together": self.together}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.windows, self.together = int(state["windows"]), int(state["together"])


class FaultInjector:
    """Injects the fault, once, on the rank that it is meant for."""

    def __init__(self, fault: Fault, model: torch.nn.Module, events: Events, *, is_victim: bool) -> None:
        self._injury, self._model, self._events = fault, model, events
        self._is_due = is_victim

    def before(self, step: int) -> None:
        if self._is_due and step == self._injury.step:
            self._is_due = False
            hurt(self._injury, self._model, lambda: self._events.note("fault", step=self._injury.step))


def main(text: str) -> None:
    settings = Settings.read(text)
    torch.set_num_threads(1)
    rank = int(os.environ.get(REPLICA, os.environ["RANK"]))
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    events = Events.listening(Path(settings.folder), rank, life)
    torch.manual_seed(0)
    model = make_model()
    injector = FaultInjector(settings.fault, model, events, is_victim=life == 0 and rank == settings.fault.victim)
    train: Callable[..., int] = _with_torchft if settings.peer == TORCHFT else _with_gradsync
    try:
        step = train(settings, model, events, injector)
    except Exception as error:
        events.note("raised", text=f"{type(error).__name__}: {error}")
        raise
    note_end(events, model, step)


def _forward(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(BATCH, WIDTH)).square().mean()
    time.sleep(THINKING_SECONDS)
    return loss


def _with_gradsync(settings: Settings, model: torch.nn.Module, events: Events, injector: FaultInjector) -> int:
    fingerprints = Fingerprints(every=FINGERPRINTS_EVERY, on_difference="heal-from-majority")
    policy = SyncPolicy(on_veto="skip-window", fingerprints=fingerprints)
    accelerator = Accelerator(
        cpu=True,
        elastic=Elastic(timeout=settings.timeout),
        kwargs_handlers=[DistributedDataParallelKwargs(policy=policy)],
    )
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    standing = Standing(fault=settings.fault)
    accelerator.register_for_checkpointing(standing)
    elastic: Any = accelerator.elastic
    events.note("began", step=0)
    torch.manual_seed(1000 * events.life + events.rank)
    for attempt in elastic.attempts(sys.maxsize):
        is_done = False
        with attempt as step:
            injector.before(step)
            accelerator.backward(_forward(wrapped))
            optimizer.step()
            standing.count(step + 1, accelerator.num_processes)
            skipped = bool(wrapped.step_was_skipped)
            optimizer.zero_grad()
            is_done = True
        events.note("step", step=elastic.step, skipped=skipped if is_done else True)
        if standing.is_over:
            break
    return int(elastic.step)


def _with_torchft(settings: Settings, model: torch.nn.Module, events: Events, injector: FaultInjector) -> int:
    torchft: Any = importlib.import_module("torchft")
    optimizer, standing = make_optimizer(model.parameters()), Standing(fault=settings.fault)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "standing": standing}

    def state() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    limit, store = timedelta(seconds=settings.timeout), TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=state,
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
        load(torch.load(checkpoint, weights_only=True))
    _begin_together(Path(settings.folder), events)
    torch.manual_seed(1000 * events.life + events.rank)
    while not standing.is_over:
        before = manager.current_step()
        injector.before(before)
        stepping.zero_grad()
        _forward(wrapped).backward()
        stepping.step()
        step = manager.current_step()
        if step > before:
            standing.count(step, manager.num_participants())
        events.note("step", step=step, skipped=step == before)
        if events.rank == 0 and step % CHECKPOINT_EVERY == 0:
            with whole_file(checkpoint) as file:
                torch.save(state(), file)
    manager.shutdown(wait=False)
    return int(manager.current_step())


def _begin_together(folder: Path, events: Events) -> None:
    """One rank is a quorum, and would begin before the others have started."""
    (folder / f"here-{events.rank}").touch()
    while len(list(folder.glob("here-*"))) < RANKS:
        time.sleep(0.05)
    events.note("began", step=0)
    if events.life == 0:
        time.sleep(FIRST_HEARTBEATS)


if __name__ == "__main__":
    main(sys.argv[1])
