"""Finds the host whose link is slow, from the measurements of all ranks. Pure logic."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from gradsync.health.watch.links import Sent

__all__ = ["SlowLink", "find_slow_link"]

# Less says nothing of a link: some packets, which wait for nobody.
LEAST_BYTES = 128 * 1024
# The kernel counts whole ticks of its clock.
LEAST_SECONDS = 1e-3
# Slow are those that no quick one is near to.
TIMES_SLOWER = 2.0


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A slow link from one host to another; ``target`` is empty if all links of a host are slow.

    Speeds are in bytes a second; ``others`` is the speed of the slowest of the other links.
    """

    source: str
    target: str
    rate: float
    others: float


def find_slow_link(sent: Iterable[Sent], hosts: Mapping[str, str]) -> SlowLink | None:
    """``hosts`` are names by addresses. None where all are about as fast, or neither a host nor a link explains it."""
    rates = _rates(sent, hosts)
    ordered = sorted(rates.values())
    gaps = [(quick / slow, slow, quick) for slow, quick in pairwise(ordered)]
    gap, rate, others = max(gaps, default=(0.0, 0.0, 0.0))
    if gap < TIMES_SLOWER:
        return None
    slow = {link for link, each in rates.items() if each <= rate}
    if len(slow) == 1:
        ((source, target),) = slow
        return SlowLink(source=source, target=target, rate=rate, others=others)
    # A host's link is in all that are slow, and in none that is not.
    guilty = [
        host for host in {host for link in slow for host in link} if {link for link in rates if host in link} == slow
    ]
    return SlowLink(source=guilty[0], target="", rate=rate, others=others) if len(guilty) == 1 else None


def _rates(sent: Iterable[Sent], hosts: Mapping[str, str]) -> dict[tuple[str, str], float]:
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for each in sent:
        link = hosts.get(each.source, each.source), hosts.get(each.target, each.target)
        size, seconds = sums.get(link, (0, 0.0))
        sums[link] = size + each.size, seconds + each.seconds
    return {
        link: size / max(seconds, LEAST_SECONDS)
        for link, (size, seconds) in sums.items()
        if size >= LEAST_BYTES and link[0] != link[1]
    }
