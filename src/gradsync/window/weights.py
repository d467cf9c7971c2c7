"""What the mean over a window divides by.

Every micro-batch has a weight, the number of items (samples, tokens) its loss is the mean of. The gradient of a window
is ``Σ w·∇loss / Σ w`` over all micro-batches of all ranks::

    rank 0   ┃ w·∇ ┃ w·∇ ┃ w·∇ ┃──┐
    rank 1   ┃ w·∇ ┃ w·∇ ┃────────┤ one reduction   ▶  Σ w·∇ / Σ w   ▶  optimizer.step()
    rank 2   ┃ (nothing)  ────────┘

[Note: what is not known] No rank knows ``Σ w`` over all ranks when its gradients land in the buckets. Waiting for it
would stop the backward of a fast rank until the slowest has begun its last one. So the buckets are divided by the sum
of the window before, which is the same number in most trainings, and corrected at the end where it was not. The true
sum is on its way meanwhile, as a few float64 numbers ahead of the first bucket. Only the first window waits for it.

Alternative considered: a place for the weight in the tail of a bucket. A tail has the dtype of its bucket, and bfloat16
cannot tell 4096 tokens from 4100.

[Note: units] Gradients of weighted losses are computed as ``w / unit`` times the gradient of the loss, where the unit
is about a rank's weight in one window: what lies in ``.grad`` then has the size that gradients have, which float16
needs. Without weights every micro-batch weighs 1, ``loss.backward()`` is nobody's to change, and the unit is 1.
"""

import math
from typing import Any

import torch

from gradsync.communicator import Communicator, Handle
from gradsync.errors import ConfigurationError, MisuseError

__all__ = ["Weights", "checked_weight"]


_COUNTS = ("unit", "sum", "plain", "weighted")


class Weights:
    """The weights of the micro-batches in the window of one synchronizer."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # Σ w over all ranks, as far as it is known before it is known. See [Note: what is not known].
        self.expected: float | None = None
        # Inside accumulate(): backwards count, also plain ones, each block once.
        self.in_block = False
        # A synchronization in the middle of a window: plain means, divided by the weights when the window ends.
        self.deferred = False
        self._last_window_counted = False
        self.reset()

    def reset(self) -> None:
        """Begin a new window."""
        self.counting = False
        self._framed = False
        self.backwards = 0
        self.synchronized = False
        self._followed = False
        self._unit: float | None = None
        self._sum = 0.0
        self._plain = 0
        self._weighted = 0
        self._block_counted = False
        self._counted_now = False
        self._message: torch.Tensor | None = None
        self._pending: Handle | None = None
        self._total: float | torch.Tensor = 0.0

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of an unfinished window, and what all ranks expect of the next, as plain values."""
        return {name: getattr(self, f"_{name}") for name in _COUNTS} | {
            "expected": self.expected,
            "counting": self.counting,
            "backwards": self.backwards,
            "last_window_counted": self._last_window_counted,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        for name in _COUNTS:
            setattr(self, f"_{name}", state[name])
        self.expected, self.counting, self.backwards = state["expected"], state["counting"], state["backwards"]
        self._last_window_counted = state["last_window_counted"]

    def __repr__(self) -> str:
        return f"Weights(sum={self._sum:g} of this rank, {self._weighted + self._plain} micro-batches)"

    # -- counting ----------------------------------------------------------------------------------------------

    def enter_block(self) -> None:
        """A micro-batch of accumulate() begins."""
        self.in_block = self._framed = True
        self._block_counted = False

    def leave_block(self, *, last: bool) -> None:
        self.in_block = False
        if last:
            self.reset()

    def add(self, weight: float, unit: float | None = None) -> float:
        """Count a weighted micro-batch; returns the unit of its gradient. See [Note: units].

        Several models that share a loss must share the unit: ``unit`` is that of the first.
        """
        if self._plain:
            self._refuse_mixture("this one")
        self.counting = True
        self.backwards += 1
        self._counted_now = False
        self._weighted += 1
        self._sum += weight
        if unit is not None:
            self._unit = unit
        elif self._unit is None:
            self._unit = self._new_unit(weight)
        return self._unit

    def _new_unit(self, weight: float) -> float:
        if self.expected is not None:
            return self.expected / self._communicator.world_size
        # Means in the middle of a window mix what ranks have, so these must have it in the same unit.
        return 1.0 if self.deferred else weight

    def add_plain(self, *, announced: bool = False) -> None:
        """A backward without a weight: inside accumulate() the block counts as one micro-batch."""
        if self._weighted:
            self._refuse_mixture("an earlier one")
        if not (self.in_block or self.counting or announced):
            return
        if self._framed and not self.in_block and not announced:
            raise MisuseError(
                "a backward outside accumulate() has reached a model in the middle of its window, and would be counted "
                "into it. If it is another model's loss, freeze this one meanwhile with requires_grad_(False)"
            )
        self.backwards += 1
        self._counted_now = not (self.in_block and self._block_counted)
        if not self._counted_now:
            return
        self._block_counted = self.counting = True
        self._plain += 1
        self._sum += 1.0
        self._unit = 1.0

    def take_back_plain(self) -> None:
        """That backward has reached no parameter, as ``autograd.grad`` does not. The block has still to count."""
        if self._counted_now:
            self._block_counted = self._counted_now = False
            self._plain -= 1
            self._sum -= 1.0
            self.backwards -= 1
            self.counting = self._plain > 0

    def skip(self) -> None:
        """A window in which nobody counts is synchronized."""
        if not self.deferred:
            self._last_window_counted = False

    def follow(self) -> None:
        """This rank has nothing in the window: whether the others count is what it was in the window before."""
        self._followed = self._last_window_counted

    @property
    def agreed_on(self) -> bool:
        """Whether ranks must agree on the sum of weights in this window."""
        return (self.counting or self.in_block or self._followed) and not self.deferred

    def _refuse_mixture(self, which: str) -> None:
        raise MisuseError(
            f"some backwards of this window have a weight and some have none ({which} has one), so there is no right "
            "mean. Pass weight= to every backward of a window, or to none"
        )

    # -- agreeing ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Send this rank's sum on its way; collective, before the first bucket starts."""
        kinds = (float(self._weighted > 0), float(self._plain > 0))
        self._message = _on(self._communicator.device, (self._sum, *kinds))
        self._pending = self._communicator.all_reduce(self._message)
        self._last_window_counted = True
        if self.expected is None:
            self._receive()
            total = float(self._total)
            # The whole world has nothing: any number will do, zero would not.
            self.expected = total if total > 0 else float(self._communicator.world_size)

    @property
    def landing_scale(self) -> float:
        """What turns gradients in units into their share of the expected mean, times the number of ranks."""
        if self.expected is None or self._unit is None:
            return 1.0
        scale = self._unit * self._communicator.world_size / self.expected
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-15) else scale

    def finish(self) -> float | torch.Tensor | None:
        """What corrects means that were computed with the expected sum; None where it was right."""
        if self._message is None:
            return None
        self._receive()
        self.synchronized = True
        expected = self.expected
        assert expected is not None
        if isinstance(self._total, torch.Tensor):
            return torch.where(self._total > 0, expected / self._total, 1.0)
        return None if self._total in (0.0, expected) else expected / self._total

    def learn(self) -> None:
        """The window went well on all ranks: its sum, where it is known to all of them, serves the next one."""
        if self.synchronized and isinstance(self._total, float) and self._total > 0:
            self.expected = self._total

    def undo(self) -> float | torch.Tensor | None:
        """What turns the mean of this window back into a share of the sum, so that a further backward may add to it."""
        self.synchronized = False
        if self._unit is None:
            self._unit = 1.0
        factor = self._total / (self._communicator.world_size * self._unit)
        return None if not isinstance(factor, torch.Tensor) and factor in (0.0, 1.0) else factor

    def _receive(self) -> None:
        if self._pending is None or self._message is None:
            return
        self._pending.wait()
        self._pending = None
        if self._message.device.type == "cpu" or self.expected is None:
            self._total, weighted, plain = self._message.tolist()
            if weighted and plain:
                raise MisuseError(
                    "some ranks gave weights to the backwards of this window and some did not, so there is no right "
                    "mean. Pass weight= on all ranks, or on none"
                )
        else:
            # Reading it here would stop the host. Ranks that mix are found in the first window, which is read.
            self._total = self._message[0]


def _on(device: torch.device, numbers: tuple[float, ...]) -> torch.Tensor:
    message = torch.tensor(numbers, dtype=torch.float64)
    return message if device.type == "cpu" else message.pin_memory().to(device, non_blocking=True)


def checked_weight(weight: Any) -> float:
    """The weight as a number, refused unless it can be one."""
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"a weight must be a number, such as the tokens the loss is the mean of, got {weight!r}"
        ) from error
    if not math.isfinite(number) or number <= 0:
        raise ConfigurationError(
            f"a weight must be finite and greater than 0, got {number}. A micro-batch with nothing in it needs no "
            "backward: skip it"
        )
    return number
