"""What to expect of a step: an event simulator over profiles of ranks, a wire and a schedule."""

from gradsync.plan.profile import BucketProfile, StepProfile
from gradsync.plan.schedule import EXACT, REDUCTIONS, ReductionCost, Schedule
from gradsync.plan.simulator import SimulatedBucket, SimulatedStep, StepParts, simulate
from gradsync.plan.stragglers import Jitter
from gradsync.plan.topology import Link, Topology
from gradsync.plan.wire import Cost, Wire

__all__ = [
    "EXACT",
    "REDUCTIONS",
    "BucketProfile",
    "Cost",
    "Jitter",
    "Link",
    "ReductionCost",
    "Schedule",
    "SimulatedBucket",
    "SimulatedStep",
    "StepParts",
    "StepProfile",
    "Topology",
    "Wire",
    "simulate",
]
