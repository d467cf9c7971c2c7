"""New parameters on their way: who wants to read one waits for it, and for no other bucket.

While the parameters of a bucket are being gathered they are of class :class:`AwaitedParameter`. torch hands whatever is
done with such a parameter to it first, so it can wait: a layer's forward, in whatever order layers run,
``state_dict()``, ``copy.deepcopy``, a norm that somebody logs. Nobody can read half of a parameter, or an old one.

Code outside of Python does not ask: an extension of torch that gets a parameter as a tensor. Mostly it gets it in the
forward of the module that has it, so before that the parameters of the module are waited for, too.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from gradsync.bucket.without_values import WITHOUT_VALUES
from gradsync.errors import MisuseError

__all__ = ["Arrival", "AwaitedParameter", "Gathers", "await_before_forward"]

# What says nothing of values, and need not wait for them.
_HARMLESS = WITHOUT_VALUES | {
    *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
    torch.Tensor.grad.__delete__,  # type: ignore[union-attr]
    *(torch.Tensor.__hash__, torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
}


class AwaitedParameter(nn.Parameter):
    """A parameter whose new values are on their way."""

    _gather: "Gather"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            # Another thread may be ahead of this one, and several parameters may be of one bucket.
            gathers = {getattr(each, "_gather", None): None for each in _awaited_in((*args, *kwargs.values()))}
            for gather in gathers:
                if gather is not None:
                    gather.finish()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # torch's own methods look at the class before they look at values.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._gather.finish()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._gather.finish()
        return self.__reduce_ex__(protocol)


class Gather:
    """New values of ``parameters``, on their way. ``arrive`` waits for them, and puts them into the parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], arrive: Callable[[], None]) -> None:
        self._parameters, self._arrive = parameters, arrive
        self._lock = threading.Lock()
        self._is_finished = False
        for parameter in parameters:
            parameter._gather = self  # type: ignore[attr-defined]
            parameter.__class__ = AwaitedParameter

    def finish(self) -> None:
        """Wait until they are there. Raises what has become of the wire, each time."""
        with self._lock:
            if self._is_finished:
                return
            # Whoever reads a parameter may be in inference mode, or recording gradients; this is neither's business.
            with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._arrive()
            for parameter in self._parameters:
                parameter.__class__ = nn.Parameter
                del parameter._gather  # type: ignore[attr-defined]
            self._is_finished = True


class Arrival:
    """Waits for new values that are not even on their way yet: whoever makes them says later how to wait for them."""

    def __init__(self) -> None:
        self._arrive: Future[Callable[[], None]] = Future()
        self._maker = threading.get_ident()

    def started(self, arrive: Callable[[], None]) -> None:
        """They are on their way."""
        self._arrive.set_result(arrive)

    def fail(self, error: BaseException) -> None:
        """They will never be, unless they are."""
        if not self._arrive.done():
            self._arrive.set_exception(error)

    def __call__(self) -> None:
        if not self._arrive.done() and threading.get_ident() == self._maker:
            raise MisuseError(
                "a parameter was read inside of the step that updates it. Read it before or after the step"
            )
        self._arrive.result()()


class Gathers:
    """What is on its way, in the order in which it is needed."""

    def __init__(self) -> None:
        self._gathers: list[Gather] = []

    def expect(self, parameters: Sequence[nn.Parameter], arrive: Callable[[], None]) -> None:
        """From now on whoever reads one of ``parameters`` waits for ``arrive``."""
        self._gathers.append(Gather(parameters, arrive))

    def finish(self) -> None:
        """Wait for all of it."""
        while self._gathers:
            self._gathers[0].finish()
            self._gathers.pop(0)


def await_before_forward(module: nn.Module) -> None:
    """Have every part of ``module`` wait for the parameters of its own before its forward."""
    for part in module.modules():
        if part._parameters and _await_own not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(_await_own)


def _await_own(module: nn.Module, args: Any) -> None:
    for parameter in module._parameters.values():
        if type(parameter) is AwaitedParameter:
            gather = getattr(parameter, "_gather", None)
            if gather is not None:
                gather.finish()


def _awaited_in(values: Iterable[Any]) -> Iterator[AwaitedParameter]:
    for value in values:
        if isinstance(value, AwaitedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _awaited_in(value)
        elif isinstance(value, dict):
            yield from _awaited_in(value.values())
