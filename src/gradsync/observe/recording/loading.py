"""Measures when a training waits for its data, separately from the loop's own code.

Between an optimizer's step and the next forward, a loop fetches a batch and does anything else it likes: the engine
cannot tell the two apart. So torch's ``DataLoader`` is instrumented, from the first recorder on: time spent inside it
is data. Wrap batches from elsewhere in :func:`loading`. All the rest is the loop's.
"""

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, dataloader

__all__ = ["listen", "loading"]

LOGGER = logging.getLogger("gradsync")

# Replaced and never changed, so that loading needs no lock.
_listeners: tuple[weakref.ref[Any], ...] = ()
_lock = threading.Lock()
_inside = threading.local()
_watches = False


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Mark code that fetches or creates data: ``with loading(): batch = next_batch()``.

    Not needed for a torch ``DataLoader``.
    """
    listeners = [] if getattr(_inside, "yes", False) else [each for ref in _listeners if (each := ref()) is not None]
    if not listeners:
        # Nobody listens; or it is inside of another one, and the outermost reports.
        yield
        return
    _inside.yes = True
    _call([each.loading_began for each in listeners])
    try:
        yield
    finally:
        _inside.yes = False
        _call([each.loading_ended for each in listeners])


def _call(callbacks: Sequence[Callable[[], None]]) -> None:
    """Call a listener and log what it raises: this runs inside the user's loader, and must not break a training."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            LOGGER.exception("what was loaded when is not recorded any more")
            _forget()


def _forget() -> None:
    global _listeners
    _listeners = ()


# A worker that a loader has forked is not the training.
os.register_at_fork(after_in_child=_forget)


def listen(recorder: Any) -> None:
    """Call ``loading_began`` and ``loading_ended`` of a recorder, for as long as it lives, on the thread that loads."""
    global _listeners, _watches
    with _lock:
        others = [ref for ref in _listeners if ref() not in (None, recorder)]
        _listeners = (*others, weakref.ref(recorder))
        if not _watches:
            _watches = True
            iterators: Any = dataloader._BaseDataLoaderIter
            # The beginning of an epoch starts workers.
            _watch(DataLoader, "__iter__")
            _watch(iterators, "__next__")


def _watch(owner: Any, name: str) -> None:
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def watched(*args: Any) -> Any:
        with loading():
            return method(*args)

    setattr(owner, name, watched)
