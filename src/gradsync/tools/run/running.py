"""Observes a process in which a script runs: its wrappers, its backwards, its optimizers, its collectives."""

import functools
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from gradsync.base.environment import read_environment
from gradsync.base.errors import ConfigurationError
from gradsync.parallel.data_parallel import DistributedDataParallel
from gradsync.parallel.torch_names import TorchDDP
from gradsync.tools.run.account import Account
from gradsync.tools.run.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, REST, PhaseClock
from gradsync.tools.run.collectives import count_collectives
from gradsync.tools.run.replacing import replace_accelerator, replace_data_parallel
from gradsync.tools.run.wrappers import WatchedWrapper, watched

__all__ = ["Running"]


class Running:
    """Watches this process from :meth:`begin` on. With ``keep`` the script has torch's and Accelerate's own classes.

    Nothing is taken back: the process is the script's, and ends with it.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.keep = keep
        self._clock = PhaseClock()
        self._called: Counter[str] = Counter()
        self._wrappers: list[WatchedWrapper] = []
        # Beside the wrappers, which may be copied and pickled.
        self._found: weakref.WeakKeyDictionary[Any, WatchedWrapper] = weakref.WeakKeyDictionary()
        self._steps = 0
        self._place = _Place()

    def begin(self) -> None:
        """To be called before the script looks anything up."""
        for kind in (TorchDDP, DistributedDataParallel):
            self._watch_class(kind)
        self._watch_backward()
        self._watch_loaders()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        count_collectives(self._called)
        if not self.keep:
            replace_data_parallel()
            replace_accelerator()

    def account(self) -> Account:
        """What was counted so far."""
        self._place.look()
        return Account(
            rank=self._place.rank,
            world_size=self._place.world_size,
            host=socket.gethostname(),
            kept=self.keep,
            steps=self._steps,
            seconds=self._clock.seconds,
            called=dict(self._called),
            wrappers=tuple(wrapper.account() for wrapper in self._wrappers),
        )

    # -- what is exchanged for something that looks at the clock before and after -----------------------------------

    def _watch_class(self, kind: Any) -> None:
        initialize, forward = kind.__init__, kind.forward

        @functools.wraps(initialize)
        def watched_init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            initialize(wrapper, *args, **kwargs)
            self._place.look()
            found = watched(wrapper)
            self._wrappers.append(found)
            self._found[wrapper] = found

        # Not traced by the compiler, which goes on inside.
        @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
        @functools.wraps(forward)
        def watched_forward(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            found = self._found.get(wrapper)
            if found is None or not self._clock.is_mine():
                return forward(wrapper, *args, **kwargs)
            with self._clock.inside(FORWARD if torch.is_grad_enabled() else REST):
                found.before_forward()
                output = forward(wrapper, *args, **kwargs)
                found.after_forward(output)
            return output

        kind.__init__, kind.forward = watched_init, watched_forward

    def _watch_backward(self) -> None:
        # Tensor.backward calls it by this name.
        backward: Callable[..., Any] = torch.autograd.backward

        @functools.wraps(backward)
        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            with self._clock.inside(BACKWARD):
                result = backward(*args, **kwargs)
            took = time.perf_counter() - began
            for wrapper in self._wrappers:
                wrapper.after_backward(took, inside_step=self._clock.is_inside(OPTIMIZER))
            return result

        torch.autograd.backward = watched_backward

    def _watch_loaders(self) -> None:
        iterator: Any = dataloader._BaseDataLoaderIter
        take = iterator.__next__

        @functools.wraps(take)
        def watched_take(loader: Any) -> Any:
            with self._clock.inside(DATA):
                return take(loader)

        iterator.__next__ = watched_take

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._clock.enter(OPTIMIZER)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._clock.leave(OPTIMIZER)
        held = {id(each) for group in optimizer.param_groups for each in group["params"][:1]}
        concerned = [each for each in self._wrappers if not held.isdisjoint(each.parameter_ids)]
        # One that holds copies, as of parameters in another precision, may stand for any.
        ended = [each.step() for each in concerned or self._wrappers]
        if any(ended):
            self._steps += 1
            self._clock.stepped()


class _Place:
    """This rank's, of the process group while there is one: scripts destroy it before they end."""

    def __init__(self) -> None:
        try:
            environment = read_environment()
        except ConfigurationError:
            # Of a launcher that the script may well understand.
            self.rank, self.world_size = 0, 1
        else:
            self.rank, self.world_size = environment.rank, environment.world_size

    def look(self) -> None:
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
