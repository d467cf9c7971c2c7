"""One rank's part in a program of ``make attack``: it trains, and everything that was drawn happens to it."""

import copy
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from gradsync import DistributedDataParallel, OverlappedOptimizer, ShardedOptimizer
from gradsync.errors import GradsyncError, MisuseError, PeerFailedError
from tests.attack_disturbances import EVALUATED, Disturbed, Outcome
from tests.attack_mutants import taken_out
from tests.attack_programs import End, Program, Window
from tests.communicators import fresh_communicator
from tests.fuse import Explosion
from tests.soak import MicroBatch, Paths

__all__ = ["attack", "make_optimizers", "parameters_of_layers"]

TIMEOUT_SECONDS = 25.0
# Of the moments in a step, those in which gradients are zeroed.
ZERO_SHARE = 0.4


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


class _Rank(Disturbed):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.communicator = fresh_communicator(program.transport, TIMEOUT_SECONDS)
        self.rank = self.communicator.rank
        self.model = DistributedDataParallel(Paths(program.layers), communicator=self.communicator, **program.settings)
        self.paths: Paths = self.model.module
        self.paths.freeze(program.windows[0].work.frozen[self.rank])
        self.plain = make_optimizers(program, self.paths)
        self.optimizer: Any = self._wrap(program.optimizer.kind)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.93) if program.scheduler else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) if program.scaler else None
        if self.scaler is not None:
            # It must have scaled something before it steps, also on a rank that has no micro-batch until then.
            self.scaler.scale(torch.zeros(()))

    def _wrap(self, kind: str) -> Any:
        if kind == "plain":
            return self.plain[0]
        if kind == "overlapped":
            return OverlappedOptimizer(self.plain, self.model)
        return ShardedOptimizer(self.plain[0], self.model)

    # -- the program -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        with self.disturbed(), _fused():
            try:
                for number, window in enumerate(self.program.windows):
                    self.number = number
                    self._window(window, self.program.end if number == len(self.program.windows) - 1 else None)
                self.set_alarm(None)
                if self.program.end is None:
                    self._finish()
                else:
                    self._save("after the end")
            except (KeyboardInterrupt, GradsyncError, Explosion) as error:
                self.set_alarm(None)
                if not self.is_ending or isinstance(error, MisuseError):
                    self.outcome.wrong.append(f"window {self.number}, {self.section}: raised {error!r}")
                self._save(f"after {type(error).__name__}")
            if self.program.end is not None:
                self.communicator.abort("the program has ended")
        return self.outcome

    def _finish(self) -> None:
        self.outcome.final = self.values()
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
        # A plain optimizer that was interrupted in its step has updated some parameters, as in torch.
        whole = self.program.optimizer.kind != "plain" or self.section != "step"
        for how in ("values", "save"):
            try:
                self.read(how, when, whole=whole)
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
            self.set_alarm(self.handle, by_signal.at)
        self._enter("backward", window, end)
        is_well = self._backward(window)
        traced = next((shot for shot in shots if (shot.kind, shot.by) == ("handler", "bytecode")), None)
        at = None if traced is None else traced.at
        # Zeroing is short beside the step, and has its own share of moments.
        in_zero = at is not None and at < ZERO_SHARE
        self._enter("step", window, end)
        with self.at("step", None if in_zero else at, self.handle):
            self._step_in_window(window, is_well=is_well)
        with self.at("zero", at / ZERO_SHARE if at is not None and in_zero else None, self.handle):
            self._zero(window)
        self._enter("read", window, end)
        for how in window.reads[self.rank]:
            self.read(how, f"read in window {self.number}", whole=True)
        for shot in shots:
            if shot.kind == "interrupt":
                self.interrupt_reads(shot.by, shot.at)
        if end is None:
            self.set_alarm(None)

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
            self.set_alarm(_die, end.after)
        else:
            self.set_alarm(_interrupt, end.after)

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

    def _step_in_window(self, window: Window, *, is_well: bool) -> None:
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

    def _zero(self, window: Window) -> None:
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


@contextmanager
def _fused() -> Iterator[None]:
    try:
        yield
    finally:
        _Faulty.is_lit = False


def _interrupt() -> None:
    raise KeyboardInterrupt


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
