"""Error feedback: what compression loses of a gradient is added to the next one, so that nothing is lost for good."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.base.errors import ConfigurationError, MisuseError
from gradsync.communicator import Communicator, Handle
from gradsync.core.bucket import Bucket, BucketLayout
from gradsync.core.bucket.layout import ParameterSpec
from gradsync.core.reduction.base import Compressing, Reduction, sends_nothing, wide_values

__all__ = ["ErrorFeedback"]


@dataclass(kw_only=True)
class _Sent:
    """A bucket of the running window that was sent.

    It has what this rank has lost, the slots for which it has no gradient, and whether the mean is finite, once it is
    there.
    """

    bucket: Bucket
    lost: torch.Tensor
    empty: frozenset[int]
    finite: torch.Tensor | None = None

    def held_back(
        self, before: Mapping[str, torch.Tensor], correction: float | torch.Tensor, decay: float
    ) -> dict[str, torch.Tensor]:
        """The residuals to add next time, by parameter name; those of ``before`` were added times ``decay``.

        The mean was multiplied by ``correction``, and so was its part of the residuals, which should not have been.
        """
        is_right = isinstance(correction, float) and correction == 1.0
        if not is_right:
            self.lost.mul_(correction)
        held = {}
        for slot, (spec, part) in enumerate(zip(self.bucket.specs, self.bucket.views_of(self.lost), strict=True)):
            held[spec.name] = part
            if slot in self.bucket.unused:
                # No rank has a gradient: the result was thrown away.
                part.zero_()
            if spec.name in before and (slot in self.empty or not is_right):
                kept = before[spec.name].to(part.device)
                # What was held back before has not been sent, or not all of it.
                part.add_(kept if slot in self.empty else kept * (1.0 - correction) * decay)
        return held


class ErrorFeedback(Reduction):
    """Adds a memory to ``inner``: after any number of windows, what was applied and what ranks still hold back add up
    to the sum of all means.

    Residuals belong to parameters, so they survive a rebuild of the buckets, and to this rank: a checkpoint holds one
    per rank. On a different number of ranks they start from scratch. A window that fails, or whose mean is not finite
    so that no rank steps on it, leaves them unchanged.

    With a ``decay`` below 1, residuals are multiplied by it whenever they are added: what could not be sent for long is
    gradually forgotten, since parameters have moved on. Then what has been forgotten is part of that sum, too.
    """

    carries_tail = False

    def __init__(self, inner: Compressing, *, decay: float = 1.0) -> None:
        if not isinstance(inner, Compressing):
            raise ConfigurationError(
                "ErrorFeedback makes up for what a compression loses, as Quantize, Sign, LowRank or TopK do; got "
                f"{inner!r}"
            )
        if not 0.0 < decay <= 1.0:
            raise ConfigurationError(
                "decay is what residuals are multiplied by in each window, above 0 and at most 1, which forgets "
                f"nothing; got {decay!r}"
            )
        self.inner, self.decay = inner, float(decay)
        self._residuals: dict[str, torch.Tensor] = {}
        self._sent: list[_Sent] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._owners = _Owners()
        self._memory = _Memory()

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.inner!r}" + (")" if self.decay == 1.0 else f", decay={self.decay!r})")

    @property
    def keeps_layout(self) -> bool:
        return self.inner.keeps_layout

    def unit(self, ranks: int) -> int:
        return self.inner.unit(ranks)

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        self.inner.examine(specs)
        self._shapes = {spec.name: spec.shape for spec in specs}

    def prescale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return self.inner.prescale(bucket, communicator, divisor)

    @torch.no_grad()
    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        if sends_nothing(bucket, communicator):
            return self.inner.start(bucket, communicator, divisor)
        self._owners.check(bucket)
        values, put_back = wide_values(bucket)
        # Where no rank has a gradient the mean is thrown away, and a rank without one cannot know that.
        empty = frozenset(bucket.empty)
        self._add_residuals(bucket, values, empty)
        sent = _Sent(bucket=bucket, lost=self._memory.take(bucket, values), empty=empty)
        self._sent.append(sent)

        def look() -> None:
            # Now, because clipping or unscaling may change the mean later. The extremes show it, which is many times as
            # fast on a CPU as checking each number.
            sent.finite = torch.stack(torch.aminmax(values)).isfinite().all()
            if put_back is not None:
                put_back()

        return self.inner.send(values, bucket, communicator, sent.lost).then(look)

    def _add_residuals(self, bucket: Bucket, values: torch.Tensor, empty: frozenset[int]) -> None:
        whole = self._memory.held(bucket)
        if whole is not None and whole.shape == values.shape and not empty:
            values.add_(whole, alpha=self.decay)
            return
        named = zip(bucket.specs, bucket.views_of(values), strict=True)
        held = [
            (view, self._residuals[spec.name].to(view))
            for slot, (spec, view) in enumerate(named)
            if slot not in empty and spec.name in self._residuals
        ]
        if held:
            torch._foreach_add_([view for view, _ in held], [residual for _, residual in held], alpha=self.decay)

    @torch.no_grad()
    def window_ended(self, *, succeeded: bool, correction: float | torch.Tensor = 1.0) -> None:
        sent, self._sent = self._sent, []
        keeps = succeeded and all(each.finite is not None and bool(each.finite) for each in sent)
        for each in sent:
            if keeps:
                self._residuals |= each.held_back(self._residuals, correction, self.decay)
            self._memory.give(each.bucket, each.lost, kept=keeps)
        self.inner.window_ended(succeeded=succeeded, correction=correction)

    @torch.no_grad()
    def rescaled(self, factor: float | torch.Tensor) -> None:
        for residual in self._residuals.values():
            residual.mul_(factor)
        self.inner.rescaled(factor)

    def rebuilt(self, layout: BucketLayout) -> None:
        self._memory = _Memory()
        self.inner.rebuilt(layout)

    def state_dict(self) -> dict[str, Any]:
        residuals = {name: residual.clone() for name, residual in self._residuals.items()}
        return {"residuals": residuals, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        residuals = dict(state.get("residuals", {}))
        for name, residual in residuals.items():
            expected = self._shapes.get(name, residual.shape)
            if tuple(residual.shape) != tuple(expected):
                raise ConfigurationError(
                    f"the saved state holds back a gradient of shape {tuple(residual.shape)} for {name!r}, whose shape "
                    f"is {tuple(expected)} here. Load the state of this model, or do without it"
                )
        self._residuals, self._sent, self._memory = residuals, [], _Memory()
        self.inner.load_state_dict(state.get("inner", {}))


class _Memory:
    """Recycles the memory of residuals.

    That of a bucket's old ones is freed when the new ones have come, and is then used for the next bucket. On a CPU,
    getting new memory takes longer than most of what is computed in it.
    """

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}
        self._spare: dict[int, torch.Tensor] = {}

    def take(self, bucket: Bucket, like: torch.Tensor) -> torch.Tensor:
        spare = self._spare.pop(bucket.index, None)
        # The gaps between gradients are empty, and nothing writes there.
        return torch.zeros_like(like) if spare is None or spare.shape != like.shape else spare

    def held(self, bucket: Bucket) -> torch.Tensor | None:
        """The old residuals of this bucket, if they all lie in one piece of memory, as the bucket does."""
        return self._held.get(bucket.index)

    def give(self, bucket: Bucket, memory: torch.Tensor, *, kept: bool) -> None:
        """Give back the one piece of memory that held the bucket's old residuals; it is free if this is ``kept``."""
        if not memory.is_cpu:
            return
        free: torch.Tensor | None = memory
        if kept:
            free, self._held[bucket.index] = self._held.get(bucket.index), memory
        if free is not None:
            self._spare[bucket.index] = free


class _Owners:
    """The models whose gradients are held back.

    Another model may take over, but two may not alternate: their parameters are told apart by name only, and one would
    get what was held back from the other.
    """

    def __init__(self) -> None:
        self._now: dict[str, weakref.ref[torch.nn.Parameter]] = {}
        self._before: dict[str, weakref.ref[torch.nn.Parameter]] = {}

    def check(self, bucket: Bucket) -> None:
        for spec, parameter in zip(bucket.specs, bucket.parameters, strict=True):
            now, before = self._now.get(spec.name), self._before.get(spec.name)
            if now is not None and now() is parameter:
                continue
            if before is not None and before() is parameter:
                raise MisuseError(
                    f"two models take turns with one ErrorFeedback, which cannot tell the parameters {spec.name!r} of "
                    "one and the other apart. Give each model an object of its own"
                )
            if now is not None:
                self._before[spec.name] = now
            self._now[spec.name] = weakref.ref(parameter)
