"""What happens to a rank in a program of ``make attack``, beside its training: threads, handlers and interrupts."""

import copy
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync.errors import GradsyncError, MisuseError
from tests.attack_programs import Program, Reader
from tests.fuse import Explosion
from tests.optim.test_readers import OURS, at_moment
from tests.soak import MicroBatch, Paths

__all__ = ["EVALUATED", "Disturbed", "Outcome", "Snapshot"]

JOIN_SECONDS = 20.0
# Of each thread: enough to compare, and not all of them.
MOST_SNAPSHOTS = 40
EVALUATED = MicroBatch(layers=(0,), seed=0, weight=1, looked_at=False)


@dataclass(frozen=True)
class Snapshot:
    """Parameters that somebody has read; ``whole`` if all of them must be those after one and the same step.

    ``values`` are None of parameters about which nothing is promised."""

    source: str
    values: Sequence[torch.Tensor | None]
    whole: bool


@dataclass(kw_only=True)
class Outcome:
    """What came of a program on one rank. ``states``: of its optimizers, if it came to its end."""

    wrong: list[str] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    final: list[torch.Tensor] | None = None
    states: list[dict[str, Any]] | None = None
    refused: int = 0
    interrupted: int = 0


class Disturbed:
    """A rank that trains ``paths`` by ``optimizer``; it is in a ``section`` of the window of that ``number``."""

    rank: int
    paths: Paths
    optimizer: Any

    def __init__(self, program: Program) -> None:
        self.program, self.outcome = program, Outcome()
        self.number, self.section, self.is_over = 0, "", threading.Event()
        # Bytecodes of a section: a guess, and then the most so far.
        self.most = {"step": 1000, "zero": 250, "read": 300}
        # What the next alarm does.
        self.on_alarm: Callable[[], None] | None = None
        self.may_interrupt = False
        self.handled = 0

    @property
    def is_ending(self) -> bool:
        """Whether the end that was drawn may have come, on this rank or on another."""
        return self.program.end is not None and self.number >= len(self.program.windows) - 2

    # -- who reads -------------------------------------------------------------------------------------------------

    def values(self) -> list[torch.Tensor]:
        # One operation each: a step may begin between two.
        with torch.no_grad():
            return [parameter.clone() for parameter in self.paths.parameters()]

    def values_between_steps(self) -> list[torch.Tensor | None]:
        """Another thread's :meth:`values`, without those of operations that were running when a step began: these may
        be part of that step (docs/sharded-optimizer.md)."""
        return [self._value_between_steps(parameter) for parameter in self.paths.parameters()]

    def _value_between_steps(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        # A parameter that is awaited was announced before: whatever reads it from then on waits.
        is_awaited, steps, section = type(parameter) is not torch.nn.Parameter, self._steps, self.section
        with torch.no_grad():
            value = parameter.clone()
        return value if is_awaited or (section != "step" and self._steps == steps) else None

    @property
    def _steps(self) -> int:
        return getattr(self.optimizer, "_steps", 0)

    def read(self, how: str, source: str, *, whole: bool) -> None:
        """``whole``: no step can begin meanwhile."""
        values: Sequence[torch.Tensor | None] | None = None
        with torch.no_grad():
            if how == "save":
                torch.save(self.paths.state_dict(), buffer := io.BytesIO())
                if whole:
                    buffer.seek(0)
                    values = list(torch.load(buffer).values())
            elif how == "deepcopy":
                values = [parameter.detach() for parameter in copy.deepcopy(self.paths).parameters()]
            elif how == "evaluate":
                self.paths(EVALUATED)
            elif how == "sum":
                for parameter in reversed(list(self.paths.parameters())):
                    parameter.sum()
            elif how == "flush" and self.program.optimizer.kind != "plain":
                self.optimizer.flush()
            elif how == "optimizer" and self.program.optimizer.kind == "overlapped":
                self.optimizer.state_dict()
            elif how == "values":
                values = self.values() if whole else self.values_between_steps()
        # Of a plain optimizer in its step, and of a view whose values a thread copies later, torch promises nothing.
        promised = whole or (self.program.optimizer.kind != "plain" and how == "values")
        if values is not None and promised:
            self.outcome.snapshots.append(Snapshot(f"{source}, {how}", values, whole))

    def handle(self) -> None:
        """What a signal handler does."""
        whole = self.program.optimizer.kind != "plain" or self.section != "step"
        self.handled += 1
        for how in ("values", ("save", "flush", "deepcopy", "optimizer")[self.handled % 4]):
            try:
                self.read(how, f"handler in window {self.number}, {self.section}", whole=whole)
            except MisuseError:
                self.outcome.refused += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and self.is_ending:
                    raise
                if not (self.is_ending and isinstance(error, GradsyncError | Explosion)):
                    self.outcome.wrong.append(f"handler in window {self.number}, {self.section}: {how}: {error!r}")

    def interrupt_reads(self, by: str, at: float) -> None:
        """A KeyboardInterrupt comes while the model is saved. It is saved again."""

        def interrupt() -> None:
            if self.may_interrupt:
                self.may_interrupt = False
                raise KeyboardInterrupt

        try:
            self.may_interrupt = True
            if by == "signal":
                self.set_alarm(interrupt, at / 10)
                self.read("save", "interrupted", whole=False)
            else:
                with self.at("read", at, interrupt):
                    self.read("save", "interrupted", whole=False)
            self.may_interrupt = False
        except KeyboardInterrupt:
            self.outcome.interrupted += 1
            # It may have come between the beginning of torch.no_grad() and that of its block.
            torch.set_grad_enabled(True)
        self.read("save", f"after an interrupt in window {self.number}", whole=True)

    def _keep_reading(self, reader: Reader) -> None:
        count = 0
        while not self.is_over.is_set():
            try:
                before = len(self.outcome.snapshots)
                self.read(reader.how, f"thread in window {self.number}", whole=False)
                count += 1
                if count > MOST_SNAPSHOTS and reader.how in ("values", "deepcopy") and before:
                    reader = Reader(rank=reader.rank, how="sum", pause=reader.pause)
            except BaseException as error:
                if not (self.is_ending and isinstance(error, GradsyncError | Explosion)):
                    self.outcome.wrong.append(f"thread in window {self.number}, {reader.how}: {error!r}")
                    return
                time.sleep(0.001)
            time.sleep(reader.pause)

    # -- what happens ----------------------------------------------------------------------------------------------

    def set_alarm(self, action: Callable[[], None] | None, seconds: float = 0.0) -> None:
        self.on_alarm = action
        signal.setitimer(signal.ITIMER_REAL, 0.0 if action is None else max(seconds, 1e-6))

    def _alarmed(self, *_: Any) -> None:
        action, self.on_alarm = self.on_alarm, None
        if action is not None:
            action()

    @contextmanager
    def at(self, section: str, at: float | None, call: Callable[[], None]) -> Iterator[None]:
        if at is None:
            yield
            return
        # What stands in the place of a repair that was taken out, too.
        with at_moment(1 + int(at * self.most[section]), call, (*OURS, "attack_mutants")) as count:
            yield
        self.most[section] = max(self.most[section], count[0])

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        """Handlers, threads, and what else is to be put back."""
        with ExitStack() as stack:
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, self._alarmed))
            stack.callback(self.set_alarm, None)
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(self.program.switch_interval)
            readers = [
                threading.Thread(target=self._keep_reading, args=(each,), daemon=True)
                for each in self.program.readers
                if each.rank == self.rank
            ]
            stack.callback(self._join, readers)
            for reader in readers:
                reader.start()
            yield

    def _join(self, readers: list[threading.Thread]) -> None:
        self.is_over.set()
        for reader in readers:
            reader.join(JOIN_SECONDS)
            if reader.is_alive():
                self.outcome.wrong.append("a thread that reads has not ended")
