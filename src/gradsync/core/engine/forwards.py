"""State of the forwards in a window, before there is a gradient."""

from collections.abc import Iterable

__all__ = ["Forwards"]


class Forwards:
    """Whether a forward ran in this window, whether the last one synchronizes, and which parameters none has used.

    A parameter is absent from a window if every forward of the window has announced it as absent, as modules do that
    leave layers out.
    """

    def __init__(self) -> None:
        self.any_in_window = False
        # In the running micro-batch of accumulate().
        self.any_in_block = False
        # A forward has begun, whether or not it completed, and no backward has ended since.
        self.awaits_backward = False
        # None once its backward has ended.
        self.last_synchronizes: bool | None = None
        self._absent_now: set[int] | None = None
        self._absent: set[int] | None = None

    def begin(self) -> None:
        self.any_in_window = self.any_in_block = self.awaits_backward = True
        self._absent_now = set()

    def enter_block(self) -> None:
        self.any_in_block = False

    def missed(self) -> None:
        """This rank has taken part in a forward of the others without running one of its own."""
        self.any_in_window = self.any_in_block = True

    def give_up_backward(self) -> None:
        """The backward of the last forward will not come. What is asked for next belongs to another micro-batch."""
        self.awaits_backward = False

    def announce_absent(self, indices: Iterable[int]) -> None:
        """The running forward leaves these parameters out. Has no effect outside a forward."""
        if self._absent_now is not None:
            self._absent_now.update(indices)

    def end(self, *, synchronizes: bool) -> None:
        self.last_synchronizes = synchronizes
        if self._absent_now is not None:
            self._absent = self._absent_now if self._absent is None else self._absent & self._absent_now
            self._absent_now = None

    def announce_all_absent(self, count: int) -> None:
        """A rank without data leaves out all parameters."""
        self._absent = set(range(count))

    @property
    def absent(self) -> set[int]:
        """The parameters that no forward of the window has used."""
        return self._absent or set()

    def close_backward(self) -> None:
        self.awaits_backward = False
        self.last_synchronizes = None

    def close_window(self) -> None:
        self.any_in_window = self.awaits_backward = False
        self._absent = None
