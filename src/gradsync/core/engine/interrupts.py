"""Sections of collectives that an interrupt must not cut in half.

[Note: an interrupt] Ctrl-C, or a signal handler that raises, may cut the engine short between any two lines. Between
two collectives the engine knows what it has started: the interrupt is handled like a failed backward, and all ranks can
go on. While a collective is being started, or several follow each other, nothing can tell which of them the other ranks
will wait for. Going on could pair a collective of this rank with a different one of theirs, and average two windows
into one. So the communicator is aborted in that case: every rank raises WireLostError at once.
"""

from types import TracebackType

__all__ = ["CollectiveSection"]


class CollectiveSection:
    """Context manager around collectives that must run as a whole; :attr:`cut_short` if an interrupt hit it midway.

    An ordinary error does not count: whatever raises it knows which collectives it has started.
    """

    def __init__(self) -> None:
        # Only a section that ends clears its mark: an interrupt may come before, inside or after any line here.
        self._open = 0

    @property
    def cut_short(self) -> bool:
        return self._open > 0

    def reset(self) -> None:
        self._open = 0

    def __enter__(self) -> None:
        self._open += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            self._open -= 1
