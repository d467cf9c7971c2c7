"""Where torch itself switches ``__torch_function__`` off, and runs code in Python meanwhile.

A signal handler that comes there finds it off, too: parameters that are on their way are not asked, and it reads old
values, or half of a new one. On the main thread of a training that is the end of every ``record_function``, so of every
``optimizer.step()`` and of every batch of a ``DataLoader``.
"""

import functools
from typing import Any

import torch
from torch.autograd.profiler import record_function

__all__ = ["end_records_at_once"]


def end_records_at_once() -> None:
    """Have the records of this process end in one go, during which no code in Python runs, and so no signal handler.

    Alternative considered: to ask wherever an attribute of a parameter is looked up. ``torch.sum(parameter)`` looks up
    none.
    """
    leave = record_function.__exit__
    end = getattr(torch.ops.profiler._record_function_exit._RecordFunction, "_op", None)
    if end is None or hasattr(leave, "_told_to_gradsync"):
        return

    @functools.wraps(leave)
    def leave_at_once(self: record_function, *raised: Any) -> None:
        ends, self.run_callbacks_on_exit = self.run_callbacks_on_exit, False
        try:
            # All that it does, but for the end itself.
            leave(self, *raised)
        finally:
            self.run_callbacks_on_exit = ends
        if ends:
            torch._C._disabled_torch_function_impl(end, (), (self.record,), {})

    leave_at_once._told_to_gradsync = True  # type: ignore[attr-defined]
    record_function.__exit__ = leave_at_once  # type: ignore[method-assign]
