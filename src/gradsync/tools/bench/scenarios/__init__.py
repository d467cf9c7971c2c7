"""The scenarios, one per file, in the order in which they are run and shown."""

from gradsync.base.errors import ConfigurationError
from gradsync.tools.bench.scenario import Scenario
from gradsync.tools.bench.scenarios.accumulation import Accumulation
from gradsync.tools.bench.scenarios.bucket_size import BucketSize
from gradsync.tools.bench.scenarios.compression import Compression
from gradsync.tools.bench.scenarios.convergence import Convergence
from gradsync.tools.bench.scenarios.faults import Faults
from gradsync.tools.bench.scenarios.next_forward import NextForward
from gradsync.tools.bench.scenarios.overlap import Overlap
from gradsync.tools.bench.scenarios.peers import Peers
from gradsync.tools.bench.scenarios.round_robin import RoundRobin
from gradsync.tools.bench.scenarios.scaling import Scaling
from gradsync.tools.bench.scenarios.skip_sync import SkipSync
from gradsync.tools.bench.scenarios.time_to_loss import TimeToLoss
from gradsync.tools.bench.scenarios.wire import Wire

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
