"""Whether a recording contains enough to give advice."""

from gradsync.observe.charts.numbers import count, duration
from gradsync.observe.explain.merging import WARM_UP, Timeline
from gradsync.observe.explain.split import Split

__all__ = ["FEWEST_STEPS", "SHORTEST_STEP", "missing_evidence"]

# Of two ranks that are equally fast one comes last in all of n steps with a chance of 2 · 2⁻ⁿ: below a hundredth from
# eight on.
FEWEST_STEPS = 8
# Marks take about a microsecond each, some dozens a step, and threads wake up tens of microseconds late. Of a step of a
# millisecond that is 2 %, from which on a gain is worth a line.
SHORTEST_STEP = 1e-3


def missing_evidence(timeline: Timeline, split: Split) -> str:
    """Why nothing should be concluded from it, as a sentence; empty where something can."""
    known, step = len(timeline.steps), split.mean.step
    if known < FEWEST_STEPS:
        return (
            f"no advice: {count(known, 'usual step')} can be chance, and {FEWEST_STEPS} after the first {WARM_UP} are "
            "needed. Record more steps"
        )
    if step < SHORTEST_STEP:
        return (
            f"no advice: in steps of {duration(step)} what recording and waking threads take cannot be told from the "
            f"rest; they have to last {duration(SHORTEST_STEP)}"
        )
    return ""
