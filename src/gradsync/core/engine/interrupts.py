"""[Note: an interrupt] Ctrl-C, or a signal handler that raises, may cut the engine short between any two lines.

Between two collectives the engine knows what it has started: the interrupt is handled as a failed backward is, and all
ranks can go on. While a collective is being started, or several follow each other, nobody can tell which of them the
other ranks will wait for. Going on could pair a collective of this rank with a different one of theirs, and average two
windows into one. So the communicator is aborted then: every rank raises WireLostError at once.
"""

from types import TracebackType

__all__ = ["CollectiveSection"]


class CollectiveSection:
    """``with`` around what must run as a whole; :attr:`cut_short` where an interrupt has left it in the middle.

    An ordinary error does not count: it is raised by something that knows which collectives it has started.
    """

    def __init__(self) -> None:
        # Only a section that ends takes its mark back: an interrupt may come before, inside or after any line here.
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
