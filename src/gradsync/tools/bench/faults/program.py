"""The program of a rank: a small training with checkpoints, in which a fault hits one rank. It logs what it sees.

The loop is the same for all setups compared: only wrapping differs. After a restart, ranks continue from the newest
checkpoint. ``python -m gradsync.tools.bench.faults.program SETTINGS``, with settings in JSON, under any launcher.
"""

import hashlib
import json
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.base.files import whole_file
from gradsync.tools.bench.faults.cases import Fault, hurt
from gradsync.tools.bench.faults.contenders import WRAPPERS

__all__ = [
    "BATCH",
    "CHECKPOINT",
    "CHECKPOINT_EVERY",
    "EVENTS",
    "THINKING_SECONDS",
    "WIDTH",
    "Events",
    "Settings",
    "main",
    "make_model",
    "make_optimizer",
    "note_end",
]

EVENTS, CHECKPOINT = "events.jsonl", "checkpoint.pt"
CHECKPOINT_EVERY = 5
# So that a step has a middle in which something can happen.
THINKING_SECONDS = 0.02
WIDTH, DEPTH, BATCH = 256, 6, 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``peer`` is who synchronizes, ``timeout`` the seconds that its group has for a collective."""

    peer: str
    folder: str
    timeout: float
    fault: Fault

    def as_json(self) -> str:
        return json.dumps({**vars(self), "fault": self.fault.as_data()})

    @classmethod
    def read(cls, text: str) -> "Settings":
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


def main(text: str) -> None:
    settings = Settings.read(text)
    torch.set_num_threads(1)
    rank, life = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    events = Events.listening(Path(settings.folder), rank, life)
    dist.init_process_group("gloo", timeout=timedelta(seconds=settings.timeout))
    try:
        _train(settings, events)
    except Exception as error:
        events.note("raised", text=f"{type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()


def _train(settings: Settings, events: Events) -> None:
    torch.manual_seed(0)
    model = make_model()
    wrapped = WRAPPERS[settings.peer].wrap(model, make_optimizer)
    checkpoint = Path(settings.folder) / CHECKPOINT
    step = _load(checkpoint, model, wrapped.optimizer)
    events.note("began", step=step)
    fault = settings.fault
    torch.manual_seed(1000 * events.life + events.rank)
    while step < fault.steps:
        if events.life == 0 and events.rank == fault.victim and step == fault.step:
            hurt(fault, model, lambda: events.note("fault", step=fault.step))
        wrapped.optimizer.zero_grad()
        loss = wrapped.model(torch.randn(BATCH, WIDTH)).square().mean()
        time.sleep(THINKING_SECONDS)
        wrapped.backward(loss)
        wrapped.optimizer.step()
        step += 1
        events.note("step", step=step, skipped=bool(getattr(wrapped.model, "step_was_skipped", False)))
        if events.rank == 0 and step % CHECKPOINT_EVERY == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": wrapped.optimizer.state_dict()}
            with whole_file(checkpoint) as file:
                torch.save(state, file)
    note_end(events, model, step)


def make_model() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def note_end(events: Events, model: nn.Module, step: int) -> None:
    """Note the parameters after that many steps."""
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    events.note("ended", step=step, digest=digest, finite=bool(parameters.isfinite().all()))


def _load(path: Path, model: nn.Module, optimizer: Any) -> int:
    with suppress(FileNotFoundError):
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    return 0


if __name__ == "__main__":
    main(sys.argv[1])
