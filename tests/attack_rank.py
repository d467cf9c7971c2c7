"""One rank's part in a program of ``make attack``: it trains, and everything that was drawn happens to it."""

import copy
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer
from gradsync.errors import GradsyncError, MisuseError, PeerFailedError
from gradsync.sharded import journey
from tests.attack_mutants import taken_out
from tests.attack_programs import End, Program, Reader, Window
from tests.soak import Explosion, MicroBatch, Paths
from tests.test_early_updates import AtOnce
from tests.test_readers import at_moment
from tests.wires import fresh_wire

__all__ = ["Outcome", "Snapshot", "attack", "make_optimizers"]

WIRE_SECONDS = 25.0
JOIN_SECONDS = 20.0
# Of each thread: enough to compare, and not all of them.
MOST_SNAPSHOTS = 40
EVALUATED = MicroBatch(layers=(0,), seed=0, weight=1, looked_at=False)


@dataclass(frozen=True)
class Snapshot:
    """Parameters that somebody has read; ``whole`` if all of them must be those after one and the same step."""

    source: str
    values: list[torch.Tensor]
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


class _Faulty:
    """An optimizer that raises in its step, once the fuse of this rank is lit."""

    element_wise = parameter_wise = True
    is_lit = False

    def step(self, closure: Any = None) -> Any:
        if _Faulty.is_lit:
            raise Explosion("in step")
        return super().step(closure)  # type: ignore[misc]


class FaultySGD(_Faulty, torch.optim.SGD):
    pass


class FaultyAdam(_Faulty, torch.optim.Adam):
    pass


class FaultyAdamW(_Faulty, torch.optim.AdamW):
    pass


FAULTY = {"SGD": FaultySGD, "Adam": FaultyAdam, "AdamW": FaultyAdamW}


def make_optimizers(program: Program, model: Paths) -> list[torch.optim.Optimizer]:
    """The plain ones: one, or two where its layers are split between them."""
    made = program.optimizer
    raises = program.end is not None and program.end.kind == "step raises"
    kind = FAULTY[made.name] if raises else getattr(torch.optim, made.name)
    first = [layer for layer in range(program.layers) if layer not in made.late]
    split = first[-1] + 1 if made.split is None else made.split
    shares = [layer for layer in first if layer < split], [layer for layer in first if layer >= split]
    return [kind(parameters_of_layers(model, share), **made.options) for share in shares if share]


def parameters_of_layers(model: Paths, layers: Any) -> list[torch.nn.Parameter]:
    return [parameter for layer in sorted(layers) for parameter in model.layers[layer].parameters()]


def attack(program: Program, without: str | None = None) -> Outcome:
    """This rank's part in it, ``without`` the repair of that name."""
    logging.getLogger("gradsync").disabled = True
    before = set(threading.enumerate())
    try:
        with taken_out(without):
            outcome = _Rank(program).run()
    finally:
        logging.getLogger("gradsync").disabled = False
    if program.end is not None:
        # What was under way is kept by parameters that wait for it.
        return outcome
    gc.collect()
    left = [each.name for each in threading.enumerate() if each not in before and each.name == "gradsync updates"]
    if left:
        time.sleep(0.2)
        left = [name for name in left if name in {each.name for each in set(threading.enumerate()) - before}]
    outcome.wrong += [f"threads were left: {left}"] if left else []
    return outcome


class _Rank:
    def __init__(self, program: Program) -> None:
        self.program, self.outcome = program, Outcome()
        self.wire = fresh_wire(program.wire, WIRE_SECONDS)
        self.rank = self.wire.rank
        self.model = DistributedDataParallel(Paths(program.layers), communicator=self.wire, **program.settings)
        self.paths: Paths = self.model.module
        self.paths.freeze(program.windows[0].work.frozen[self.rank])
        self.plain = make_optimizers(program, self.paths)
        self.optimizer: Any = self._wrap(program.optimizer.kind)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.93) if program.scheduler else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) if program.scaler else None
        self.number, self.section, self.is_over = 0, "", threading.Event()
        self.most = {"step": 1, "read": 1}
        # What the next alarm does.
        self.on_alarm: Callable[[], None] | None = None
        self.may_interrupt = False
        self.handled = 0

    def _wrap(self, kind: str) -> Any:
        if kind == "plain":
            return self.plain[0]
        if kind == "overlapped":
            return OverlappedOptimizer(self.model, *self.plain)
        optimizer = ShardedOptimizer.of(self.plain[0], self.model)
        if self.program.optimizer.early is not None:
            optimizer._journey.pace = AtOnce(self.program.optimizer.early)
            optimizer._journey.early.pause = 0
        return optimizer

    @property
    def is_ending(self) -> bool:
        """Whether the end that was drawn may have come, on this rank or on another."""
        return self.program.end is not None and self.number >= len(self.program.windows) - 2

    # -- the program -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        with self._disturbed():
            try:
                for number, window in enumerate(self.program.windows):
                    self.number = number
                    self._window(window, self.program.end if number == len(self.program.windows) - 1 else None)
                self._set_alarm(None)
                if self.program.end is None:
                    self._finish()
                else:
                    self._save("after the end")
            except (KeyboardInterrupt, GradsyncError, Explosion) as error:
                self._set_alarm(None)
                if not self.is_ending or isinstance(error, MisuseError):
                    self.outcome.wrong.append(f"window {self.number}, {self.section}: raised {error!r}")
                self._save(f"after {type(error).__name__}")
            if self.program.end is not None:
                self.wire.abort("the program has ended")
        return self.outcome

    def _finish(self) -> None:
        self.outcome.final = self._values()
        if self.program.optimizer.kind == "sharded":
            self.optimizer.consolidate()
            self.outcome.states = [copy.deepcopy(self.optimizer.state_dict())]
            return
        if self.program.optimizer.kind == "overlapped":
            self.optimizer.zero_grad()
            self.model.zero_grad()
            self.optimizer.close()
        self.outcome.states = [copy.deepcopy(each.state_dict()) for each in self.plain]

    def _save(self, when: str) -> None:
        """Whatever has happened, the model is readable, or says why not."""
        # A plain optimizer that was interrupted in its step has updated some parameters, as ever.
        whole = self.program.optimizer.kind != "plain" or self.section != "step"
        for how in ("values", "save"):
            try:
                self._read(how, when, whole=whole)
            except (GradsyncError, Explosion):
                self.outcome.refused += 1
            except BaseException as error:
                self.outcome.wrong.append(f"{when}, {how} raised {error!r}")

    # -- a window --------------------------------------------------------------------------------------------------

    def _window(self, window: Window, end: End | None) -> None:
        made = self.program.optimizer
        if made.late and self.number == made.added_at:
            self.optimizer.add_param_group(
                {"params": parameters_of_layers(self.paths, made.late), "lr": made.options["lr"] / 2}
            )
        self.paths.freeze(window.work.frozen[self.rank])
        shots = [shot for shot in window.shots if shot.rank == self.rank]
        by_signal = next((shot for shot in shots if (shot.kind, shot.by) == ("handler", "signal")), None)
        if by_signal is not None:
            self._set_alarm(self._handle, by_signal.at)
        self._enter("backward", window, end)
        is_well = self._backward(window)
        traced = next((shot for shot in shots if (shot.kind, shot.by) == ("handler", "bytecode")), None)
        with self._at("step", traced and traced.at, self._handle):
            self._enter("step", window, end)
            self._step_and_zero(window, is_well=is_well)
        self._enter("read", window, end)
        for how in window.reads[self.rank]:
            self._read(how, f"read in window {self.number}", whole=True)
        for shot in shots:
            if shot.kind == "interrupt":
                self._interrupt_reads(shot.by, shot.at)
        if end is None:
            self._set_alarm(None)

    def _enter(self, section: str, window: Window, end: End | None) -> None:
        self.section = section
        for sleep in window.sleeps:
            if (sleep.rank, sleep.section) == (self.rank, section):
                time.sleep(sleep.seconds)
        if end is None or end.section != section or (end.rank != self.rank and end.kind != "interrupt all"):
            return
        if end.kind == "step raises":
            _Faulty.is_lit = True
        elif end.kind == "killed":
            self._set_alarm(_die, end.after)
        else:
            self._set_alarm(_interrupt, end.after)

    def _backward(self, window: Window) -> bool:
        """All micro-batches; but for the last, where a closure has it. Whether nothing was planted, or raised."""
        if window.abstains == self.rank:
            return self._abstain(window)
        batches = window.work.batches[self.rank]
        try:
            if window.work.kind in ("accumulate", "weighted"):
                self._accumulate(window, batches)
            else:
                self._backwards(window, batches)
        except (Explosion, PeerFailedError):
            if window.work.fails is None or self.is_ending:
                raise
            self.model.zero_grad()
            return False
        if window.work.fails is not None and batches:
            self.outcome.wrong.append(f"window {self.number} ({window.work.kind}) should have failed")
        return True

    def _backwards(self, window: Window, batches: tuple[MicroBatch, ...]) -> None:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if last and window.closure:
                break
            with nullcontext() if last else self.model.no_sync():
                self._loss_backward(window, batch, last=last)
        if not batches and not window.closure:
            self.model(EVALUATED)

    def _abstain(self, window: Window) -> bool:
        """In the last micro-batch the forward raises."""
        try:
            for batch in window.work.batches[self.rank][:-1]:
                with self.model.no_sync():
                    self._loss_backward(window, batch, last=False)
            raise Explosion("in forward")
        except Explosion:
            self.model.zero_grad()
            self.model.abstain("planted")
        return True

    def _accumulate(self, window: Window, batches: tuple[MicroBatch, ...]) -> None:
        rows: list[MicroBatch | None] = [*batches] or [None]
        for number, batch in enumerate(rows):
            last = number == len(rows) - 1
            with self.model.accumulate(last=last):
                if batch is not None:
                    self._loss_backward(window, batch, last=last)

    def _loss_backward(self, window: Window, batch: MicroBatch, *, last: bool) -> torch.Tensor:
        fails = window.work.fails
        explodes_at = fails[1] if last and fails is not None and fails[0] == self.rank else None
        model: Any = self.paths if window.work.kind == "loose" else self.model
        loss: torch.Tensor = model(batch, explodes_at)
        if last and window.overflows == self.rank:
            loss = loss * float("inf")
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if window.work.kind == "weighted":
            self.model.backward(loss, weight=batch.weight)
        else:
            loss.backward()
        return loss

    def _step_and_zero(self, window: Window, *, is_well: bool) -> None:
        try:
            self._step(window, is_well=is_well)
        except PeerFailedError:
            # A rank without a backward hears of those of others here.
            if window.work.fails is None or window.work.batches[self.rank] or self.is_ending:
                raise
            self.model.zero_grad()
            self.optimizer.step()
        if self.scheduler is not None and not window.is_skipped:
            self.scheduler.step()
        if window.zeroes == "optimizer" and not self.program.optimizer.late:
            self.optimizer.zero_grad()
        elif window.zeroes == "in place" and not self.program.optimizer.late and self.scaler is None:
            self.optimizer.zero_grad(set_to_none=False)
            self.model.zero_grad()
        else:
            self.model.zero_grad()

    def _step(self, window: Window, *, is_well: bool) -> None:
        if window.closure:
            self.optimizer.step(lambda: self._closure(window))
        elif self.scaler is not None and is_well and self._has_gradients():
            if window.clip is not None:
                self.scaler.unscale_(self.optimizer)
                self._clip(window)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            if is_well:
                self._clip(window)
            self.optimizer.step()

    def _closure(self, window: Window) -> float:
        batches = window.work.batches[self.rank]
        loss = torch.zeros(())
        if batches:
            loss = self._loss_backward(window, batches[-1], last=True)
        else:
            self.model(EVALUATED)
        self._clip(window)
        return float(loss.detach())

    def _clip(self, window: Window) -> None:
        if window.clip is not None and self._has_gradients():
            groups = self.optimizer.param_groups
            torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], window.clip)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"])

    # -- who reads -------------------------------------------------------------------------------------------------

    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.paths.parameters()]

    def _read(self, how: str, source: str, *, whole: bool) -> None:
        """``whole``: no step can begin meanwhile."""
        values = None
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
                values = self._values()
        if values is not None:
            self.outcome.snapshots.append(Snapshot(f"{source}, {how}", values, whole))

    def _handle(self) -> None:
        """What a signal handler does."""
        whole = self.program.optimizer.kind != "plain" or self.section != "step"
        self.handled += 1
        for how in ("values", ("save", "flush", "deepcopy", "optimizer")[self.handled % 4]):
            try:
                self._read(how, f"handler in window {self.number}, {self.section}", whole=whole)
            except MisuseError:
                self.outcome.refused += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and self.is_ending:
                    raise
                if not (self.is_ending and isinstance(error, GradsyncError | Explosion)):
                    self.outcome.wrong.append(f"handler in window {self.number}, {self.section}: {how}: {error!r}")

    def _interrupt_reads(self, by: str, at: float) -> None:
        """A KeyboardInterrupt comes while the model is saved. It is saved again."""

        def interrupt() -> None:
            if self.may_interrupt:
                self.may_interrupt = False
                raise KeyboardInterrupt

        try:
            self.may_interrupt = True
            if by == "signal":
                self._set_alarm(interrupt, at / 10)
                self._read("save", "interrupted", whole=False)
            else:
                with self._at("read", at, interrupt):
                    self._read("save", "interrupted", whole=False)
            self.may_interrupt = False
        except KeyboardInterrupt:
            self.outcome.interrupted += 1
            # It may have come between the beginning of torch.no_grad() and that of its block.
            torch.set_grad_enabled(True)
        self._read("save", f"after an interrupt in window {self.number}", whole=True)

    def _keep_reading(self, reader: Reader) -> None:
        count = 0
        while not self.is_over.is_set():
            try:
                before = len(self.outcome.snapshots)
                self._read(reader.how, f"thread in window {self.number}", whole=False)
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

    def _set_alarm(self, action: Callable[[], None] | None, seconds: float = 0.0) -> None:
        self.on_alarm = action
        signal.setitimer(signal.ITIMER_REAL, 0.0 if action is None else max(seconds, 1e-6))

    def _alarmed(self, *_: Any) -> None:
        action, self.on_alarm = self.on_alarm, None
        if action is not None:
            action()

    @contextmanager
    def _at(self, section: str, at: float | None, call: Callable[[], None]) -> Iterator[None]:
        if at is None:
            yield
            return
        with at_moment(1 + int(at * self.most[section]), call) as count:
            yield
        self.most[section] = max(self.most[section], count[0])

    @contextmanager
    def _disturbed(self) -> Iterator[None]:
        """Handlers, threads, and what else is to be put back."""
        with ExitStack() as stack:
            stack.callback(setattr, _Faulty, "is_lit", False)
            stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, self._alarmed))
            stack.callback(self._set_alarm, None)
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(self.program.switch_interval)
            if self.program.optimizer.early == 1.0:
                stack.callback(setattr, journey, "plan_early", journey.plan_early)
                journey.plan_early = lambda times, sizes, gathered: range(len(sizes))
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
            with suppress(RuntimeError):
                reader.join(JOIN_SECONDS)
            if reader.is_alive():
                self.outcome.wrong.append("a thread that reads has not ended")


def _interrupt() -> None:
    raise KeyboardInterrupt


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
