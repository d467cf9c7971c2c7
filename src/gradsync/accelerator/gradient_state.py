"""State shared between the parts of an Accelerator: whether the window ends here, and which loader is running."""

from typing import Any

__all__ = ["GradientState"]


class GradientState:
    """Shared by an accelerator and everything it has prepared.

    Loaders register themselves while they are iterated; the innermost one is the *active* one. ``end_of_dataloader``
    says that its current batch is its last, on all ranks; ``remainder`` is how many samples of that last global batch
    are real, or -1 when all are.
    """

    def __init__(self) -> None:
        self.sync_gradients = True
        self._loaders: list[Any] = []

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being iterated, or None."""
        return self._loaders[-1] if self._loaders else None

    @property
    def in_dataloader(self) -> bool:
        return bool(self._loaders)

    @property
    def end_of_dataloader(self) -> bool:
        return self.in_dataloader and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    def enter_dataloader(self, loader: Any) -> None:
        self._loaders.append(loader)

    def leave_dataloader(self, loader: Any) -> None:
        # Only the innermost: a loader may be iterated inside itself.
        for number in reversed(range(len(self._loaders))):
            if self._loaders[number] is loader:
                del self._loaders[number]
                return
