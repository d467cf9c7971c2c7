"""Works around places where torch switches ``__torch_function__`` off while it runs Python code.

A signal handler that runs there finds it off, too: awaited parameters are not asked, and it reads old values, or half
of a new one. On the main thread of a training run that is the end of every ``record_function``, so of every
``optimizer.step()`` and of every batch of a ``DataLoader``.
"""

import functools
from typing import Any

import torch
from torch.autograd.profiler import record_function

__all__ = ["end_records_at_once"]


def end_records_at_once() -> None:
    """Make records end in a single call, during which no Python code runs, and so no signal handler.

    Alternative considered: to check wherever an attribute of a parameter is looked up. ``torch.sum(parameter)`` looks
    up none.
    """
    leave = record_function.__exit__
    end = getattr(torch.ops.profiler._record_function_exit._RecordFunction, "_op", None)
    if end is None or hasattr(leave, "_told_to_gradsync"):
        return

    @functools.wraps(leave)
    def leave_at_once(self: record_function, *raised: Any) -> None:
        ends, self.run_callbacks_on_exit = self.run_callbacks_on_exit, False
        try:
            # Everything that the original does, except the end itself.
            leave(self, *raised)
        finally:
            self.run_callbacks_on_exit = ends
        if ends:
            torch._C._disabled_torch_function_impl(end, (), (self.record,), {})

    leave_at_once._told_to_gradsync = True  # type: ignore[attr-defined]
    record_function.__exit__ = leave_at_once  # type: ignore[method-assign]
