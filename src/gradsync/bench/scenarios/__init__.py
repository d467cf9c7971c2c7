"""The scenarios, one a file, in the order in which they are run and shown."""

from gradsync.bench.scenario import Scenario
from gradsync.bench.scenarios.accumulation import Accumulation
from gradsync.bench.scenarios.bucket_size import BucketSize
from gradsync.bench.scenarios.compression import Compression
from gradsync.bench.scenarios.convergence import Convergence
from gradsync.bench.scenarios.faults import Faults
from gradsync.bench.scenarios.next_forward import NextForward
from gradsync.bench.scenarios.overlap import Overlap
from gradsync.bench.scenarios.peers import Peers
from gradsync.bench.scenarios.round_robin import RoundRobin
from gradsync.bench.scenarios.scaling import Scaling
from gradsync.bench.scenarios.skip_sync import SkipSync
from gradsync.bench.scenarios.time_to_loss import TimeToLoss
from gradsync.bench.scenarios.wire import Wire
from gradsync.errors import ConfigurationError

__all__ = ["SCENARIOS", "find_scenarios"]

SCENARIOS: tuple[Scenario, ...] = (
    Accumulation(),
    Overlap(),
    NextForward(),
    Compression(),
    TimeToLoss(),
    BucketSize(),
    SkipSync(),
    Scaling(),
    Convergence(),
    RoundRobin(),
    Wire(),
    Peers(),
    Faults(),
)
ALL = "all"


def find_scenarios(name: str) -> tuple[Scenario, ...]:
    """The one of that name, or all of them."""
    if name == ALL:
        return SCENARIOS
    found = tuple(scenario for scenario in SCENARIOS if scenario.name == name)
    if not found:
        names = ", ".join(scenario.name for scenario in SCENARIOS)
        raise ConfigurationError(f"there is no scenario {name!r}. There are: {names}; or say all")
    return found
