"""Where ranks are, and which links connect them."""

import math
from dataclasses import dataclass

from gradsync.base.errors import ConfigurationError

__all__ = ["Link", "Topology"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A message of n bytes takes ``latency + n / bandwidth`` seconds, in both directions at the same time.

    ``burst`` bytes pass at once after a pause, and are saved up again at the rate of the bandwidth: what links that are
    shaped by a token bucket do, in a lab as at those who rent out machines.
    """

    latency: float
    bandwidth: float
    burst: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.latency >= 0 and math.isfinite(self.latency) and self.burst >= 0):
            raise ConfigurationError(
                "a link has a bandwidth above 0 bytes a second, and a latency and a burst of 0 or more; got "
                f"bandwidth={self.bandwidth}, latency={self.latency}, burst={self.burst}"
            )


@dataclass(frozen=True, kw_only=True)
class Topology:
    """``ranks`` on hosts of ``ranks_per_host``. A host has one link ``between`` it and the others, or as fast a share
    of several; its ranks are joined by ``inside``, or by the same link if there is none.

    Where there are more than ``hosts_per_switch``, what leaves a switch has an ``oversubscription``-th of what its
    hosts could send.
    """

    ranks: int
    between: Link
    inside: Link | None = None
    ranks_per_host: int = 1
    oversubscription: float = 1.0
    hosts_per_switch: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_host < 1 or not self.oversubscription >= 1:
            raise ConfigurationError(
                "a topology has at least one rank, one rank a host, and an oversubscription of 1 or more; got "
                f"ranks={self.ranks}, ranks_per_host={self.ranks_per_host}, oversubscription={self.oversubscription}"
            )
        if self.hosts_per_switch is not None and self.hosts_per_switch < 1:
            raise ConfigurationError(f"a switch joins at least one host, got hosts_per_switch={self.hosts_per_switch}")

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    @property
    def local(self) -> int:
        """Ranks of a full host."""
        return min(self.ranks, self.ranks_per_host)

    def shared_bandwidth(self, crossing: float) -> float:
        """Of one host's link, where all hosts send at once and ``crossing`` of it goes to other switches."""
        if self.hosts_per_switch is None or self.hosts <= self.hosts_per_switch:
            return self.between.bandwidth
        return self.between.bandwidth / max(1.0, self.oversubscription * crossing)

    @property
    def crossing_of_neighbours(self) -> float:
        """Of what hosts send to the next one in a ring: one in a switch sends to another switch."""
        return 1.0 / (self.hosts_per_switch or self.hosts)

    @property
    def crossing_of_all(self) -> float:
        """Of what hosts send to all others alike."""
        if self.hosts == 1 or self.hosts_per_switch is None:
            return 0.0
        return max(0, self.hosts - self.hosts_per_switch) / (self.hosts - 1)
