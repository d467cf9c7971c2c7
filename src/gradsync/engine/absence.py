"""Which parameters no forward of a window has used, as the modules that left them out have said."""

from collections.abc import Iterable

__all__ = ["Absence"]


class Absence:
    """A parameter is absent from a window if every forward of the window has announced it so."""

    def __init__(self) -> None:
        self._forward: set[int] | None = None
        self._window: set[int] | None = None

    def begin_forward(self) -> None:
        self._forward = set()

    def announce(self, indices: Iterable[int]) -> None:
        """The running forward leaves these parameters out. Says nothing outside a forward."""
        if self._forward is not None:
            self._forward.update(indices)

    def end_forward(self) -> None:
        if self._forward is not None:
            self._window = self._forward if self._window is None else self._window & self._forward
            self._forward = None

    def announce_all(self, count: int) -> None:
        """A rank without data leaves out everything."""
        self._window = set(range(count))

    @property
    def window(self) -> set[int]:
        return self._window or set()

    def close_window(self) -> None:
        self._window = None
