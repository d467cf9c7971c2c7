"""Micro-batch weights, and the divisor of the mean over a window.

Every micro-batch has a weight, the number of items (samples, tokens) its loss is the mean of. The gradient of a window
is ``Σ w·∇loss / Σ w`` over all micro-batches of all ranks::

    rank 0   ┃ w·∇ ┃ w·∇ ┃ w·∇ ┃──┐
    rank 1   ┃ w·∇ ┃ w·∇ ┃────────┤ one reduction   ▶  Σ w·∇ / Σ w   ▶  optimizer.step()
    rank 2   ┃ (nothing)  ────────┘

[Note: what is not known] No rank knows ``Σ w`` over all ranks when its gradients reach the buckets. Waiting for it
would stop the backward of a fast rank until the slowest has begun its last one. So the buckets are divided by the sum
of the previous window, which is the same number in most training runs, and corrected at the end where it was not. The
true sum is sent meanwhile, as a few float64 numbers ahead of the first bucket. Only the first window waits for it.

[Note: who counts] A rank without a backward cannot know whether the others count, and no rank may start a collective
that another does not. So sums are sent ahead of the buckets where the ranks counted in the previous window, and in the
very first window, about which nothing is known. In other windows nothing is sent, and a rank that counts anyway reports
this in the control flags: its gradients are sent in units of one, and the sums follow the buckets.

Alternative considered: a place for the weight in the tail of a bucket. A tail has the dtype of its bucket, and bfloat16
cannot tell 4096 tokens from 4100.

[Note: units] Gradients of weighted losses are computed as ``w / unit`` times the gradient of the loss, where the unit
is about a rank's weight in one window: what is in ``.grad`` then has the usual size of gradients, which float16
needs. Without weights every micro-batch weighs 1. ``loss.backward()`` cannot be changed, so its unit is 1; that of
``accelerator.backward(loss)`` is the length of a full window. Then gradients are divided before they are added, as in
Accelerate, and have the same bits as there.
"""

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket.control_flags import HostCopy, reads_at_once

__all__ = ["Counting", "Weights", "checked_weight"]


class Counting(enum.Enum):
    """What is known about a window's weights."""

    NOTHING = "nothing is counted"
    COUNTING = "micro-batches are counted"
    AGREED = "the sum over all ranks is known"


@dataclass(kw_only=True)
class _Tally:
    """The counts of this rank in a window. ``framed``: in a block of accumulate()."""

    unit: float | None = None
    sum: float = 0.0
    plain: int = 0
    weighted: int = 0
    backwards: int = 0
    framed: bool = False


class Weights:
    """The weights of the micro-batches in the window of one synchronizer."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # Σ w over all ranks, as expected before it is known. See [Note: what is not known].
        self.expected: float | None = None
        # ``in_block``: inside a block of accumulate(), which counts once if its backwards have no weights.
        # ``deferred``: the block synchronizes before the window ends; the end divides these plain means by the weights.
        self.in_block = self.deferred = self._block_counted = False
        # The same on all ranks; None before the first window. See [Note: who counts].
        self._last_window_counted: bool | None = None
        self._pending: Handle | None = None
        # The message of the previous window, on an accelerator.
        self._unread: HostCopy | None = None
        self._forget_sums()
        self.reset()

    def reset(self) -> None:
        """Begin a new window.

        What has been sent stays sent: a rank that gives up its part of a window has still told the others about it.
        """
        # Whether the window's gradients are means, by the sum that ranks have agreed on. That sum stays known until
        # the further backward that is about to run has undone the mean.
        self.synchronized = False
        self._tally = _Tally()
        self._block_counted = self._takes_back = False

    def _forget_sums(self) -> None:
        self._message: torch.Tensor | None = None
        self._sent = 0.0
        # Σ w over all ranks, where it is known.
        self._total: float | torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of an unfinished window, and what all ranks expect of the next, as plain values."""
        return dataclasses.asdict(self._tally) | {
            "expected": self.expected,
            "last_window_counted": self._last_window_counted,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        self._tally = _Tally(
            **{field.name: state.get(field.name, field.default) for field in dataclasses.fields(_Tally)}
        )
        self.expected, self._last_window_counted = state["expected"], state["last_window_counted"]

    def __repr__(self) -> str:
        tally = self._tally
        counted = f"{tally.weighted + tally.plain} micro-batches, {tally.sum:g} in all on this rank"
        return f"Weights({self.phase.value}: {counted}; {self.expected} expected over all ranks)"

    @property
    def counting(self) -> bool:
        """Whether this rank has counted a micro-batch."""
        return self._tally.plain + self._tally.weighted > 0

    @property
    def backwards(self) -> int:
        """The number of backwards of this rank in the window."""
        return self._tally.backwards

    @property
    def phase(self) -> Counting:
        if self.synchronized:
            return Counting.AGREED
        return Counting.COUNTING if self.counting else Counting.NOTHING

    @property
    def total(self) -> float:
        """The sum over all ranks in the window that was just synchronized; 0 where none counted."""
        return 0.0 if self._total is None else float(self._total)

    # -- counting ----------------------------------------------------------------------------------------------

    def enter_block(self, *, deferred: bool) -> None:
        """Note that a micro-batch of accumulate() begins."""
        self.in_block, self.deferred, self._block_counted = True, deferred, False
        self._tally.framed = True

    def leave_block(self, *, last: bool) -> None:
        self.in_block = self.deferred = False
        if last:
            self.reset()

    def add(self, weight: float, unit: float | None = None) -> float:
        """Count a weighted micro-batch; returns the unit of its gradient. See [Note: units].

        Several models that share a loss must share the unit: ``unit`` is that of the first.
        """
        tally = self._tally
        if tally.plain:
            self._refuse_mixture("this one")
        tally.backwards += 1
        tally.weighted += 1
        tally.sum += weight
        if unit is not None:
            tally.unit = unit
        elif tally.unit is None and self.expected is not None:
            tally.unit = self.expected / self._communicator.world_size
        elif tally.unit is None:
            # Means in the middle of a window mix gradients of several ranks, so these must be in the same unit.
            tally.unit = 1.0 if self.deferred else weight
        self._takes_back = False
        return tally.unit

    def add_plain(self, *, announced: bool = False, unit: float | None = None) -> float:
        """Count a backward without a weight: inside accumulate() the block counts as one micro-batch.

        Returns the unit of its gradient, used if the backward was announced: that of the window's earlier ones, or
        ``unit``.
        """
        tally = self._tally
        if tally.weighted:
            self._refuse_mixture("an earlier one")
        if not (self.in_block or tally.plain or announced):
            return 1.0
        if not announced and tally.plain and tally.unit != 1.0:
            raise MisuseError(
                "some backwards of this window ran as accelerator.backward(loss), which divides the gradient by "
                f"{tally.unit:g}, and this one as loss.backward(), which does not: it would count {tally.unit:g} times "
                "as much. Run all backwards of a window as accelerator.backward(loss)"
            )
        if tally.framed and not self.in_block and not announced:
            raise MisuseError(
                "a backward outside accumulate() has reached a model in the middle of its window, and would be counted "
                "into it. If it is another model's loss, freeze this one meanwhile with requires_grad_(False)"
            )
        if not tally.plain or tally.unit is None:
            # Means in the middle of a window mix gradients of several ranks, even of ranks whose backward has no unit.
            tally.unit = 1.0 if unit is None or self.deferred else unit
        tally.backwards += 1
        self._takes_back = not (self.in_block and self._block_counted)
        if self._takes_back:
            self._block_counted = True
            tally.plain += 1
            tally.sum += 1.0
        return tally.unit

    def take_back_plain(self) -> None:
        """Take back the count of a backward that has reached no parameter, like ``autograd.grad``.

        The block is still to be counted.
        """
        if not self._takes_back:
            return
        self._takes_back = self._block_counted = False
        self._tally.plain -= 1
        self._tally.sum -= 1.0
        self._tally.backwards -= 1
        self.synchronized = self.synchronized and self.counting

    def _refuse_mixture(self, which: str) -> None:
        raise MisuseError(
            f"some backwards of this window have a weight and some have none ({which} has one), so there is no right "
            "mean. Pass weight= to every backward of a window, or to none"
        )

    # -- agreement ---------------------------------------------------------------------------------------------

    def start_sum(self, *, uncounted: bool) -> None:
        """Start sending this rank's sum before the first bucket starts, where all ranks do. See [Note: who counts].

        ``uncounted``: this rank has gradients in the window that no backward of it has counted.
        """
        self._forget_sums()
        if self._unread is not None:
            unread, self._unread = self._unread, None
            _refuse_mixed_ranks(*unread.wait()[1:], late=True)
        if self.deferred or self._last_window_counted is False:
            return
        self._send(uncounted=uncounted)
        if self._last_window_counted is None or self.expected is None:
            total = self._read()
            self._last_window_counted = total > 0
            # Where no rank counted inside accumulate() any number will do, except zero.
            self.expected = total if total > 0 else self.expected

    @property
    def unannounced(self) -> bool:
        """Whether this rank counts, but no sums were sent before the buckets: they must follow these."""
        return self._message is None and not self.deferred and (self.counting or self.synchronized or self.in_block)

    def divisor(self, plain: float) -> float:
        """The divisor of the reduction, the same on all ranks: ``plain``, as without weights, if no rank counts."""
        known_to_be_plain = self._message is None or self._total == 0.0
        return plain if known_to_be_plain else float(self._communicator.world_size)

    @property
    def local_scale(self) -> float:
        """The factor that converts gradients in units into their share of the expected mean, times the ranks."""
        unit = self._tally.unit
        if unit is None or self.deferred:
            return 1.0
        if self._message is None or self.expected is None:
            return unit
        scale = unit * self._communicator.world_size / self.expected
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-15) else scale

    def require_announced(self) -> None:
        """Raise if the others were told a different sum, before the control flags are sent, which report failures."""
        if self._message is not None and self._tally.sum != self._sent:
            raise MisuseError(
                f"this rank has counted {self._tally.sum:g} in the window, but told the others {self._sent:g}: a "
                "backward that reaches no parameter of the model came before the one with a weight. Run it after, or "
                "under no_sync()"
            )

    def finish_sum(self, plain: float) -> float | torch.Tensor | None:
        """The factor that corrects means computed with the expected sum; None where it was right.

        ``plain`` is the correct divisor if it turns out that no rank counts.
        """
        if self._message is None:
            return None
        if reads_at_once(self._message.device):
            self._read()
        elif self._total is None:
            # Reading it would make the host wait. Ranks that count differently are detected in the next window.
            self._wait()
            self._total = self._message[0]
            self._unread = HostCopy(self._message)
        self._note_agreed()
        world_size = float(self._communicator.world_size)
        expected = world_size if self.expected is None else self.expected
        if isinstance(self._total, torch.Tensor):
            return torch.where(self._total > 0, expected / self._total, world_size / plain)
        if not self._total:
            return None if self.divisor(plain) == plain else world_size / plain
        return None if self._total == expected else expected / self._total

    def sum_after_buckets(self, divisor: float, *, uncounted: bool) -> float | None:
        """Exchange the sums now: the buckets were sent as if no rank counted, but one did. Collective.

        Returns the factor that corrects the means, which were divided by ``divisor``.
        """
        self._send(uncounted=uncounted)
        total = self._read()
        self._note_agreed()
        return None if total in (0.0, divisor) else divisor / total

    def _note_agreed(self) -> None:
        self.synchronized = self.synchronized or self.counting or self.in_block

    def expect_same_total(self) -> None:
        """Use the window's sum for the next one, where all ranks know it: the window succeeded on all of them."""
        if isinstance(self._total, float):
            self._last_window_counted = self._total > 0
            self.expected = self._total if self._total > 0 else self.expected

    def undo_mean(self) -> float | torch.Tensor | None:
        """The factor that converts this window's mean back into a share of the sum, so a backward may add to it."""
        self.synchronized = False
        if self._tally.unit is None:
            self._tally.unit = 1.0
        total = 0.0 if self._total is None else self._total
        factor = total / (self._communicator.world_size * self._tally.unit)
        return None if not isinstance(factor, torch.Tensor) and factor in (0.0, 1.0) else factor

    def _send(self, *, uncounted: bool) -> None:
        tally = self._tally
        kinds = (tally.weighted > 0, tally.plain > 0, uncounted)
        message, device = (
            torch.tensor([tally.sum, *kinds], dtype=torch.float64, device="cpu"),
            self._communicator.device,
        )
        self._message = message if device.type == "cpu" else message.pin_memory().to(device, non_blocking=True)
        self._pending = self._communicator.all_reduce(self._message)
        self._sent = tally.sum
        self._total = None

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _read(self) -> float:
        """Wait for the sum over all ranks, and for the device; returns it."""
        assert self._message is not None
        self._wait()
        total, weighted, plain, uncounted = self._message.tolist()
        self._total = float(total)
        _refuse_mixed_ranks(weighted, plain, uncounted)
        return self._total


def _refuse_mixed_ranks(weighted: float, plain: float, uncounted: float, *, late: bool = False) -> None:
    """Raise if ranks count in different ways. ``late``: they did so in the previous window, which is known only now."""
    window = "the window before, whose gradients an optimizer may have used since," if late else "this window"
    if weighted and (plain or uncounted):
        raise MisuseError(
            f"some ranks gave weights to the backwards of {window} and some did not, or ran one first that reaches no "
            "parameter, so there is no right mean. Pass weight= on all ranks, or on none"
        )
    if plain and uncounted:
        raise MisuseError(
            f"some ranks ran the backwards of {window} inside accumulate() or through model.backward(), which count "
            "them, and some did not, so there is no right mean. Frame the micro-batches on all ranks, or on none"
        )


def checked_weight(weight: Any) -> float:
    """The weight as a number; refuse values that cannot be one."""
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
