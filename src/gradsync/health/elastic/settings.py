"""Settings of elastic training, in which ranks may be lost and new ones may join."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from gradsync.base.errors import ConfigurationError
from gradsync.health.elastic.membership import LighthouseMembership, Membership

__all__ = ["LIGHTHOUSE", "Elastic"]

# By this name torchft's own programs find their lighthouse, too.
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Settings for ``Accelerator(elastic=…)``: ranks may be lost, and new ones may join.

    ranks
        how many ranks there should be at the beginning; by default the number that the launcher started.
    min_ranks
        the fewest ranks that train; fewer wait for new ones.
    timeout
        seconds. A rank that does not join a collective for that long is dropped; it may come back as a new rank.
    look_every
        seconds between two checks for new ranks.
    patience
        seconds that the first ranks wait for all ``ranks`` before they begin without the rest.
    lighthouse
        the address of torchft's lighthouse, ``http://host:port``; by default the value of ``TORCHFT_LIGHTHOUSE``.
    """

    ranks: int | None = None
    min_ranks: int = 1
    timeout: float = 10.0
    look_every: float = 2.0
    patience: float = 60.0
    lighthouse: str | None = None
    # How to ask who takes part, where that is not torchft's lighthouse.
    join: "Callable[[Elastic], Membership]" = field(default=lambda settings: settings.join_lighthouse(), repr=False)

    def __post_init__(self) -> None:
        for name in ("min_ranks", "ranks"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"elastic: {name} must be a whole number of at least 1, got {value!r}")
        if self.ranks is not None and self.min_ranks > self.ranks:
            raise ConfigurationError(
                f"elastic: min_ranks is {self.min_ranks}, but there are to be only {self.ranks} ranks at the beginning"
            )
        for name in ("timeout", "look_every", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"elastic: {name} must be more than 0 seconds, got {getattr(self, name)!r}")

    def join_lighthouse(self) -> Membership:
        """Through the lighthouse that these settings, or the environment, name."""
        address = self.lighthouse or os.environ.get(LIGHTHOUSE)
        if not address:
            raise ConfigurationError(
                f"elastic ranks ask a lighthouse of torchft who takes part, and {LIGHTHOUSE} does not say where it is. "
                "Start the ranks with `gradsync train --elastic`, or start one (`torchft_lighthouse --min_replicas 1`) "
                f"and set {LIGHTHOUSE}=http://HOST:PORT for all of them"
            )
        return LighthouseMembership(address)
