"""What a compressed gradient has lost is added to the next one, so that nothing is lost for good."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsync.bucket import Bucket, BucketLayout
from gradsync.bucket.layout import ParameterSpec
from gradsync.communicator import Communicator, Handle
from gradsync.errors import ConfigurationError
from gradsync.reduction.base import Reduction
from gradsync.reduction.compressing import Compressing, wide_values

__all__ = ["ErrorFeedback"]


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A bucket of the running window: its mean, what this rank has lost, and the slots for which it has no gradient."""

    bucket: Bucket
    mean: torch.Tensor
    lost: torch.Tensor
    empty: frozenset[int]

    def held_back(self, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By name, what is to be added next time."""
        parts = self.bucket.views_of(self.lost)
        names = [spec.name for spec in self.bucket.specs]
        flags = self.bucket.flags.tolist() if self.empty else []
        for slot in self.empty:
            # What was held back before has not gone.
            if flags[slot] <= 0:
                parts[slot].zero_()
            if names[slot] in before:
                parts[slot].add_(before[names[slot]].to(parts[slot].device))
        return dict(zip(names, parts, strict=True))


class ErrorFeedback(Reduction):
    """``inner``, with a memory: after any number of windows, what was applied and what ranks still hold back add up to
    the sum of all means.

    What is held back belongs to parameters, so it survives other buckets, and to this rank: a checkpoint holds one for
    each. On another number of ranks it begins anew. A window that fails, or whose mean is not finite so that nobody
    takes a step with it, leaves it as it was.
    """

    carries_tail = False

    def __init__(self, inner: Compressing) -> None:
        if not isinstance(inner, Compressing):
            raise ConfigurationError(
                "ErrorFeedback makes up for what a compression loses, as Quantize, Sign, LowRank or TopK do; got "
                f"{inner!r}"
            )
        self.inner = inner
        self._residuals: dict[str, torch.Tensor] = {}
        self._sent: list[_Sent] = []

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.inner!r})"

    @property
    def keeps_layout(self) -> bool:
        return self.inner.keeps_layout

    def examine(self, specs: Sequence[ParameterSpec]) -> None:
        self.inner.examine(specs)

    def landing_scale(self, bucket: Bucket, communicator: Communicator, divisor: float) -> float:
        return self.inner.landing_scale(bucket, communicator, divisor)

    @torch.no_grad()
    def start(self, bucket: Bucket, communicator: Communicator, divisor: float) -> Handle:
        if communicator.world_size == 1:
            return self.inner.start(bucket, communicator, divisor)
        values, put_back = wide_values(bucket)
        # Where nobody has a gradient the mean is thrown away, and whoever has none here cannot know.
        empty = frozenset(bucket.empty)
        held = [
            (view, self._residuals[name]) for name, view in _present(bucket, values, empty) if name in self._residuals
        ]
        if held:
            torch._foreach_add_([view for view, _ in held], [residual.to(view.device) for view, residual in held])
        lost = torch.empty_like(values)
        self._sent.append(_Sent(bucket=bucket, mean=values, lost=lost, empty=empty))
        handle = self.inner.send(values, bucket, communicator, lost)
        return handle if put_back is None else handle.then(put_back)

    @torch.no_grad()
    def ended(self, *, well: bool) -> None:
        sent, self._sent = self._sent, []
        if well and all(bool(each.mean.isfinite().all()) for each in sent):
            for each in sent:
                self._residuals |= each.held_back(self._residuals)
        self.inner.ended(well=well)

    def rebuilt(self, layout: BucketLayout) -> None:
        self.inner.rebuilt(layout)

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": dict(self._residuals), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._residuals = dict(state.get("residuals", {}))
        self.inner.load_state_dict(state.get("inner", {}))


def _present(bucket: Bucket, values: torch.Tensor, empty: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients that this rank has, by name."""
    for slot, (spec, view) in enumerate(zip(bucket.specs, bucket.views_of(values), strict=True)):
        if slot not in empty:
            yield spec.name, view
