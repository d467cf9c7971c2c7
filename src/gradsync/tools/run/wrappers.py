"""Measures a training loop: a clock of its phases, and the backwards of each wrapped model, in vain or not.

A window ends when an optimizer steps. Only its last backward has to synchronize, because the mean of a sum is the sum
of the means; what the others send is sent again. Backwards inside a step, which LBFGS requests through a closure, and
those whose gradients were discarded before the next forward, are windows of their own.

torch's class does not report how often it synchronized. It decides in the forward, so the flag is read there, and a
hook on the output notes whether that forward has had its backward. gradsync's class counts by itself.
"""

import statistics
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gradsync.core.engine.backward_watch import tensors_in
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.parallel.torch_names import TorchDDP
from gradsync.tools.run.account import FORWARD, PHASES, REST, Kind, WrapperAccount

__all__ = ["PhaseClock", "WatchedWrapper", "watched"]

# Backwards after which torch's class is asked. It rebuilds its buckets once, after the first synchronization, and
# measures the first ten and every hundredth.
ASKED = 12
# Of those that it has measured, the first ones are not like the others.
WARM_UP = 2
COUNTED = ("steps", "backwards", "synchronized", "wasted", "collectives", "broadcasts")


class PhaseClock:
    """Clocks the seconds in each phase, of the thread that made it. What others do happens at the same time, and costs
    the loop nothing of its own.

    What precedes the first forward is not counted: there models are made, and memory is touched for the first time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._thread = threading.get_ident()
        self._inside = [REST]
        self._since: float | None = None
        self._counted = dict.fromkeys(PHASES, 0.0)
        self._until_step = dict(self._counted)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by phase up to the end of the last optimizer step: what comes later is no part of the loop."""
        return dict(self._until_step)

    def is_mine(self) -> bool:
        """Whether the thread that asks is the loop's."""
        return threading.get_ident() == self._thread

    def is_inside(self, phase: str) -> bool:
        """Whether the phase has begun and not ended, whatever else has begun since."""
        return phase in self._inside

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """What runs meanwhile belongs to the phase, but for what belongs to another one inside."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase)

    def enter(self, phase: str) -> None:
        """Enter a phase as :meth:`inside` does, for hooks at the beginning and at the end."""
        if self.is_mine():
            if phase == FORWARD and self._since is None:
                self._since = self._now()
            self._count()
            self._inside.append(phase)

    def leave(self, phase: str) -> None:
        if self.is_mine() and self._inside[-1] == phase:
            self._count()
            self._inside.pop()

    def stepped(self) -> None:
        """An optimizer step is over."""
        if self.is_mine():
            self._count()
            self._until_step = dict(self._counted)

    def _count(self) -> None:
        if self._since is not None:
            now = self._now()
            self._counted[self._inside[-1]] += now - self._since
            self._since = now


class WatchedWrapper(ABC):
    """The counts of one wrapper; a subclass knows how often it has synchronized, and what each time takes."""

    kind: Kind

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._model = type(wrapper.module).__name__
        parameters = [each for each in wrapper.module.parameters() if each.requires_grad]
        self._trained = [weakref.ref(each) for each in parameters]
        self._parameters = sum(each.numel() for each in parameters)
        self._nbytes = sum(each.numel() * each.element_size() for each in parameters)
        self.parameter_ids = {id(each) for each in parameters}
        self._counts: Counter[str] = Counter()
        # Of the window that has not ended yet.
        self._window: Counter[str] = Counter()
        # What was remembered of forwards whose backward has come since the last look.
        self._reached: list[bool] = []
        # A step that runs backwards itself has run one.
        self._stepping = False
        # Seconds of backwards that synchronized and of those that did not, each with their number.
        self._took: dict[bool, tuple[float, int]] = {True: (0.0, 0), False: (0.0, 0)}
        self._facts: tuple[int, float | None, float | None] = (0, None, None)

    def before_forward(self) -> None:
        wrapper = self._wrapper()
        if wrapper is not None and wrapper.will_sync_module_buffers():
            self._counts["broadcasts"] += 1
        gradients = (parameter.grad for each in self._trained if (parameter := each()) is not None)
        if self._window["backwards"] and all(each is None for each in gradients):
            self._end_window()

    def after_forward(self, output: Any) -> None:
        """A hook on the output notes whether the forward gets its backward: those of other models come in between."""
        flag, reached = self._flag(), self._reached

        def backward_comes(gradient: torch.Tensor) -> None:
            reached.append(flag)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(backward_comes)

    def _flag(self) -> bool:
        """What to remember of the forward."""
        return False

    def after_backward(self, seconds: float, *, inside_step: bool = False) -> None:
        """A backward of any model has taken ``seconds``."""
        reached, synchronized = self._look()
        if not reached:
            return
        self._window["backwards"] += 1
        before, number = self._took[synchronized > 0]
        self._took[synchronized > 0] = (before + seconds, number + 1)
        self._count(synchronized)
        if inside_step:
            self._end_window()
            self._stepping = True

    def step(self) -> bool:
        """An optimizer has stepped on parameters of the model; whether that ended a window."""
        # A synchronization may have waited for the step.
        self._count(self._look()[1])
        if not self._window["backwards"] and not self._stepping:
            return False
        self._end_window()
        self._stepping = False
        self._counts["steps"] += 1
        return True

    def _count(self, synchronized: int) -> None:
        self._window["synchronized"] += synchronized
        self._window["collectives"] += synchronized * self._collectives_each()

    def _end_window(self) -> None:
        self._counts.update(self._window)
        self._counts["wasted"] += max(0, self._window["synchronized"] - 1)
        self._window.clear()

    def account(self) -> WrapperAccount:
        buckets, communication, hidden = self._read_facts()
        return WrapperAccount(
            kind=self.kind,
            model=self._model,
            parameters=self._parameters,
            nbytes=self._nbytes,
            buckets=buckets,
            **{name: self._counts[name] for name in COUNTED},
            backward_with=_mean(self._took[True]),
            backward_without=_mean(self._took[False]),
            communication=communication,
            hidden=hidden,
        )

    @abstractmethod
    def _look(self) -> tuple[bool, int]:
        """Whether the model has had a backward since the last look, and how many synchronizations."""

    @abstractmethod
    def _collectives_each(self) -> int:
        """How many collectives a synchronization takes now."""

    def _read_facts(self) -> tuple[int, float | None, float | None]:
        """Buckets, and the seconds that they were under way in a backward and under way behind its computation, where
        the wrapper measures it; the last that were known, if the wrapper is gone."""
        return self._facts


class WatchedOurs(WatchedWrapper):
    """gradsync's class, whose synchronizer counts."""

    kind = "gradsync"

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        super().__init__(wrapper)
        self._seen = wrapper.synchronizer.synchronizations

    def _look(self) -> tuple[bool, int]:
        wrapper = self._wrapper()
        if wrapper is None:
            return False, 0
        now = wrapper.synchronizer.synchronizations
        # Another communicator begins to count from 0.
        new, self._seen = max(0, now - self._seen), now
        reached = bool(self._reached) or new > 0
        self._reached.clear()
        self._facts = len(wrapper.synchronizer.buckets), None, None
        return reached, new

    def _collectives_each(self) -> int:
        return self._facts[0]


class WatchedTorchs(WatchedWrapper):
    """torch's class: the flag in the forward, a hook on its output, and its logger."""

    kind = "torch"

    def __init__(self, wrapper: Any) -> None:
        super().__init__(wrapper)
        self._synchronizes = False
        self._asked = 0
        # By when it began: seconds that collectives of a backward were under way, and those behind its computation.
        self._measured: dict[int, tuple[float, float]] = {}

    def before_forward(self) -> None:
        super().before_forward()
        wrapper = self._wrapper()
        self._synchronizes = wrapper is not None and bool(wrapper.require_backward_grad_sync)

    def _flag(self) -> bool:
        return self._synchronizes

    def _look(self) -> tuple[bool, int]:
        reached = list(self._reached)
        self._reached.clear()
        return bool(reached), int(any(reached))

    def _collectives_each(self) -> int:
        # To ask takes longer than all else here.
        if self._asked < ASKED:
            self._asked += 1
            self._read_facts()
        return self._facts[0]

    def _read_facts(self) -> tuple[int, float | None, float | None]:
        wrapper = self._wrapper()
        if wrapper is not None and wrapper.logger is not None:
            data = wrapper._get_ddp_logging_data()
            sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes", "")
            buckets = len(sizes.split(",")) if sizes else 0
            began = data.get("backward_comm_time_start", 0)
            if began:
                names = ("backward_comm_time", "backward_compute_comm_overlap_time")
                communication, hidden = (data.get(name, 0) * 1e-9 for name in names)
                self._measured[began] = communication, hidden
            self._facts = buckets, None, None
            # In torch's own means one backward that waited for another rank's start outweighs all others.
            found = list(self._measured.values())
            if found := found[WARM_UP:] or found:
                usual = statistics.median(each for each, _ in found)
                exposed = statistics.median(each - hidden for each, hidden in found)
                self._facts = buckets, usual, max(0.0, usual - exposed)
        return self._facts


def watched(wrapper: nn.Module) -> WatchedWrapper:
    """The right one for the wrapper's class."""
    return WatchedTorchs(wrapper) if isinstance(wrapper, TorchDDP) else WatchedOurs(wrapper)  # type: ignore[arg-type]


def _mean(total: tuple[float, int]) -> float | None:
    return total[0] / total[1] if total[1] else None
