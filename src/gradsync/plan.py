"""What to expect of a step: see :mod:`gradsync.observe.plan`."""

from gradsync.observe.plan import (
    EXACT,
    REDUCTIONS,
    BucketProfile,
    Cost,
    Jitter,
    Link,
    ReductionCost,
    Schedule,
    SimulatedBucket,
    SimulatedStep,
    StepParts,
    StepProfile,
    Topology,
    Wire,
    simulate,
)

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
