"""The order in which gradients become ready: observed locally, agreed with rank 0, and rechecked periodically.

Buckets are cut from this order, so that they fill one after the other and start early. It is learned from the first
synchronized backward, and checked again after 2, 4, 8, … and then every 256 windows: ranks then know by counting alone
that a small collective is due, and nothing is exchanged in between.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch

from gradsync.communicator import Communicator

__all__ = ["GradientOrder"]

CHECK_EVERY = 256

# A parameter not seen in this many checks counts as unused: it moves to the end, where it delays nothing.
CHECKS_REMEMBERED = 4


class GradientOrder:
    """The agreed order over parameter indices, and how it changes."""

    def __init__(self, count: int) -> None:
        # The initial guess: gradients come in about the reverse of the order of registration.
        self.order = list(reversed(range(count)))
        self.learned = False
        self.running = False
        self._windows = 0
        self._due = False
        self._observed: list[int] = []
        self._seen: deque[set[int]] = deque(maxlen=CHECKS_REMEMBERED)

    def state_dict(self) -> dict[str, Any]:
        """What has been learned, as plain values."""
        return {
            "order": list(self.order),
            "learned": self.learned,
            "windows": self._windows,
            "observed": list(self._observed),
            "seen": [sorted(seen) for seen in self._seen],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was learned. All ranks must load the same."""
        self.order = list(state["order"])
        self.learned, self._windows = state["learned"], state["windows"]
        self._observed = list(state["observed"])
        self._seen = deque(map(set, state["seen"]), maxlen=CHECKS_REMEMBERED)

    # Windows are counted when ranks negotiate: all do, even one whose backward fails, so that all counts agree.

    def window_began(self) -> None:
        """Ranks negotiate for a window."""
        self._due = self._windows > 0 and _is_checked(self._windows)
        self._windows += 1
        self.running = True

    def window_ended(self) -> None:
        """The window is over, whatever its outcome."""
        self.running = False

    def observe(self, arrivals: list[int]) -> None:
        """Note the order of the running window, which was synchronized."""
        self._observed = list(arrivals)
        self._seen.append(set(arrivals))

    @property
    def windows_before(self) -> int:
        """The number of windows before the running one."""
        return self._windows - 1

    @property
    def observing(self) -> bool:
        """Whether the running window, or else the next, is one that is observed."""
        return _is_checked(self._windows if self.running else self._windows + 1)

    @property
    def observed(self) -> bool:
        """Whether anything was observed. A window that failed teaches nothing."""
        return bool(self._seen)

    @property
    def due(self) -> bool:
        """Whether the ranks must now agree on the order. The same answer on all ranks."""
        return self._due

    def keep(self) -> None:
        """Keep the current order, whatever was observed. All ranks must call this alike."""
        self._due = False

    def agree(self, communicator: Communicator) -> bool:
        """Take rank 0's order. Collective. True when the order has changed."""
        self._due = False
        self.learned = True
        seen: set[int] = set().union(*self._seen)
        proposal = torch.tensor(merge_order(self.order, self._observed, seen), dtype=torch.int64)
        if communicator.world_size > 1 and proposal.numel():
            shared = proposal.to(communicator.device)
            communicator.broadcast(shared, 0).wait()
            proposal = shared.cpu()
        agreed: list[int] = proposal.tolist()
        changed = agreed != self.order
        self.order = agreed
        return changed


def _is_checked(window: int) -> bool:
    return window % CHECK_EVERY == 0 if window >= CHECK_EVERY else window & (window - 1) == 0


def merge_order(previous: Sequence[int], observed: Sequence[int], seen: Collection[int]) -> list[int]:
    """The observed order; parameters not seen this time stay right after the one that preceded them before.

    Unused parameters would otherwise wander to the end and back with every draw of a dropped layer; those that are not
    in ``seen``, a longer memory, do go to the end. A parameter observed several times counts at its last appearance:
    only then is its gradient whole.
    """
    last_seen = {parameter: place for place, parameter in enumerate(observed)}
    merged = sorted(last_seen, key=last_seen.__getitem__)
    place_after: dict[int, list[int]] = {}
    leading: list[int] = []
    trailing: list[int] = []
    anchor: int | None = None
    for parameter in previous:
        if parameter in last_seen:
            anchor = parameter
        elif parameter not in seen:
            trailing.append(parameter)
        elif anchor is None:
            leading.append(parameter)
        else:
            place_after.setdefault(anchor, []).append(parameter)
    result = list(leading)
    for parameter in merged:
        result.append(parameter)
        result.extend(place_after.get(parameter, ()))
    return result + trailing
