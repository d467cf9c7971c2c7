"""The random programs of ``make attack``: what a seed draws.

A program is a training as in :mod:`tests.soak` (models with shared, unused and frozen layers, windows of all kinds)
with a real optimizer, and with everything that may happen beside it: threads that read, handlers, interrupts, faults.
"""

import collections
import random
from dataclasses import dataclass, field
from typing import Any

from tests.soak import SoakWindow, draw_window

__all__ = ["End", "Optimizer", "Program", "Reader", "Shot", "Sleep", "Window", "draw"]

KINDS = ("plain", "sharded", "sharded", "overlapped", "overlapped")
# eps: rounding must not decide where an update goes.
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.02, "eps": 1e-3}),
    ("Adam", {"lr": 0.02, "eps": 1e-3, "amsgrad": True}),
)
READS = ("save", "deepcopy", "evaluate", "sum", "flush", "optimizer", "values")
# Interpreters that change threads often show more orders of events.
SWITCH_INTERVALS = (5e-3, 1e-3, 1e-4, 1e-5)
SECTIONS = ("backward", "step", "read")
ENDS = ("interrupt", "interrupt", "interrupt all", "step raises", "killed")
LONGEST = 0.01


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """``late`` layers are added as a group before window ``added_at``; ``split``: those from this layer on have an
    optimizer of their own."""

    kind: str
    name: str
    options: dict[str, Any]
    split: int | None
    late: frozenset[int]
    added_at: int


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A thread of ``rank`` that reads again and again."""

    rank: int
    how: str
    pause: float


@dataclass(frozen=True, kw_only=True)
class Shot:
    """What the main thread of ``rank`` is made to do in the middle of something: run a handler that reads, or raise a
    KeyboardInterrupt in the reads after the step. ``by`` a real signal ``at`` so many seconds, or before the bytecode
    of gradsync.optim.sharded ``at`` that part of all."""

    rank: int
    kind: str
    by: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """``rank`` comes late to a section of its window."""

    rank: int
    section: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class End:
    """What ends the program in its last window, on ``rank``."""

    kind: str
    rank: int
    section: str
    after: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """One step. ``abstains``: the rank whose forward raises; ``overflows``: the one whose loss is infinite."""

    work: SoakWindow
    closure: bool
    clip: float | None
    abstains: int | None
    overflows: int | None
    zeroes: str
    reads: tuple[tuple[str, ...], ...]
    shots: tuple[Shot, ...]
    sleeps: tuple[Sleep, ...]

    @property
    def is_skipped(self) -> bool:
        return self.work.fails is not None or self.abstains is not None or self.overflows is not None


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything about one run."""

    seed: int
    world_size: int
    transport: str
    layers: int
    settings: dict[str, Any]
    optimizer: Optimizer
    scaler: bool
    scheduler: bool
    windows: tuple[Window, ...]
    readers: tuple[Reader, ...]
    end: End | None
    switch_interval: float = field(default=5e-3)

    def __str__(self) -> str:
        made = self.optimizer
        extras = [name for name, has in (("scaler", self.scaler), ("scheduler", self.scheduler)) if has]
        extras += [f"group added at {made.added_at}"] if made.late else []
        extras += [f"{sum(window.closure for window in self.windows)} closures"]
        readers = ", ".join(f"{each.how} on rank {each.rank}" for each in self.readers) or "no threads"
        shots = collections.Counter(f"{shot.kind} by {shot.by}" for window in self.windows for shot in window.shots)
        end = "to its end" if self.end is None else f"ended by {self.end.kind} of rank {self.end.rank}"
        return (
            f"seed {self.seed}: {self.world_size} ranks over {self.transport}, {self.layers} layers, {self.settings}; "
            f"{made.kind} {made.name} {made.options}, {', '.join(extras)}; {len(self.windows)} windows, {readers}, "
            f"{dict(shots)}, {end}"
        )


def draw(seed: int) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    world_size, layers = chance.choice((2, 2, 3)), chance.randint(1, 6)
    count = chance.randint(3, 14)
    optimizer, scaler = _draw_optimizer(chance, layers, count), chance.random() < 0.15
    end = _draw_end(chance, world_size, optimizer) if chance.random() < 0.2 else None
    # One is always trained: a model without any is refused.
    frozen = frozenset(layer for layer in range(layers) if chance.random() < 0.1) - {chance.randrange(layers)}
    # Where a fused optimizer of torch finds its first gradients infinite, it goes on with momenta that it never set.
    # And a GradScaler does not look at gradients of parameters that are in no group yet.
    is_fused = optimizer.kind == "plain" and optimizer.options.get("fused")
    may_overflow = scaler and not is_fused and not optimizer.late
    windows = []
    for _ in range(count):
        if chance.random() < 0.2:
            frozen -= {chance.randrange(layers)}
        windows.append(_draw_window(chance, world_size, layers, frozen, scaler=scaler, overflows=may_overflow))
    return Program(
        seed=seed,
        world_size=world_size,
        transport=chance.choice(("shared-memory", "shared-memory", "group", "peer-exchange")),
        layers=layers,
        settings={
            "bucket_cap_mb": chance.choice([1e-4, 1e-4, 3e-4, 1e-3, 25]),
            "schedule": chance.choice(["overlapped", "overlapped", "bucketed"]),
        },
        optimizer=optimizer,
        scaler=scaler,
        scheduler=chance.random() < 0.4,
        windows=tuple(windows),
        readers=tuple(
            Reader(rank=chance.randrange(world_size), how=chance.choice(READS), pause=chance.choice((0, 1e-4, 1e-3)))
            for _ in range(chance.choice((0, 0, 1, 2, 3, 4)))
        ),
        end=end,
        switch_interval=chance.choice(SWITCH_INTERVALS),
    )


def _draw_optimizer(chance: random.Random, layers: int, windows: int) -> Optimizer:
    kind = chance.choice(KINDS)
    name, options = chance.choice(OPTIMIZERS)
    options = {**options, **chance.choice(({}, {"foreach": True}, {"foreach": False}, {"fused": True}))}
    if name == "SGD" and options.get("fused"):
        # torch's own fails on momenta of parameters that have their first gradient later than others.
        options = {"lr": options["lr"], "fused": True}
    adds = layers > 1 and chance.random() < 0.3
    late = frozenset(chance.sample(range(layers), chance.randint(1, layers - 1))) if adds else frozenset[int]()
    # What is made first has some layers of both.
    first = [layer for layer in range(layers) if layer not in late]
    splits = kind == "overlapped" and len(first) > 1 and chance.random() < 0.3
    return Optimizer(
        kind=kind,
        name=name,
        options=options,
        split=first[chance.randrange(1, len(first))] if splits else None,
        late=late,
        added_at=chance.randrange(1, windows),
    )


def _draw_end(chance: random.Random, world_size: int, optimizer: Optimizer) -> End:
    kind = chance.choice(ENDS)
    if kind == "step raises" and optimizer.kind == "plain":
        # The other ranks have nothing to wait for, and go on without it.
        kind = "interrupt"
    return End(
        kind=kind,
        rank=chance.randrange(world_size),
        section=chance.choice(SECTIONS),
        after=chance.choice((0.0, chance.uniform(0.0, LONGEST))),
    )


def _draw_window(
    chance: random.Random, world_size: int, layers: int, frozen: frozenset[int], *, scaler: bool, overflows: bool
) -> Window:
    clip = chance.choice((0.05, 0.5)) if chance.random() < 0.25 else None
    work = draw_window(chance, world_size, layers, (frozen,) * world_size, synchronized=scaler or clip is not None)
    fits = work.kind in ("plain", "no_sync") and work.fails is None
    closure = fits and not scaler and chance.random() < 0.3
    abstains = chance.randrange(world_size) if fits and not closure and chance.random() < 0.08 else None
    overflows = overflows and work.fails is None and abstains is None and chance.random() < 0.15
    return Window(
        work=work,
        closure=closure,
        clip=clip,
        abstains=abstains,
        overflows=chance.randrange(world_size) if overflows else None,
        zeroes=chance.choice(("optimizer", "model", "in place")),
        reads=tuple(tuple(how for how in READS if chance.random() < 0.12) for _ in range(world_size)),
        shots=tuple(_draw_shot(chance, world_size) for _ in range(chance.choice((0, 0, 1, 1, 2)))),
        sleeps=tuple(
            Sleep(
                rank=chance.randrange(world_size),
                section=chance.choice(SECTIONS),
                seconds=chance.uniform(0.0, LONGEST),
            )
            for _ in range(chance.choice((0, 0, 0, 1)))
        ),
    )


def _draw_shot(chance: random.Random, world_size: int) -> Shot:
    by = chance.choice(("signal", "bytecode"))
    return Shot(
        rank=chance.randrange(world_size),
        kind=chance.choice(("handler", "handler", "interrupt")),
        by=by,
        at=chance.random() if by == "bytecode" else chance.uniform(0.0, LONGEST),
    )
