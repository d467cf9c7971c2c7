"""How gradients are synchronized: ``SyncPolicy``, which wrappers pass on, and the options of a synchronizer."""

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

import torch

from gradsync.base.errors import ConfigurationError
from gradsync.communicator import Communicator
from gradsync.core.bucket import BucketCaps
from gradsync.core.bucket.sizes import BucketTuner
from gradsync.core.engine.observer import Observer, Observers
from gradsync.core.reduction import Mean, Reduction, reduction_by_name
from gradsync.core.window.replica_check import ReplicaCheck
from gradsync.core.window.skip_vote import ON_BAD_STEP, OnBadStep

__all__ = ["BucketSize", "ParameterSwapper", "PolicySettings", "Schedule", "SyncPolicy", "SynchronizerOptions"]


class ParameterSwapper(Protocol):
    """Swaps parameter values for the duration of a forward and backward, and restores them."""

    def resume(self) -> None:
        """Bring back the values for a backward that begins; an earlier one may have ended since its forward."""

    def release(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Let go of parameters that take no further part in the backward; their gradients are about to be gathered."""

    def release_all(self) -> None:
        """Let go of all parameters: the backward has ended."""

    def value_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The parameter's value outside of forwards and backwards, which the optimizer updates."""


Schedule = Literal["overlapped", "bucketed", "naive"]
BucketSize = float | Sequence[float] | Literal["auto"] | None

_SCHEDULES = ("overlapped", "bucketed", "naive")


class PolicySettings(TypedDict, total=False):
    """The fields of a :class:`SyncPolicy` as keyword arguments of a wrapper."""

    reduction: Reduction | str | None
    schedule: Schedule
    observer: Observer | None
    accumulation_dtype: torch.dtype | None
    on_bad_step: OnBadStep | None
    replica_check: ReplicaCheck | None


@dataclass(frozen=True, kw_only=True)
class SyncPolicy:
    """How gradients are synchronized; the same settings for all wrappers.

    reduction
        what ranks send; :class:`~gradsync.core.reduction.Mean` by default. It may be given by name, as ``"int8"``.
    schedule
        ``"overlapped"`` (buckets start during backward), ``"bucketed"`` (after it), ``"naive"`` (one collective per
        parameter, after it).
    bucket_cap_mb
        a size in MiB, sizes for the first buckets, or ``"auto"``: computed from the measured speed of the group.
    observer
        is notified at every stage of a gradient's path; see :class:`~gradsync.Timeline`.
    accumulation_dtype
        the dtype in which gradients of bfloat16 and float16 parameters are added up and averaged: ``torch.float32``
        loses nothing.
    on_bad_step
        what all ranks do when the gradients of one are not finite, its backward fails, or it abstains: ``"raise"``,
        ``"skip"`` or ``"drop-rank"``; see docs/failures.md. By default gradients are not checked, a failed
        backward raises on all ranks, and a window is skipped if a rank abstains from it.
    replica_check
        whether and how often replicas compare their parameters: ``ReplicaCheck(every=100)``.
    """

    reduction: Reduction = field(default_factory=Mean)
    schedule: Schedule = "overlapped"
    bucket_cap_mb: BucketSize = "auto"
    observer: Observer | None = None
    accumulation_dtype: torch.dtype | None = None
    on_bad_step: OnBadStep | None = None
    replica_check: ReplicaCheck | None = None

    def __post_init__(self) -> None:
        if self.accumulation_dtype not in (None, torch.float32, torch.float64):
            raise ConfigurationError(
                "accumulation_dtype must be torch.float32, torch.float64 or None (the parameters' own), got "
                f"{self.accumulation_dtype!r}"
            )
        if self.schedule not in _SCHEDULES:
            raise ConfigurationError(f"schedule must be one of {', '.join(_SCHEDULES)}, got {self.schedule!r}")
        if self.on_bad_step not in (None, *ON_BAD_STEP):
            raise ConfigurationError(
                f"on_bad_step must be one of {', '.join(ON_BAD_STEP)}, or None, got {self.on_bad_step!r}"
            )
        if not isinstance(self.replica_check, ReplicaCheck | None):
            raise ConfigurationError(f"replica_check must be ReplicaCheck(every=…) or None, got {self.replica_check!r}")
        if isinstance(self.reduction, str):
            object.__setattr__(self, "reduction", reduction_by_name(self.reduction))
        if not isinstance(self.reduction, Reduction):
            raise ConfigurationError(
                f"reduction must be a Reduction such as gradsync.core.reduction.Mean(), got {self.reduction!r}"
            )
        if self.sizes == ():
            raise ConfigurationError(
                f"bucket_cap_mb must hold at least one size in MiB, got {self.bucket_cap_mb!r}. Leave it out to have "
                "it chosen by the measured speed of the group"
            )
        for size in self.sizes or ():
            if not isinstance(size, int | float) or not math.isfinite(size) or size <= 0:
                raise ConfigurationError(
                    f"a bucket size must be a positive number of MiB, got {size!r}. Leave bucket_cap_mb out to have "
                    "it chosen by the measured speed of the group"
                )

    @classmethod
    def chosen(
        cls,
        policy: "SyncPolicy | None",
        settings: PolicySettings,
        *,
        wrapper: str,
        bucket_cap_mb: BucketSize = None,
        default: Reduction | None = None,
    ) -> "SyncPolicy":
        """The policy that was passed, or one made from the wrapper's keyword arguments; not both.

        ``wrapper`` is what the user called, and ``default`` its reduction where none is given.
        """
        unknown = [name for name in settings if name not in PolicySettings.__annotations__]
        if unknown:
            # Python's own message for an unexpected keyword argument.
            known = [*PolicySettings.__annotations__, "policy", "bucket_cap_mb"]
            close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{wrapper}() got an unexpected keyword argument {unknown[0]!r}{hint}")
        if policy is not None and settings:
            raise ConfigurationError(f"pass policy or {' and '.join(settings)}, not both")
        if policy is None:
            given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
            policy = cls(**({"reduction": default} if default is not None else {}) | given)
        if bucket_cap_mb is None or bucket_cap_mb == "auto":
            return policy
        if policy.sizes is not None:
            raise ConfigurationError("pass bucket_cap_mb as an argument or in the policy, not both")
        return dataclasses.replace(policy, bucket_cap_mb=bucket_cap_mb)

    @property
    def sizes(self) -> tuple[float, ...] | None:
        """The sizes that were chosen, in MiB."""
        chosen: Any = self.bucket_cap_mb
        if chosen is None or chosen == "auto":
            return None
        return tuple(chosen) if isinstance(chosen, list | tuple) else (chosen,)

    def described(self) -> list[tuple[str, Any]]:
        """The settings that must be the same on all ranks."""
        return [
            ("setting bucket_cap_mb", "auto" if self.sizes is None else list(self.sizes)),
            ("setting schedule", self.schedule),
            ("setting reduction", repr(self.reduction)),
            ("setting accumulation_dtype", str(self.accumulation_dtype)),
            ("setting on_bad_step", str(self.on_bad_step)),
            ("setting replica_check", str(self.replica_check)),
        ]


@dataclass(frozen=True, kw_only=True)
class SynchronizerOptions:
    """The options of one synchronizer: its policy, and what its wrapper adds.

    ``caps`` are the initial bucket sizes, which ``tuner`` may change in the first windows. ``droppable`` means that
    modules announce parameters as absent. ``recorder`` observes in addition to the policy's observer.
    """

    communicator: Communicator
    caps: BucketCaps
    policy: SyncPolicy = field(default_factory=SyncPolicy)
    swapper: ParameterSwapper | None = None
    droppable: bool = False
    tuner: BucketTuner | None = None
    recorder: Observer | None = None

    def watchers(self) -> Observers | None:
        """The observers to notify, if there are any."""
        watching = [each for each in (self.policy.observer, self.recorder, self.tuner) if each is not None]
        return Observers(*watching) if watching else None
