"""What to expect of a step: see :mod:`gradsync.observe.plan`."""

from gradsync.observe.plan.network import EXACT, REDUCTIONS, Cost, Link, ReductionCost, Schedule, Topology, Transport
from gradsync.observe.plan.profile import BucketProfile, Jitter, StepProfile
from gradsync.observe.plan.simulator import SimulatedBucket, SimulatedStep, StepParts, simulate

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
    "Transport",
    "simulate",
]
