"""The options of a synchronizer, fixed when it is created."""

from dataclasses import dataclass, field

from gradsync.communicator import Communicator
from gradsync.core.bucket import BucketCaps
from gradsync.core.bucket.arrangement import BucketOptions
from gradsync.core.bucket.tuner import BucketTuner
from gradsync.core.engine.keeper import ParameterKeeper
from gradsync.core.engine.observer import Observer, Observers
from gradsync.core.engine.policy import SyncPolicy

__all__ = ["SynchronizerOptions"]


@dataclass(frozen=True, kw_only=True)
class SynchronizerOptions:
    """``caps`` are the initial bucket sizes, which ``tuner`` may change in the first windows. ``droppable`` means that
    modules announce parameters as absent. ``recorder`` observes in addition to the policy's observer."""

    communicator: Communicator
    caps: BucketCaps
    policy: SyncPolicy = field(default_factory=SyncPolicy)
    keeper: ParameterKeeper | None = None
    droppable: bool = False
    tuner: BucketTuner | None = None
    recorder: Observer | None = None

    def of_buckets(self) -> BucketOptions:
        """The options that buckets are built with."""
        return BucketOptions(
            communicator=self.communicator,
            caps=self.caps,
            tuner=self.tuner,
            before_gather=None if self.keeper is None else self.keeper.release,
        )

    def watchers(self) -> Observers | None:
        """The observers to notify, if there are any."""
        watching = [each for each in (self.policy.observer, self.recorder, self.tuner) if each is not None]
        return Observers(*watching) if watching else None
