"""Predicts the time of a step: an event simulator over profiles of ranks, a link and a schedule."""

from gradsync.observe.plan.link_cost import Cost, Wire
from gradsync.observe.plan.profile import BucketProfile, StepProfile
from gradsync.observe.plan.schedule import EXACT, REDUCTIONS, ReductionCost, Schedule
from gradsync.observe.plan.simulator import SimulatedBucket, SimulatedStep, StepParts, simulate
from gradsync.observe.plan.stragglers import Jitter
from gradsync.observe.plan.topology import Link, Topology

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
