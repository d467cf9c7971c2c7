"""The schedule of one cycle of local steps: what is sent when.

A cycle of ``every=6`` optimizer steps with two fragments that are merged one step after they were sent::

    step           1   2   3   4   5   6 │ 1   2   3   4 …
    fragment 0             ├─▶           │         ├─▶
    fragment 1                         ├─│─▶

A fragment must have arrived before the next is sent, so the delay is shorter than the interval between two of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError

__all__ = ["Settings", "cut"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """In ``every`` optimizer steps, each of the ``fragments`` is sent once, and merged ``delay`` steps later."""

    every: int
    fragments: int = 1
    delay: int = 0

    def check(self) -> None:
        """Raise ConfigurationError for numbers that make no valid schedule."""
        for name, least, meaning in (
            ("every", 1, "optimizer steps between two synchronizations"),
            ("fragments", 1, "parts that are sent one after the other"),
            ("delay", 0, "optimizer steps between sending a fragment and merging it"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(
                    f"{name} is a number of {meaning}, a whole one of at least {least}, got {value!r}"
                )
        if self.fragments > self.every:
            raise ConfigurationError(
                f"fragments={self.fragments} cannot each have a step of their own among every={self.every}. Take fewer "
                "fragments, or more steps"
            )
        if self.delay >= self.every // self.fragments:
            raise ConfigurationError(
                f"delay={self.delay} is too long: with every={self.every} and fragments={self.fragments} the next "
                f"fragment may be sent after {self.every // self.fragments} steps, and this one must be merged before. "
                "Take a shorter delay, fewer fragments or more steps"
            )

    @property
    def schedule(self) -> dict[int, int]:
        """Maps steps of a cycle, counted from 1, to the fragment sent after them; other steps are left out."""
        return {(fragment + 1) * self.every // self.fragments: fragment for fragment in range(self.fragments)}


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut ``sizes`` into this many runs of neighbours, none of them empty, with about equal sums."""
    runs: list[range] = []
    start = 0
    for left in range(fragments, 0, -1):
        end, used = start + 1, sizes[start]
        fair = sum(sizes[start:]) / left
        # The others need one each. A size that crosses the boundary goes where the larger part of it is.
        while end <= len(sizes) - left and (left == 1 or used + sizes[end] / 2 <= fair):
            used += sizes[end]
            end += 1
        runs.append(range(start, end))
        start = end
    return runs
