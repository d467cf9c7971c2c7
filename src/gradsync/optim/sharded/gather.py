"""Lazy parameters: reading one waits for its gather, and for no other bucket.

While the parameters of a bucket are being gathered they are of class :class:`AwaitedParameter`. torch passes every
operation on such a parameter to it first, so it can wait: a layer's forward, in whatever order layers run,
``state_dict()``, ``copy.deepcopy``, a norm that is logged. No reader can get half of a parameter, or an old one.

Code outside of Python does not ask, such as an extension of torch that gets a parameter as a tensor. It mostly gets it
in the forward of the module that owns it, so the parameters of the module are waited for before that, too.

[Note: readers at any moment] Other threads read parameters while this one trains, and a signal handler may read them
between any two of its bytecodes. A step therefore has two parts:

1. The calling thread *announces* it: parameters become awaited, one by one. Nothing has changed yet, so any reader gets
   the old value, from an awaited parameter or from one that is not awaited yet.
2. The :class:`~gradsync.optim.sharded.update_thread.UpdateThread` runs it. It begins for all parameters at once, at
   the moment at which it is queued for that thread. A reader of an awaited parameter joins the same queue, so it is
   behind the step, and waits there for what the step has started.

The main thread never leaves anything half done here, so an interrupt leaves nothing behind: a step that was announced
and never began is announced again by the next one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from gradsync.base.errors import GradsyncError
from gradsync.core.reduction.shared_gradient import WITHOUT_VALUES
from gradsync.optim.sharded.update_thread import UpdateThread, end_records_at_once

__all__ = ["AwaitedParameter", "Gather", "Gathers", "await_before_forward", "await_parameters", "error_for_later"]

# What says nothing of values, and need not wait for them. Python runs none of its own code inside of these: a signal
# handler would find the class of parameters switched off there.
_HARMLESS = (WITHOUT_VALUES - {torch.Tensor.__len__}) | {
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
    # The engine removes its hooks when a model goes.
    torch.Tensor._post_accumulate_grad_hooks.__get__,  # type: ignore[attr-defined, misc]
}


class AwaitedParameter(nn.Parameter):
    """A parameter whose new values are being gathered."""

    _gather: "Gather"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            awaited = list(_awaited_in((*args, *kwargs.values())))
            _finish(awaited)
            if not any(type(each) is AwaitedParameter for each in awaited):
                return func(*args, **kwargs)
            # They are still awaited: no step has begun yet, or this is the thread that runs it. None begins before the
            # values have been read.
            with ExitStack() as stack:
                for thread in _threads_of(awaited):
                    stack.enter_context(thread.paused())
                _finish(awaited)
                return torch._C._disabled_torch_function_impl(func, types, tuple(args), kwargs)
        return torch._C._disabled_torch_function_impl(func, types, tuple(args), kwargs)

    # torch's own methods look at the class before they look at values, or never look at values.

    def __hash__(self) -> int:
        return id(self)

    def __len__(self) -> int:
        return int(self.shape[0]) if self.dim() else super().__len__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(copied, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        arguments = self.data, self.requires_grad, OrderedDict[int, Any]()
        # A copy: another thread may remove a gather meanwhile.
        state = {name: value for name, value in vars(self).copy().items() if name != "_gather"}
        if not state:
            return torch._utils._rebuild_parameter, arguments
        return torch._utils._rebuild_parameter_with_state, (*arguments, state)


class Gather:
    """The gather of new values of ``parameters``, by actions of ``thread``."""

    def __init__(self, parameters: Sequence[nn.Parameter], thread: UpdateThread) -> None:
        self._parameters, self.thread = parameters, thread
        self._arrive: Callable[[], None] | None = None
        self._error: Exception | None = None
        self.is_finished = False

    def announce(self) -> None:
        """From now on, have every reader of one of the parameters ask here first."""
        for parameter in self._parameters:
            # Before what it waits for: pickling an ordinary parameter takes along all its attributes.
            parameter.__class__ = AwaitedParameter
            parameter._gather = self  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Wait for the values, unless nothing has started to make them. Raises a communicator's failure, every time."""
        if not self.is_finished:
            self.thread.run(self.finish_here)

    # -- on the update thread --------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        return self._arrive is not None

    def started(self, arrive: Callable[[], None]) -> None:
        """Note that the values are being gathered: ``arrive`` waits for them, and writes them into the parameters."""
        self._arrive = arrive

    def fail(self, error: BaseException) -> None:
        """Note that the values will never arrive, unless they have been started."""
        if self._arrive is None and self._error is None:
            self._error = error_for_later(error)

    def finish_here(self) -> None:
        """Do what :meth:`finish` does, on the thread that may change parameters."""
        if self._error is not None:
            raise self._error
        if self._arrive is not None and not self.is_finished:
            self._arrive()
            self.release()

    def release(self) -> None:
        """Make them ordinary parameters again."""
        for parameter in self._parameters:
            # Before the class: an ordinary parameter exposes all its attributes.
            if vars(parameter).get("_gather") is self:
                del parameter._gather  # type: ignore[attr-defined]
            if "_gather" not in vars(parameter):
                parameter.__class__ = nn.Parameter
        self.is_finished = True
        # It may hold the memory of a bucket.
        self._arrive, self._parameters = None, ()


class Gathers:
    """The gathers of one optimizer in flight, in the order in which they are needed, and their update thread."""

    def __init__(self, device: torch.device) -> None:
        end_records_at_once()
        self.thread = UpdateThread(device)
        self._gathers: Sequence[Gather] = ()

    def change(self, groups: Sequence[Sequence[nn.Parameter]], make: Callable[[Sequence[Gather]], None]) -> None:
        """Have ``make`` give all of ``groups`` new values. It registers how to wait for each, by
        :meth:`Gather.started`; groups that it does not register have their values when it returns."""
        for gather in self._gathers:
            # Announced by a step that was interrupted before it began.
            gather.release()
        gathers = [Gather(parameters, self.thread) for parameters in groups]
        # First, so that the next step finds them if this one is interrupted here.
        self._gathers = gathers
        for gather in gathers:
            gather.announce()
        self.thread.run(lambda: _make(gathers, make))

    def finish(self, then: Callable[[], None] | None = None) -> None:
        """Wait for all of them, and run ``then`` before anything else changes."""
        if then is not None or not all(gather.is_finished for gather in self._gathers):
            self.thread.run(lambda: self._finish_here(then))

    def _finish_here(self, then: Callable[[], None] | None) -> None:
        # Another thread may have begun a step since.
        for gather in self._gathers:
            gather.finish_here()
        if then is not None:
            then()


def _make(gathers: Sequence[Gather], make: Callable[[Sequence[Gather]], None]) -> None:
    try:
        make(gathers)
    except BaseException as error:
        for gather in gathers:
            gather.fail(error)
        raise
    for gather in gathers:
        if not gather.is_started:
            gather.release()


def error_for_later(error: BaseException) -> Exception:
    """The exception for later readers: an interrupt is raised once, where it occurred."""
    if isinstance(error, Exception):
        return error
    failure = GradsyncError(
        f"{type(error).__name__} came in the middle of an update, and parameters are neither the old ones nor the new "
        "ones. Go on from a checkpoint"
    )
    failure.__cause__ = error
    return failure


def await_before_forward(module: nn.Module) -> None:
    """Have every submodule of ``module`` wait for its own parameters before its forward."""
    for part in module.modules():
        if part._parameters and _await_own not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_await_own)


def _await_own(module: nn.Module, args: Any) -> None:
    # What is compiled has waited: see compiled_regions.py.
    if not torch.compiler.is_compiling():
        await_parameters(module._parameters.values())


def await_parameters(parameters: Iterable[nn.Parameter | None]) -> None:
    """Wait for those that are awaited."""
    _finish(each for each in parameters if type(each) is AwaitedParameter)


def _finish(awaited: Iterable[AwaitedParameter]) -> None:
    """Wait for all of them. Several may be of one bucket, and another thread may be ahead of this one."""
    parameters, waited = list(awaited), set[Gather]()
    while gathers := _gathers_of(parameters) - waited:
        waited |= gathers
        for gather in gathers:
            gather.finish()


def _threads_of(parameters: Iterable[AwaitedParameter]) -> list[UpdateThread]:
    """The update threads of the parameters, in an order that is the same for all readers."""
    return sorted({gather.thread for gather in _gathers_of(parameters)}, key=id)


def _gathers_of(parameters: Iterable[AwaitedParameter]) -> set[Gather]:
    found = [vars(each).get("_gather") for each in parameters]
    return {gather for gather in found if gather is not None}


def _awaited_in(values: Iterable[Any]) -> Iterator[AwaitedParameter]:
    for value in values:
        if isinstance(value, AwaitedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _awaited_in(value)
        elif isinstance(value, dict):
            yield from _awaited_in(value.values())
