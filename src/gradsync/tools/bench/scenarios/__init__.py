"""The scenarios, in the order in which they are run and shown."""

from gradsync.base.errors import ConfigurationError
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.bench.scenarios.accumulation import AccumulationScenario, SkipSync
from gradsync.tools.bench.scenarios.buckets import BucketSize, RoundRobin
from gradsync.tools.bench.scenarios.communicators import Communicators
from gradsync.tools.bench.scenarios.compression import Compression
from gradsync.tools.bench.scenarios.convergence import Convergence
from gradsync.tools.bench.scenarios.faults import Faults
from gradsync.tools.bench.scenarios.overlap import NextForward, Overlap
from gradsync.tools.bench.scenarios.peers import Peers
from gradsync.tools.bench.scenarios.scaling import Scaling
from gradsync.tools.bench.scenarios.time_to_loss import Far, TimeToLoss

__all__ = ["SCENARIOS", "find_scenarios"]

SCENARIOS: tuple[Scenario, ...] = (
    AccumulationScenario(),
    Overlap(),
    NextForward(),
    Compression(),
    TimeToLoss(),
    Far(),
    BucketSize(),
    SkipSync(),
    Scaling(),
    Convergence(),
    RoundRobin(),
    Communicators(),
    Peers(),
    Faults(),
)


def find_scenarios(name: str) -> tuple[Scenario, ...]:
    """The one of that name, or all of them."""
    found = tuple(scenario for scenario in SCENARIOS if name in (scenario.name, "all"))
    if not found:
        names = ", ".join(scenario.name for scenario in SCENARIOS)
        raise ConfigurationError(f"there is no scenario {name!r}. There are: {names}; or say all")
    return found
